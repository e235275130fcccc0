"""A chain of stages, `Sparsifier? > Quantizer? > coders`: one vector to its streams and back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from thinwire.aggregation.bound import Bound, Group
from thinwire.aggregation.cast import Identity
from thinwire.aggregation.codec import (
    Everything,
    Indices,
    Kind,
    Quantizer,
    Scales,
    Sparsifier,
    Support,
    Symbols,
    blocks,
    chained,
)
from thinwire.aggregation.coders import Delta, Pack, Zstd
from thinwire.aggregation.frame import Stream
from thinwire.core.errors import BadPayload
from thinwire.core.keys import Key, word32
from thinwire.core.layout import Layout
from thinwire.core.types import Vector

PLAIN = Identity()


@dataclass(frozen=True)
class Read:
    """A frame's content before it is decoded: nothing of the size of the vector has been allocated."""

    indices: Indices | None  # None: every coordinate
    symbols: Symbols
    scales: Scales


@dataclass(frozen=True)
class Chain:
    """What `parse` gives. A frame's streams: indices if there is a sparsifier, symbols, scales if there are any."""

    spec: str
    sparsifier: Sparsifier | None = None
    quantizer: Quantizer = PLAIN
    zstd: bool = False

    def bind(self, layout: Layout) -> Bound:
        return Bound(self.spec, layout, [[Group(self)] for _ in layout.segments])

    @property
    def kind(self) -> Kind:
        inner = self.quantizer.kind()
        return chained(self.sparsifier.kind(), inner) if self.sparsifier else inner

    def sent(self, size: int) -> int:
        """How many of `size` values are sent."""
        return self.sparsifier.count(size) if self.sparsifier else size

    def write(self, x: Vector, key: Key, segment: int) -> tuple[list[Stream], Support]:
        """The streams for one vector, and which coordinates they hold."""
        streams: list[Stream] = []
        support: Support = Everything.SENT
        values = x
        if self.sparsifier is not None:
            support = self.sparsifier.select(x)
            values = x[support]
            streams.append(self._stream(Delta().pack(support)))
        symbols, scales = self.quantizer.quantize(values, word32(key, self.quantizer.name, segment))
        streams.append(self._stream(Pack().pack(symbols)))
        if self.quantizer.scales_count(values.size):
            streams.append(self._stream(Pack().pack(scales)))
        return streams, support

    def _stream(self, data: bytes) -> Stream:
        return Zstd().shrink(data) if self.zstd else Stream(data)

    def streams(self, size: int) -> int:
        """How many streams a frame of a vector of `size` has."""
        return 1 + (self.sparsifier is not None) + (self.quantizer.scales_count(self.sent(size)) > 0)

    def read(self, streams: list[Stream], size: int) -> Read:
        """Undo the coders and check everything; `BadPayload` before anything else happens."""
        sent, rest = self.sent(size), iter(streams)
        indices = None
        if self.sparsifier is not None:
            packed = self._bytes(next(rest), Delta().max_bytes(sent))
            indices = Delta().unpack(packed, sent, size)
        kind = self.quantizer.symbols_dtype()
        symbols = Pack().unpack(self._bytes(next(rest), sent * kind.itemsize), sent, kind)
        scale, count = self.quantizer.scales_dtype(), self.quantizer.scales_count(sent)
        scales: Scales = np.zeros(0, scale)
        if count:
            scales = Pack().unpack(self._bytes(next(rest), count * scale.itemsize), count, scale)
        self.quantizer.check(symbols, scales)
        return Read(indices, symbols, scales)

    def _bytes(self, stream: Stream, most: int) -> bytes | memoryview:
        if stream.compressed and not self.zstd:
            raise BadPayload("a compressed stream", why="the codec has no zstd")
        return Zstd().grow(stream, most)

    def add(self, read: Read, weight: float, into: Vector, start: int, stop: int, shift: int = 0) -> None:
        """into[start - shift : stop - shift] += weight * decoded[start:stop], in work proportional to what was sent."""
        factor = np.float32(weight)
        first, last = start, stop
        if read.indices is not None:
            first, last = (int(i) for i in np.searchsorted(read.indices, [start, stop]))
        for a, b in blocks(last):
            if b <= first:
                continue
            here = slice(max(a, first), b)
            scaled = self.quantizer.dequantize(read.symbols, read.scales, here) * factor
            if read.indices is None:
                into[here.start - shift : here.stop - shift] += scaled
            else:
                into[read.indices[here] - shift] += scaled  # the indices rise strictly: none stands twice

    def max_bytes(self, size: int) -> int:
        """The most bytes that the streams of a vector of `size` can have."""
        sent = self.sent(size)
        indices = Delta().max_bytes(sent) if self.sparsifier else 0
        scales = self.quantizer.scales_count(sent) * self.quantizer.scales_dtype().itemsize
        return indices + sent * self.quantizer.symbols_dtype().itemsize + scales
