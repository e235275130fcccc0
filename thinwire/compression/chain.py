"""A chain of stages, `Sparsifier? > Quantizer? > coders`: encodes one vector as streams of bytes, and decodes them.

There are two ways to encode. `Chain.write` runs stage by stage and works for every chain. If the quantizer alone is the
chain and has a fused kernel (`Chain.writes`), `written` fills the frame directly: no stream is made first, and no value
is read twice. With a remembered vector (`Memory`), each part is compensated, encoded, decoded and updated while it is
in cache.

Invariant: both ways give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import cast

import numpy as np
from numpy.typing import NDArray

from thinwire.compression import frame
from thinwire.compression.base import (
    Contractive,
    ErrorBound,
    Everything,
    Quantizer,
    Scales,
    SeededSparsifier,
    Sparsifier,
    Support,
    Unbiased,
    chained,
)
from thinwire.compression.codecs.bitpack import packed_bytes
from thinwire.compression.codecs.casts import Identity
from thinwire.compression.frame import Stream
from thinwire.compression.memory import FusedEncoder, FusedFeedbackEncoder, Memory
from thinwire.compression.native.threads import each
from thinwire.compression.segmented import SegmentedCodec, TensorGroup
from thinwire.compression.streams import WORD, DecodedStreams, StreamCoders, read_word
from thinwire.core.layout import Layout, Slice
from thinwire.core.prng import Key, word32
from thinwire.core.types import State, Vector

PLAIN = Identity()
UNCODED = StreamCoders()


@dataclass(frozen=True)
class Chain:
    """A parsed chain: a sparsifier, a quantizer and coders.

    The streams of a frame are, in this order: the word of the key if the decoder needs it; indices if the chain sends
    them; symbols; scales if there are any. The quantizer encodes values divided by `divisor`; the decoder need not know
    it.
    """

    sparsifier: Sparsifier | None = None
    quantizer: Quantizer = PLAIN
    coded: StreamCoders = UNCODED
    divisor: float = 1.0

    @property
    def spec(self) -> str:
        """Return the canonical spec, without the coders that are always present."""
        stages = [self.sparsifier.spec] if self.sparsifier else []
        stages += [self.quantizer.spec] if self.quantizer != PLAIN or not stages else []
        return " > ".join(stages + self.coded.specs)

    def bind(self, layout: Layout) -> SegmentedCodec:
        """Return this chain for the segments of a layout, with all tensors of a segment in one group."""
        return SegmentedCodec(self.spec, layout, [[TensorGroup(self.placed(s.slices))] for s in layout.segments])

    def placed(self, slices: Sequence[Slice]) -> Chain:
        """Return this chain for a vector that holds these slices of tensors one after the other."""
        return self.over(tuple(accumulate((piece.size for piece in slices[:-1]), initial=0)))

    def over(self, starts: tuple[int, ...]) -> Chain:
        """Return this chain for a vector whose tensors begin at `starts`.

        The values that a sparsifier sends count as one tensor.
        """
        return self if self.sparsifier else replace(self, quantizer=self.quantizer.over(starts))

    def under_feedback(self) -> Chain:
        """Return the chain that encodes inside error feedback.

        The quantizer takes its own form for feedback. If it is still unbiased with omega >= 1, which is no contraction,
        the chain encodes x / (1 + omega): E||C(x) / (1 + omega) - x||^2 <= omega / (1 + omega) ||x||^2, so delta = 1 /
        (1 + omega) for any omega.
        """
        quantizer = self.quantizer.under_feedback()
        kind = quantizer.kind()
        divisor = 1 + kind.omega if isinstance(kind, Unbiased) and kind.omega >= 1 else 1.0
        return replace(self, quantizer=quantizer, divisor=divisor)

    @property
    def kind(self) -> ErrorBound:
        """Return the error bound of the whole chain."""
        inner = self.quantizer.kind() if self.divisor == 1 else Contractive(1 / self.divisor)
        return chained(self.sparsifier.kind(), inner) if self.sparsifier else inner

    @property
    def looks(self) -> bool:
        """Return True if `write` itself raises NonFiniteUpdate for NaN and infinity."""
        return self.sparsifier is not None and self.sparsifier.looks

    @property
    def seeded(self) -> bool:
        """Return True if the decoder needs the word."""
        return self.quantizer.seeded or (self.sparsifier is not None and self.sparsifier.seeded)

    def sent(self, size: int) -> int:
        """Return the largest number of values that the chain sends of `size`."""
        return self.sparsifier.count(size) if self.sparsifier else size

    def init(self) -> State:
        """Return the first state, which is empty: a chain keeps nothing between calls."""
        return {}

    @property
    def writes(self) -> bool:
        """Return True if a fused kernel writes the frame from the vector and refuses NaN and infinity."""
        plain = self.sparsifier is None and self.coded == UNCODED and self.divisor == 1
        return plain and writes(self.quantizer)

    @property
    def apart(self) -> bool:
        """Return True if parts of a vector can be encoded separately, so that `held` is available."""
        return self.writes and apart(self.quantizer)

    def written(self, x: Vector, key: Key, segment: int, bound: bytes) -> bytes:
        """Return the whole frame of one vector, with the same bytes as `write`. Requires `writes`."""
        return written(self.quantizer, x, self._word(key, segment), bound)

    def held(self, x: Vector, key: Key, segment: int, bound: bytes, held: Memory, state: State) -> bytes:
        """Return the frame of `x` compensated by `held`, and overwrite `x` with the updated memory.

        Requires `apart`.
        """
        del state
        return written(self.quantizer, x, self._word(key, segment), bound, held)

    def _word(self, key: Key, segment: int, group: int = 0) -> int:
        """Return the seed for rounding one group; each group of a segment has its own."""
        stage = self.quantizer.spec if group == 0 else f"{self.quantizer.spec}#{group}"
        return word32(key, stage, segment)

    def write(
        self, x: Vector, key: Key, segment: int, group: int = 0, state: State | None = None
    ) -> tuple[list[Stream], Support, DecodedStreams]:
        """Encode one vector, the `group`-th of its segment.

        Return its streams, the support within the vector, and the content that `read` would find in the streams.
        """
        streams, word = list[Stream](), self._word(key, segment, group)
        values, indices = x, None
        if self.seeded:
            streams.append(Stream(WORD.pack(word)))
        if self.sparsifier is not None:
            indices, values = self.sparsifier.select(x, word)
            if not self.sparsifier.seeded:
                streams.append(self.coded.indices(indices, self.sparsifier))
        if self.divisor != 1:
            values = values * np.float32(1 / self.divisor)
        symbols, scales = self.quantizer.quantize(values, word)
        streams.append(self.coded.symbols(symbols, self.quantizer))
        if scales.size:
            streams.append(self.coded.scales(scales))
        support = Everything.SENT if indices is None else indices
        return streams, support, DecodedStreams(self.quantizer, indices, symbols, scales, word)

    def streams(self, size: int) -> int:
        """Return the number of streams of a vector of `size`."""
        places = self.sparsifier is not None and not self.sparsifier.seeded
        return 1 + self.seeded + places + (self.quantizer.scales_count(self.sent(size)) > 0)

    def read(self, streams: list[Stream], size: int) -> DecodedStreams:
        """Decode the streams without dequantizing; raise BadPayload before anything else happens."""
        rest = iter(streams)
        word = read_word(next(rest)) if self.seeded else 0
        indices, sent = None, self.sent(size)
        drawn = self.sparsifier is not None and self.sparsifier.seeded
        if self.sparsifier is not None and not drawn:
            indices = self.coded.read_indices(next(rest), size, self.sparsifier)
            sent = indices.size
        symbols = self.coded.read_symbols(next(rest), sent, self.quantizer)
        if self.sparsifier is not None and isinstance(symbols, np.ndarray):
            symbols = np.require(symbols, requirements="A")  # few values, which are read more than once: aligned
        scales: Scales = np.zeros(0, self.quantizer.scales_dtype)
        if count := self.quantizer.scales_count(sent):
            scales = self.coded.read_scales(next(rest), count, self.quantizer)
        self.quantizer.check(symbols, scales)
        if drawn:  # last, after all checks: no stream limits the number of these indices
            indices = cast("SeededSparsifier", self.sparsifier).places(size, word)
        return DecodedStreams(self.quantizer, indices, symbols, scales, word)

    def add(
        self, read: DecodedStreams, weight: float | None, into: Vector, start: int, stop: int, shift: int = 0
    ) -> None:
        """Add the decoded values in start .. stop to `into`; see `DecodedStreams.add`."""
        read.add(weight, into, start, stop, shift)

    def max_bytes(self, size: int) -> int:
        """Return the largest number of bytes of the streams of a vector of `size`."""
        sent, quantizer, coded = self.sent(size), self.quantizer, self.coded
        indices = 0
        if self.sparsifier is not None and not self.sparsifier.seeded:
            indices = coded.most_of_indices(size, self.sparsifier)
        scales = quantizer.scales_count(sent) * quantizer.scales_dtype.itemsize
        return WORD.size * self.seeded + indices + coded.most_of_symbols(sent, quantizer) + scales


CACHED = 1 << 18  # elements: of three passes over these, the last two find them in the second- or third-level cache


def writes(quantizer: Quantizer) -> bool:
    """Return True if a fused kernel writes this quantizer's symbols and raises NonFiniteUpdate for NaN and infinity."""
    return isinstance(quantizer, FusedEncoder) and quantizer.writes


def apart(quantizer: Quantizer) -> bool:
    """Return True if this quantizer encodes parts of a vector separately, which the fused path with memory needs."""
    return writes(quantizer) and (_feeds(quantizer) or (isinstance(quantizer, FusedEncoder) and quantizer.apart))


def _feeds(quantizer: Quantizer) -> bool:
    return isinstance(quantizer, FusedFeedbackEncoder) and quantizer.feeds


def written(quantizer: Quantizer, x: Vector, word: int, bound: bytes, held: Memory | None = None) -> bytes:
    """Return the whole frame of one vector; with `held`, overwrite `x` with the updated memory."""
    assert isinstance(quantizer, FusedEncoder)
    scales: Scales = np.empty(quantizer.scales_count(x.size), quantizer.scales_dtype)
    symbols_bytes = packed_bytes(x.size, quantizer.bits)
    lengths = [WORD.size] * quantizer.seeded + [symbols_bytes] + [scales.nbytes] * (scales.size > 0)
    payload, places = frame.blank(bound, lengths)
    if quantizer.seeded:
        places.pop(0)[:] = np.frombuffer(WORD.pack(word), np.uint8)
    if held is None:
        quantizer.write(x, word, places[0], scales)
    elif isinstance(quantizer, FusedFeedbackEncoder) and quantizer.feeds:
        quantizer.write_held(x, held, word, places[0], scales)
    else:
        _write_parts(quantizer, x, held, word, places[0], scales)
    if scales.size:
        places[1][:] = scales.view(np.uint8)
    return payload


def _write_parts(
    quantizer: Quantizer, x: Vector, held: Memory, word: int, symbols: NDArray[np.uint8], scales: Scales
) -> None:
    assert isinstance(quantizer, FusedEncoder)

    def part(start: int, stop: int) -> None:
        for a, b in cached(start, stop):
            here = slice(a, b)
            held.before(x, here)
            packed = symbols[packed_bytes(a, quantizer.bits) : packed_bytes(b, quantizer.bits)]
            own = scales[quantizer.scales_count(a) : quantizer.scales_count(b)]
            quantizer.write(x[here], word, packed, own, a)
            held.after(x, here)
            found = StreamCoders().read_symbols(Stream(packed.data), b - a, quantizer)
            # Signs are a hash of index ^ word. `cached` gives parts in which a + i == a ^ i, so the part at a, counted
            # from 0, has the seed word ^ a.
            DecodedStreams(quantizer, None, found, own, word ^ a).add(held.weight, x[here], 0, b - a)
            held.settled(x, here)

    each(0, x.size, part)


def cached(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of parts that stay in cache while they are encoded.

    No part is longer than the lowest set bit of its start, so that start + i == start ^ i within it.

    >>> list(cached(3 << 16, 1 << 19)) == [(3 << 16, 1 << 18), (1 << 18, 1 << 19)]
    True
    """
    while start < stop:
        end = min(start + min(start & -start or CACHED, CACHED), stop)
        yield start, end
        start = end
