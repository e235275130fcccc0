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

    sparsifier: Sparsifier | None = None
    quantizer: Quantizer = PLAIN
    zstd: bool = False

    @property
    def spec(self) -> str:
        """Canonical: what is always there is left out."""
        stages = [self.sparsifier.spec] if self.sparsifier else []
        stages += [self.quantizer.spec] if self.quantizer != PLAIN or not stages else []
        return " > ".join([*stages, Zstd.spec] if self.zstd else stages)

    def bind(self, layout: Layout) -> Bound:
        return Bound(self.spec, layout, [[Group(self)] for _ in layout.segments])

    @property
    def kind(self) -> Kind:
        inner = self.quantizer.kind()
        return chained(self.sparsifier.kind(), inner) if self.sparsifier else inner

    def sent(self, size: int) -> int:
        """How many of `size` values are sent."""
        return self.sparsifier.count(size) if self.sparsifier else size

    def write(self, x: Vector, key: Key, segment: int, group: int = 0) -> tuple[list[Stream], Support]:
        """The streams for one vector, the segment's `group`-th, and which coordinates they hold."""
        streams: list[Stream] = []
        support: Support = Everything.SENT
        values = x
        if self.sparsifier is not None:
            support = self.sparsifier.select(x)
            values = x[support]
            streams.append(self._stream(Delta().pack(support)))
        symbols, scales = self.quantizer.quantize(values, word32(key, stage(self.quantizer, group), segment))
        streams.append(self._stream(Pack().pack(symbols)))
        if self.quantizer.scales_count(values.size):
            streams.append(self._stream(Pack().pack(scales)))
        return streams, support

    def _stream(self, data: bytes | memoryview) -> Stream:
        return Zstd().shrink(data) if self.zstd else Stream(data)

    def streams(self, size: int) -> int:
        """How many streams a frame of a vector of `size` has."""
        return 1 + (self.sparsifier is not None) + (self.quantizer.scales_count(self.sent(size)) > 0)

    def read(self, streams: list[Stream], size: int) -> Read:
        """Undo the coders and check everything; `BadPayload` before anything else happens."""
        sent, rest = self.sent(size), iter(streams)
        indices = None
        if self.sparsifier is not None:
            packed = self._bytes(next(rest), Delta().max_bytes(sent, size))
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

    def add(self, read: Read, weight: float | None, into: Vector, start: int, stop: int, shift: int = 0) -> None:
        """into[start - shift : stop - shift] += weight * decoded[start:stop], in work proportional to what was sent.

        With no weight the values replace what stands there.
        """
        factor = np.float32(1 if weight is None else weight)
        first, last = start, stop
        if read.indices is not None:
            first, last = (int(i) for i in np.searchsorted(read.indices, [start, stop]))
        for a, b in blocks(last, start=first):
            here = slice(a, b)
            scaled = self.quantizer.dequantize(read.symbols, read.scales, here)
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
        indices = Delta().max_bytes(sent, size) if self.sparsifier else 0
        scales = self.quantizer.scales_count(sent) * self.quantizer.scales_dtype().itemsize
        return indices + sent * self.quantizer.symbols_dtype().itemsize + scales


def stage(quantizer: Quantizer, group: int) -> str:
    """What the rounding of one group draws by: groups of a segment draw apart from each other."""
    return quantizer.spec if group == 0 else f"{quantizer.spec}#{group}"
