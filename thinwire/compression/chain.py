"""A chain of stages, `Sparsifier? > Quantizer? > coders`, and a chain bound to a layout.

`Chain` encodes one vector as streams of bytes, and decodes them. `Chain.write` goes stage by stage and works for every
chain. If the quantizer alone is the chain and has fused kernels, `Chain.encode_fused` fills the frame directly.

`SegmentedCodec` has the tensors of each segment in groups: one chain a group, all streams in one frame.

Invariant: both ways give the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from thinwire.compression import frame
from thinwire.compression.base import (
    ALL,
    Contractive,
    Encoded,
    ErrorBound,
    Everything,
    Indices,
    NoGuarantee,
    Quantizer,
    Scales,
    SeededSparsifier,
    Sparsifier,
    Support,
    Unbiased,
    chained,
    contraction,
    packed_bytes,
    shrinkage,
    shrunk,
)
from thinwire.compression.frame import WORD, DecodedStreams, Stream, StreamCoders, read_word
from thinwire.compression.native import require_vector, require_writable
from thinwire.compression.vector_ops import AddDecoded, Memory, require_finite, spanned
from thinwire.core.errors import BadPayload
from thinwire.core.prng import word32

if TYPE_CHECKING:
    from thinwire.compression.codecs.powersgd import LowRank
    from thinwire.core.layout import Layout, Slice
    from thinwire.core.prng import Key
    from thinwire.core.types import Arrived, State, Vector

PLAIN = "identity"  # the quantizer of a chain that names none, which a spec leaves out
UNCODED = StreamCoders()


@dataclass(frozen=True)
class Chain:
    """A parsed chain: a sparsifier, a quantizer and coders.

    The streams of a frame are, in this order: the word of the key if the decoder needs it; indices if the chain sends
    them; symbols; scales if there are any. The quantizer encodes values divided by `divisor`; the decoder need not know
    it.
    """

    quantizer: Quantizer
    sparsifier: Sparsifier | None = None
    coded: StreamCoders = UNCODED
    divisor: float = 1.0

    @property
    def spec(self) -> str:
        """Return the canonical spec, without the coders that are always present."""
        stages = [self.sparsifier.spec] if self.sparsifier else []
        stages += [self.quantizer.spec] if self.quantizer.spec != PLAIN or not stages else []
        return " > ".join(stages + self.coded.specs)

    def bind(self, layout: Layout) -> SegmentedCodec:
        """Return this chain for the segments of a layout, with all tensors of a segment in one group."""
        return SegmentedCodec(self.spec, layout, [[TensorGroup(self.placed(s.slices))] for s in layout.segments])

    def placed(self, slices: Sequence[Slice]) -> Chain:
        """Return this chain for a vector that holds these slices of tensors one after the other."""
        return self.restart_scales_at(tuple(accumulate((piece.size for piece in slices[:-1]), initial=0)))

    def restart_scales_at(self, starts: tuple[int, ...]) -> Chain:
        """Return this chain for a vector whose tensors begin at `starts`.

        The values that a sparsifier sends count as one tensor.
        """
        return self if self.sparsifier else replace(self, quantizer=self.quantizer.restart_scales_at(starts))

    def under_feedback(self) -> Chain:
        """Return the chain that encodes inside error feedback.

        The quantizer takes its own form for feedback. If it is still unbiased and no contraction, the chain divides by
        its `shrinkage`.
        """
        quantizer = self.quantizer.under_feedback()
        return replace(self, quantizer=quantizer, divisor=shrinkage(quantizer.kind()))

    @property
    def kind(self) -> ErrorBound:
        """Return the error bound of the whole chain."""
        inner = shrunk(self.quantizer.kind(), self.divisor)
        return chained(self.sparsifier.kind(), inner) if self.sparsifier else inner

    @property
    def rejects_non_finite(self) -> bool:
        """Return True if `write` itself raises NonFiniteUpdate for NaN and infinity."""
        return (self.sparsifier or self.quantizer).rejects_non_finite

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

    def encode_fused(
        self, x: Vector, memory: Memory | None, state: State, key: Key, segment: int, bound: bytes
    ) -> bytes | None:
        """Return the frame of `x`, whose quantizer's kernels fill it: no stream is made, and no value is read twice.

        Return None if the chain is not just a quantizer with fused kernels: nothing was done. With a memory, encode `x`
        compensated by it and overwrite `x` with the updated memory. Without one, `x` is not changed. `state` is
        replaced in place. NaN and infinity raise NonFiniteUpdate.

        Invariant: the frame, the updated memory and the state have the bits of the steps of `write`.
        """
        quantizer, fused = self.quantizer, self.quantizer.fused
        if fused is None or quantizer.entropy_coded or self.sparsifier is not None:
            return None
        if self.coded != UNCODED or self.divisor != 1:
            return None
        word = self.word(key, segment)
        scales: Scales = np.empty(quantizer.scales_count(x.size), quantizer.scales_dtype)
        symbols_bytes = packed_bytes(x.size, quantizer.bits)
        lengths = [WORD.size] * quantizer.seeded + [symbols_bytes] + [scales.nbytes] * (scales.size > 0)
        payload, places = frame.blank(bound, lengths)
        if quantizer.seeded:
            places.pop(0)[:] = np.frombuffer(WORD.pack(word), np.uint8)
        fused(x, memory, word, places[0], scales)
        if scales.size:
            places[1][:] = scales.view(np.uint8)
        return payload

    def word(self, key: Key, segment: int, group: int = 0) -> int:
        """Return the seed for rounding one group; each group of a segment has its own."""
        stage = self.quantizer.spec if group == 0 else f"{self.quantizer.spec}#{group}"
        return word32(key, stage, segment)

    def write(
        self, x: Vector, key: Key, segment: int, group: int = 0, state: State | None = None
    ) -> tuple[list[Stream], Support, DecodedStreams]:
        """Encode one vector, the `group`-th of its segment.

        Return its streams, the support within the vector, and the content that `read` would find in the streams.
        """
        streams, word = list[Stream](), self.word(key, segment, group)
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


@dataclass(frozen=True)
class SegmentedCodec:
    """A bound codec of chains; see `BoundCodec`. Its state is the state of its chains, which is empty for most."""

    spec: str
    layout: Layout
    groups: Sequence[Sequence[TensorGroup]]  # the groups of each segment

    @cached_property
    def kind(self) -> ErrorBound:
        """Return the error bound of all groups together; parts of a vector contract as the weakest of them does."""
        kinds = [group.chain.kind for groups in self.groups for group in groups]
        if any(isinstance(kind, NoGuarantee) for kind in kinds):
            return NoGuarantee()
        unbiased = [kind.omega for kind in kinds if isinstance(kind, Unbiased)]
        if unbiased and len(unbiased) == len(kinds):
            return Unbiased(max(unbiased))
        return Contractive(min((contraction(kind) for kind in kinds), default=1.0))

    @cached_property
    def _hashes(self) -> list[bytes]:
        return [frame.codec_hash(self.spec, self.layout.digest, s.index) for s in self.layout.segments]

    @cached_property
    def _streams(self) -> list[list[int]]:
        """Return how many streams each group of each segment has in a frame."""
        segments = zip(self.layout.segments, self.groups, strict=True)
        return [[group.chain.streams(group.size(s.size)) for group in groups] for s, groups in segments]

    @cached_property
    def _most_bytes(self) -> list[int]:
        found = []
        for segment, groups in zip(self.layout.segments, self.groups, strict=True):
            parts = [(group.chain, group.size(segment.size)) for group in groups]
            further = sum(chain.streams(n) for chain, n in parts) - 1
            found.append(frame.MAX_OVERHEAD + 4 * further + sum(chain.max_bytes(n) for chain, n in parts))
        return found

    def _size(self, segment: int) -> int:
        return self.layout.segments[segment].size

    def under_feedback(self) -> SegmentedCodec:
        """Return the codec that encodes inside error feedback. Its frames have the same format."""
        return replace(self, groups=[[replace(g, chain=g.chain.under_feedback()) for g in gs] for gs in self.groups])

    def init(self, segment: int = 0) -> State:
        """Return the first state of a segment."""
        return {name: array for group in self.groups[segment] for name, array in group.chain.init().items()}

    def encode(self, x: Vector, state: State, key: Key, segment: int = 0) -> Encoded:
        """Encode a segment without changing `x`; see `BoundCodec.encode`."""
        require_vector(x, self._size(segment))
        if (fused := self._fused(x, None, state, key, segment)) is not None:
            return fused
        if not all(group.chain.rejects_non_finite for group in self.groups[segment]):
            require_finite(x)
        return self._encoded(x, state, key, segment)[0]

    def encode_with_memory(self, x: Vector, memory: Memory, state: State, key: Key, segment: int = 0) -> Encoded:
        """Encode `x` compensated by `memory`, and overwrite `x` with the updated memory."""
        require_writable(x, self._size(segment))
        require_vector(memory.vector, self._size(segment))  # a kernel gets only its address
        if (fused := self._fused(x, memory, state, key, segment)) is not None:
            return fused

        def encode(p: Vector) -> tuple[Encoded, AddDecoded]:
            encoded, found = self._encoded(p, state, key, segment)
            read = [(group, part.apart_from(p)) for group, part in found]
            return encoded, lambda weight, into: self._add(read, weight, into, 0, into.size)

        return memory.encode_in_steps(x, encode)

    def _fused(self, x: Vector, memory: Memory | None, state: State, key: Key, segment: int) -> Encoded | None:
        """Encode by the only group's `encode_fused`; return None if there is no such way, and nothing was done."""
        (group, *others) = self.groups[segment]
        if others or group.pieces:
            return None
        state = dict(state)
        payload = group.chain.encode_fused(x, memory, state, key, segment, self._hashes[segment])
        return None if payload is None else Encoded(payload, state, Everything.SENT)

    def _encoded(
        self, x: Vector, state: State, key: Key, segment: int
    ) -> tuple[Encoded, list[tuple[TensorGroup, Any]]]:
        """Return a frame, and the content that `_read` would find in it."""
        streams, supports, reads, state = [], list[Support](), [], dict(state)
        for number, group in enumerate(self.groups[segment]):
            written, support, read = group.chain.write(group.gather(x), key, segment, number, state)
            streams += written
            reads.append((group, read))
            if group.pieces:
                places = group.places()
                support = places if support is Everything.SENT else places[support]
            supports.append(support)
        return Encoded(frame.pack(self._hashes[segment], streams), state, _joined(supports)), reads

    def _read(self, payload: Arrived, segment: int) -> list[tuple[TensorGroup, Any]]:
        size, groups, counts = self._size(segment), self.groups[segment], self._streams[segment]
        if len(payload) > self.max_bytes(segment):
            raise BadPayload(f"a frame of {len(payload)} bytes", why=f"at most {self.max_bytes(segment)} can be right")
        streams = iter(frame.unpack(payload, self._hashes[segment], sum(counts)))
        return [
            (group, group.chain.read([next(streams) for _ in range(count)], group.size(size)))
            for group, count in zip(groups, counts, strict=True)
        ]

    def check(self, payload: Arrived, segment: int = 0) -> None:
        """Raise BadPayload unless the payload is a legal frame of this segment."""
        self._read(payload, segment)

    def decode_add(self, payload: Arrived, weight: float, into: Vector, span: slice = ALL, segment: int = 0) -> None:
        """Add `weight` times the decoded values in `span` to `into`; see `BoundCodec.decode_add`."""
        start, stop = spanned(span, self._size(segment))
        require_writable(into, self._size(segment))
        self._add(self._read(payload, segment), weight, into, start, stop)

    def decode(self, payload: Arrived, segment: int = 0) -> Vector:
        """Return the decoded segment.

        A lossless codec returns the bits that were encoded. Adding to zeros would not: -0 + 0 is 0.
        """
        read = self._read(payload, segment)
        out: Vector = np.zeros(self._size(segment), np.float32)
        self._add(read, None, out, 0, out.size)
        return out

    def _add(
        self, read: list[tuple[TensorGroup, Any]], weight: float | None, into: Vector, start: int, stop: int
    ) -> None:
        with np.errstate(over="ignore", invalid="ignore"):  # the user of the sum checks for overflow
            for group, found in read:
                if not group.pieces:
                    group.chain.add(found, weight, into, start, stop)
                    continue
                at = 0
                for piece in group.pieces:
                    # The group's own coordinates at .. at + length are the segment's piece.start .. piece.stop.
                    first, last = at + max(start, piece.start) - piece.start, at + min(stop, piece.stop) - piece.start
                    if first < last:
                        group.chain.add(found, weight, into[piece.start : piece.stop], first, last, shift=at)
                    at += piece.stop - piece.start

    def max_bytes(self, segment: int = 0) -> int:
        """Return the largest size of a legal frame, in bytes."""
        return self._most_bytes[segment]


def _joined(supports: list[Support]) -> Support:
    """Return the support of all groups of a segment, which divide its coordinates among them."""
    indices = [support for support in supports if not isinstance(support, Everything)]
    if len(indices) < len(supports):
        return Everything.SENT
    return indices[0] if len(indices) == 1 else np.sort(np.concatenate(indices))


@dataclass(frozen=True)
class TensorGroup:
    """The parts of a segment that one chain encodes together. No `pieces` means the whole segment as it is."""

    chain: Chain | LowRank
    pieces: tuple[slice, ...] = ()

    def size(self, whole: int) -> int:
        """Return the number of values of the group in a segment of `whole` values."""
        return sum(p.stop - p.start for p in self.pieces) if self.pieces else whole

    def gather(self, x: Vector) -> Vector:
        """Return the group's values of a segment as one vector; a copy if there are pieces."""
        return np.concatenate([x[piece] for piece in self.pieces]) if self.pieces else x

    def places(self) -> Indices:
        """Return the index within the segment of each element of the gathered vector."""
        return np.concatenate([np.arange(p.start, p.stop, dtype=np.int64) for p in self.pieces])
