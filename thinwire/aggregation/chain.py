"""A chain of stages, `Sparsifier? > Quantizer? > coders`: one vector to its streams and back."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import cast

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation import frame
from thinwire.aggregation.bound import Bound, Group
from thinwire.aggregation.codec import (
    Adds,
    Drawn,
    Everything,
    Feeds,
    Indices,
    Kind,
    Quantizer,
    Scales,
    Sparsifier,
    Support,
    Symbols,
    Writes,
    chained,
)
from thinwire.aggregation.coders.compressor import Last
from thinwire.aggregation.coders.delta import Delta
from thinwire.aggregation.coders.pack import Pack, packed_bytes
from thinwire.aggregation.coders.rice import Rice
from thinwire.aggregation.frame import Stream
from thinwire.aggregation.held import Held
from thinwire.aggregation.methods.identity import Identity
from thinwire.aggregation.native import gaps as native
from thinwire.aggregation.native.threads import each
from thinwire.aggregation.vectors import blocks
from thinwire.core.errors import BadPayload
from thinwire.core.keys import Key, word32
from thinwire.core.layout import Layout, Slice
from thinwire.core.types import State, Vector

PLAIN = Identity()
WORD = struct.Struct("<I")
CACHED = 1 << 18  # elements: of three passes over so many the last two find them in the second or third level


@dataclass(frozen=True)
class Read:
    """A frame's content before it is decoded: nothing of the size of the vector has been allocated."""

    indices: Indices | None  # None: every coordinate
    symbols: Symbols
    scales: Scales
    word: int

    def apart_from(self, x: Vector) -> Read:
        """The same where x is written to: what identity makes of x is x itself."""
        return replace(self, symbols=self.symbols.copy()) if np.may_share_memory(self.symbols, x) else self


@dataclass(frozen=True)
class Chain:
    """What `parse` gives. A frame's streams: a word of the key if it is needed to decode, indices if they are sent,
    symbols, and scales if there are any.
    """

    sparsifier: Sparsifier | None = None
    quantizer: Quantizer = PLAIN
    rice: bool = False
    last: Last | None = None

    @property
    def spec(self) -> str:
        """Canonical: what is always there is left out."""
        stages = [self.sparsifier.spec] if self.sparsifier else []
        stages += [self.quantizer.spec] if self.quantizer != PLAIN or not stages else []
        stages += [Rice.spec] * self.rice + ([self.last.spec] if self.last else [])
        return " > ".join(stages)

    def bind(self, layout: Layout) -> Bound:
        return Bound(self.spec, layout, [[Group(self.placed(s.slices))] for s in layout.segments])

    def placed(self, slices: Sequence[Slice]) -> Chain:
        """This chain for a vector in which these slices of tensors stand one after the other."""
        return self.over(tuple(accumulate((piece.size for piece in slices[:-1]), initial=0)))

    def over(self, starts: tuple[int, ...]) -> Chain:
        """This chain for a vector whose tensors begin at these places; what a sparsifier sends counts as one tensor."""
        return self if self.sparsifier else replace(self, quantizer=self.quantizer.over(starts))

    def under_feedback(self) -> Chain:
        return replace(self, quantizer=self.quantizer.under_feedback())

    @property
    def kind(self) -> Kind:
        inner = self.quantizer.kind()
        return chained(self.sparsifier.kind(), inner) if self.sparsifier else inner

    @property
    def writes(self) -> bool:
        """Whether a kernel writes what it makes of a vector straight into a frame, and refuses NaN and infinity."""
        through = self.sparsifier is None and not self.rice and not self.last
        return through and isinstance(self.quantizer, Writes) and self.quantizer.writes

    def written(self, x: Vector, key: Key, segment: int, bound: bytes, held: Held | None = None) -> bytes:
        """The whole frame of one vector, where the chain `writes`: the bytes that `write` leads to."""
        quantizer, size = self.quantizer, x.size
        assert isinstance(quantizer, Writes)
        scales: Scales = np.empty(quantizer.scales_count(size), quantizer.scales_dtype)
        lengths = [WORD.size] * self.seeded + [packed_bytes(size, quantizer.bits)] + [scales.nbytes] * (scales.size > 0)
        payload, places = frame.blank(bound, lengths)
        word = word32(key, stage(quantizer, 0), segment)
        if self.seeded:
            places.pop(0)[:] = np.frombuffer(WORD.pack(word), np.uint8)
        if held is None:
            quantizer.write(x, word, places[0], scales)
        else:
            self._write_held(x, word, places[0], scales, held)
        if scales.size:
            places[1][:] = scales.view(np.uint8)
        return payload

    def held(self, x: Vector, key: Key, segment: int, bound: bytes, held: Held, state: State) -> bytes:
        """The frame of x with what is held (see `Held`), where a chain encodes `apart`: each part is read once."""
        del state
        return self.written(x, key, segment, bound, held)

    def _write_held(self, x: Vector, word: int, symbols: NDArray[np.uint8], scales: Scales, held: Held) -> None:
        quantizer = self.quantizer
        assert isinstance(quantizer, Writes)
        if isinstance(quantizer, Feeds) and quantizer.feeds:
            quantizer.write_held(x, held, word, symbols, scales)
            return

        def part(start: int, stop: int) -> None:
            for a, b in cached(start, stop):
                here = slice(a, b)
                held.before(x, here)
                packed = symbols[packed_bytes(a, quantizer.bits) : packed_bytes(b, quantizer.bits)]
                own = scales[quantizer.scales_count(a) : quantizer.scales_count(b)]
                quantizer.write(x[here], word, packed, own, a)
                held.after(x, here)
                found = self._read_symbols(Stream(packed.data), b - a)
                # Signs are drawn by index ^ word. No index within the part has a bit of a's, so a + i is a ^ i: counted
                # from a they are drawn by word ^ a.
                self.add(Read(None, found, own, word ^ a), held.weight, x[here], 0, b - a)
                held.settled(x, here)

        each(0, x.size, part)

    @property
    def looks(self) -> bool:
        """Whether `write` itself refuses NaN and infinity."""
        return self.sparsifier is not None and self.sparsifier.looks

    @property
    def apart(self) -> bool:
        """Whether parts of a vector can be encoded by themselves, so that there is `held`."""
        quantizer = self.quantizer
        feeds = isinstance(quantizer, Feeds) and quantizer.feeds
        return self.writes and (feeds or (isinstance(quantizer, Writes) and quantizer.apart))

    @property
    def seeded(self) -> bool:
        """Whether the decoder needs the word."""
        return self.quantizer.seeded or (self.sparsifier is not None and self.sparsifier.seeded)

    def sent(self, size: int) -> int:
        """How many of `size` values are sent, at the most."""
        return self.sparsifier.count(size) if self.sparsifier else size

    def init(self) -> State:
        """It remembers nothing."""
        return {}

    def write(
        self, x: Vector, key: Key, segment: int, group: int = 0, state: State | None = None
    ) -> tuple[list[Stream], Support, Read]:
        """The streams for one vector, the segment's `group`-th, which coordinates they hold, and what `read` finds."""
        streams: list[Stream] = []
        support: Support = Everything.SENT
        values, word = x, word32(key, stage(self.quantizer, group), segment)
        if self.seeded:
            streams.append(Stream(WORD.pack(word)))
        if self.sparsifier is not None:
            support, values = self.sparsifier.select(x, word)
            if not self.sparsifier.seeded:
                streams.append(self._stream(self._write_indices(support)))
        symbols, scales = self.quantizer.quantize(values, word)
        streams.append(self._stream(self._write_symbols(symbols)))
        if scales.size:
            streams.append(self._stream(Pack().pack(scales)))
        return streams, support, Read(None if support is Everything.SENT else support, symbols, scales, word)

    def _write_indices(self, indices: Indices) -> bytes:
        assert self.sparsifier is not None
        count = b"" if self.sparsifier.fixed else WORD.pack(indices.size)
        return count + (Rice().pack_indices(indices) if self.rice else Delta().pack(indices))

    def _write_symbols(self, symbols: Symbols) -> bytes | memoryview:
        bits = self.quantizer.bits
        return Rice().pack_symbols(symbols, bits) if self.rice and bits <= 8 else Pack().pack(symbols, bits)

    def _stream(self, data: bytes | memoryview) -> Stream:
        return self.last.shrink(data) if self.last else Stream(data)

    def streams(self, size: int) -> int:
        """How many streams a frame of a vector of `size` has."""
        places = self.sparsifier is not None and not self.sparsifier.seeded
        return 1 + self.seeded + places + (self.quantizer.scales_count(self.sent(size)) > 0)

    def read(self, streams: list[Stream], size: int) -> Read:
        """Undo the coders and check everything; `BadPayload` before anything else happens."""
        rest = iter(streams)
        word = self._read_word(next(rest)) if self.seeded else 0
        drawn = self.sparsifier is not None and self.sparsifier.seeded
        indices = None if self.sparsifier is None or drawn else self._read_indices(rest, size)
        sent = self.sent(size) if indices is None else indices.size
        symbols = self._read_symbols(next(rest), sent)
        if self.sparsifier is not None and isinstance(symbols, np.ndarray):
            symbols = np.require(symbols, requirements="A")  # they are few, and read more than once
        dtype, count = self.quantizer.scales_dtype, self.quantizer.scales_count(sent)
        scales: Scales = np.zeros(0, dtype)
        if count:
            scales = Pack().unpack(self._bytes(next(rest), count * dtype.itemsize), count, dtype)
        self.quantizer.check(symbols, scales)
        if drawn:  # last: no stream says how many they are
            indices = cast("Drawn", self.sparsifier).places(size, word)
        return Read(indices, symbols, scales, word)

    def _read_word(self, stream: Stream) -> int:
        if len(stream.data) != WORD.size or stream.compressed:
            raise BadPayload(f"a word of {len(stream.data)} bytes", why="it has 4")
        return int(WORD.unpack(stream.data)[0])

    def _read_indices(self, streams: Iterator[Stream], size: int) -> Indices:
        assert self.sparsifier is not None
        most = self.sparsifier.count(size)
        data = memoryview(self._bytes(next(streams), self._indices_bytes(most, size)))
        if not self.sparsifier.fixed:
            least = min(1, size)  # the largest is always sent, where there is one
            if len(data) < WORD.size or not least <= WORD.unpack(data[: WORD.size])[0] <= most:
                raise BadPayload("a number of indices that cannot be", why=f"it is {least} to {most}")
            most, data = int(WORD.unpack(data[: WORD.size])[0]), data[WORD.size :]
        return Rice().unpack_indices(data, most, size) if self.rice else Delta().unpack(data, most, size)

    def _read_symbols(self, stream: Stream, sent: int) -> Symbols:
        bits = self.quantizer.bits
        data = self._bytes(stream, self._symbols_bytes(sent))
        if self.rice and bits <= 8:
            return Rice().unpack_symbols(data, sent, bits)
        if bits < 8 and isinstance(self.quantizer, Adds):
            return cast("Symbols", Pack().held(data, sent, bits))  # what it may do to them is in `Adds`
        return Pack().unpack(data, sent, self.quantizer.symbols_dtype, bits)

    def _bytes(self, stream: Stream, most: int) -> bytes | memoryview:
        if self.last is None:
            if stream.compressed:
                raise BadPayload("a compressed stream", why="the codec has no compressor")
            return stream.data
        return self.last.grow(stream, most)

    def add(self, read: Read, weight: float | None, into: Vector, start: int, stop: int, shift: int = 0) -> None:
        """into[start - shift : stop - shift] += weight * decoded[start:stop], in work proportional to what was sent.

        With no weight the values replace what stands there.
        """
        factor = np.float32(1 if weight is None else weight)
        if read.indices is None and isinstance(self.quantizer, Adds):
            here, adds, symbols, scales = slice(start, stop), weight is not None, read.symbols, read.scales
            if self.quantizer.add(symbols, scales, here, read.word, factor, adds, into[start - shift : stop - shift]):
                return
        first, last = start, stop
        if read.indices is not None:
            first, last = (int(i) for i in np.searchsorted(read.indices, [start, stop]))
        for a, b in blocks(last, start=first):
            here = slice(a, b)
            scaled = self.quantizer.dequantize(read.symbols, read.scales, here, read.word)
            if read.indices is not None and native.sparse_add(
                read.indices[here], scaled, factor, shift, weight is not None, into
            ):
                continue
            if factor != 1:
                scaled = scaled * factor
            places: slice | Indices = slice(a - shift, b - shift)
            if read.indices is not None:
                places = read.indices[here] - shift  # they rise strictly: none stands twice
            if weight is None:
                into[places] = scaled
            else:
                into[places] += scaled

    def max_bytes(self, size: int) -> int:
        """The most bytes that the streams of a vector of `size` can have."""
        sent = self.sent(size)
        scales = self.quantizer.scales_count(sent) * self.quantizer.scales_dtype.itemsize
        indices = self._indices_bytes(sent, size) if self.sparsifier and not self.sparsifier.seeded else 0
        return WORD.size * self.seeded + indices + self._symbols_bytes(sent) + scales

    def _indices_bytes(self, most: int, size: int) -> int:
        assert self.sparsifier is not None
        count = 0 if self.sparsifier.fixed else WORD.size
        return count + (Rice().max_index_bytes(most, size) if self.rice else Delta().max_bytes(most, size))

    def _symbols_bytes(self, sent: int) -> int:
        bits = self.quantizer.bits
        return Rice().max_symbol_bytes(sent, bits) if self.rice and bits <= 8 else packed_bytes(sent, bits)


def cached(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """(from, to) of what is worked on while it is in cache: none longer than its start's lowest bit says.

    >>> list(cached(3 << 16, 1 << 19)) == [(3 << 16, 1 << 18), (1 << 18, 1 << 19)]
    True
    """
    while start < stop:
        end = min(start + min(start & -start or CACHED, CACHED), stop)
        yield start, end
        start = end


def stage(quantizer: Quantizer, group: int) -> str:
    """What the rounding of one group draws by: groups of a segment draw apart from each other."""
    return quantizer.spec if group == 0 else f"{quantizer.spec}#{group}"
