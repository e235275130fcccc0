"""The streams of a chain: which coder serves which stream, and how decoded streams are added to a vector.

`delta` or `rice` codes indices. `pack` codes symbols, or `rice` where they have at most 8 bits. `pack` codes scales. A
compressor at the end of a chain works on each of these streams separately. The word of the key is sent as it is.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from thinwire.compression.base import Indices, Quantizer, Scales, Sparsifier, Symbols
from thinwire.compression.codecs.bitpack import Pack, packed_bytes
from thinwire.compression.codecs.byte_codecs import Last
from thinwire.compression.codecs.integers import Delta, Rice
from thinwire.compression.frame import Stream
from thinwire.compression.memory import FusedDecoder
from thinwire.compression.native import sparse as native
from thinwire.compression.vector_ops import blocks
from thinwire.core.errors import BadPayload
from thinwire.core.types import Vector

WORD = struct.Struct("<I")  # also the number of indices, if a sparsifier's number is not fixed


@dataclass(frozen=True)
class StreamCoders:
    """The coders of a chain. Its `read_*` methods raise BadPayload before memory is allocated for a stream."""

    rice: bool = False
    last: Last | None = None

    @property
    def specs(self) -> list[str]:
        """Return the specs of the coders that are not always present."""
        return [Rice.spec] * self.rice + ([self.last.spec] if self.last else [])

    def indices(self, indices: Indices, of: Sparsifier) -> Stream:
        """Return the stream of sorted indices."""
        count = b"" if of.fixed else WORD.pack(indices.size)
        return self._stream(count + (Rice().pack_indices(indices) if self.rice else Delta().pack(indices)))

    def read_indices(self, stream: Stream, size: int, of: Sparsifier) -> Indices:
        """Return the sorted indices under `size` in a stream."""
        most = of.count(size)
        data = memoryview(self._bytes(stream, self.most_of_indices(size, of)))
        if not of.fixed:
            least = min(1, size)  # the largest value is always sent
            if len(data) < WORD.size or not least <= WORD.unpack(data[: WORD.size])[0] <= most:
                raise BadPayload("a number of indices that cannot be", why=f"it is {least} to {most}")
            most, data = int(WORD.unpack(data[: WORD.size])[0]), data[WORD.size :]
        return Rice().unpack_indices(data, most, size) if self.rice else Delta().unpack(data, most, size)

    def most_of_indices(self, size: int, of: Sparsifier) -> int:
        """Return the largest number of bytes of the indices of a vector of `size`."""
        most, count = of.count(size), 0 if of.fixed else WORD.size
        return count + (Rice().max_index_bytes(most, size) if self.rice else Delta().max_bytes(most, size))

    def symbols(self, symbols: Symbols, of: Quantizer) -> Stream:
        """Return the stream of symbols."""
        bits = of.bits
        return self._stream(Rice().pack_symbols(symbols, bits) if self._rices(of) else Pack().pack(symbols, bits))

    def read_symbols(self, stream: Stream, sent: int, of: Quantizer) -> Symbols:
        """Return `sent` symbols of a stream, still packed if the quantizer can add them so."""
        data = self._bytes(stream, self.most_of_symbols(sent, of))
        if self._rices(of):
            return Rice().unpack_symbols(data, sent, of.bits)
        if of.bits < 8 and isinstance(of, FusedDecoder):
            return cast("Symbols", Pack().held(data, sent, of.bits))  # `FusedDecoder` says what it may do with them
        return Pack().unpack(data, sent, of.symbols_dtype, of.bits)

    def most_of_symbols(self, sent: int, of: Quantizer) -> int:
        """Return the largest number of bytes of `sent` symbols."""
        return Rice().max_symbol_bytes(sent, of.bits) if self._rices(of) else packed_bytes(sent, of.bits)

    def _rices(self, of: Quantizer) -> bool:
        return self.rice and of.bits <= 8

    def scales(self, scales: Scales) -> Stream:
        """Return the stream of scales."""
        return self._stream(Pack().pack(scales))

    def read_scales(self, stream: Stream, count: int, of: Quantizer) -> Scales:
        """Return `count` scales of a stream."""
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
    """Return the word of the key in a stream; raise BadPayload unless it has 4 bytes and is not compressed."""
    if len(stream.data) != WORD.size or stream.compressed:
        raise BadPayload(f"a word of {len(stream.data)} bytes", why="it has 4")
    return int(WORD.unpack(stream.data)[0])


@dataclass(frozen=True)
class DecodedStreams:
    """The content of a frame before it is dequantized; nothing of the size of the vector is allocated yet."""

    quantizer: Quantizer
    indices: Indices | None  # None: every coordinate
    symbols: Symbols
    scales: Scales
    word: int

    def apart_from(self, x: Vector) -> DecodedStreams:
        """Return a copy of the symbols if they share memory with `x`, so that `x` may be overwritten.

        The identity codec returns `x` itself as symbols.
        """
        return replace(self, symbols=self.symbols.copy()) if np.may_share_memory(self.symbols, x) else self

    def add(self, weight: float | None, into: Vector, start: int, stop: int, shift: int = 0) -> None:
        """Compute into[start - shift : stop - shift] += weight * decoded[start:stop].

        Without a weight, the decoded values replace those of `into`. The work is proportional to the number of values
        sent.
        """
        factor, adds = np.float32(1 if weight is None else weight), weight is not None
        first, last = start, stop
        if self.indices is not None:
            first, last = (int(i) for i in np.searchsorted(self.indices, [start, stop]))
        elif isinstance(self.quantizer, FusedDecoder):
            here, to = slice(start, stop), into[start - shift : stop - shift]
            if self.quantizer.add(self.symbols, self.scales, here, self.word, factor, adds, to):
                return
        for a, b in blocks(last, start=first):
            self._add_block(slice(a, b), factor, adds, into, shift)

    def _add_block(self, here: slice, factor: np.float32, adds: bool, into: Vector, shift: int) -> None:
        """Add or replace the values that were sent at the positions `here`."""
        values = self.quantizer.dequantize(self.symbols, self.scales, here, self.word)
        places: slice | Indices = slice(here.start - shift, here.stop - shift)
        if self.indices is not None:
            if native.sparse_add(self.indices[here], values, factor, shift, adds, into):
                return
            places = self.indices[here] - shift  # strictly rising, so that `+=` below adds each of them once
        scaled = values if factor == 1 else values * factor
        if adds:
            into[places] += scaled
        else:
            into[places] = scaled
