"""Which coder serves which stream of a chain.

Indices: `delta` or `rice`. Symbols: `pack`, or `rice` where they have at most 8 bits. Scales: `pack`. A compressor that
stands last works on each of these by itself. The word of the key goes as it is.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import cast

from thinwire.aggregation.by_kernel import Adds
from thinwire.aggregation.codec import Indices, Quantizer, Scales, Sparsifier, Symbols
from thinwire.aggregation.coders.compressor import Last
from thinwire.aggregation.coders.delta import Delta
from thinwire.aggregation.coders.pack import Pack, packed_bytes
from thinwire.aggregation.coders.rice import Rice
from thinwire.aggregation.frame import Stream
from thinwire.core.errors import BadPayload

WORD = struct.Struct("<I")  # and the number of indices, where a sparsifier sends now more, now fewer


@dataclass(frozen=True)
class Coded:
    """The coders of a chain. What it reads is checked: BadPayload before memory is allocated for it."""

    rice: bool = False
    last: Last | None = None

    @property
    def specs(self) -> list[str]:
        """Of the coders that are not always there."""
        return [Rice.spec] * self.rice + ([self.last.spec] if self.last else [])

    def indices(self, indices: Indices, of: Sparsifier) -> Stream:
        count = b"" if of.fixed else WORD.pack(indices.size)
        return self._stream(count + (Rice().pack_indices(indices) if self.rice else Delta().pack(indices)))

    def read_indices(self, stream: Stream, size: int, of: Sparsifier) -> Indices:
        most = of.count(size)
        data = memoryview(self._bytes(stream, self.most_of_indices(size, of)))
        if not of.fixed:
            least = min(1, size)  # the largest is always sent, where there is one
            if len(data) < WORD.size or not least <= WORD.unpack(data[: WORD.size])[0] <= most:
                raise BadPayload("a number of indices that cannot be", why=f"it is {least} to {most}")
            most, data = int(WORD.unpack(data[: WORD.size])[0]), data[WORD.size :]
        return Rice().unpack_indices(data, most, size) if self.rice else Delta().unpack(data, most, size)

    def most_of_indices(self, size: int, of: Sparsifier) -> int:
        """The most bytes that the indices of a vector of `size` can have."""
        most, count = of.count(size), 0 if of.fixed else WORD.size
        return count + (Rice().max_index_bytes(most, size) if self.rice else Delta().max_bytes(most, size))

    def symbols(self, symbols: Symbols, of: Quantizer) -> Stream:
        bits = of.bits
        return self._stream(Rice().pack_symbols(symbols, bits) if self._rices(of) else Pack().pack(symbols, bits))

    def read_symbols(self, stream: Stream, sent: int, of: Quantizer) -> Symbols:
        data = self._bytes(stream, self.most_of_symbols(sent, of))
        if self._rices(of):
            return Rice().unpack_symbols(data, sent, of.bits)
        if of.bits < 8 and isinstance(of, Adds):
            return cast("Symbols", Pack().held(data, sent, of.bits))  # what it may do to them is in `Adds`
        return Pack().unpack(data, sent, of.symbols_dtype, of.bits)

    def most_of_symbols(self, sent: int, of: Quantizer) -> int:
        """The most bytes that so many symbols can have."""
        return Rice().max_symbol_bytes(sent, of.bits) if self._rices(of) else packed_bytes(sent, of.bits)

    def _rices(self, of: Quantizer) -> bool:
        return self.rice and of.bits <= 8

    def scales(self, scales: Scales) -> Stream:
        return self._stream(Pack().pack(scales))

    def read_scales(self, stream: Stream, count: int, of: Quantizer) -> Scales:
        dtype = of.scales_dtype
        return Pack().unpack(self._bytes(stream, count * dtype.itemsize), count, dtype)

    def _stream(self, data: bytes | memoryview) -> Stream:
        return self.last.shrink(data) if self.last else Stream(data)

    def _bytes(self, stream: Stream, most: int) -> bytes | memoryview:
        if self.last is None:
            if stream.compressed:
                raise BadPayload("a compressed stream", why="the codec has no compressor")
            return stream.data
        return self.last.grow(stream, most)


def read_word(stream: Stream) -> int:
    if len(stream.data) != WORD.size or stream.compressed:
        raise BadPayload(f"a word of {len(stream.data)} bytes", why="it has 4")
    return int(WORD.unpack(stream.data)[0])
