"""The coders of bytes: `pack` packs symbols in as many bits as each needs, `zstd` compresses whole streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from backports import zstd
from numpy.typing import NDArray

from thinwire.compression.base import Coder, Compressor, Symbols, packed_bytes
from thinwire.compression.native import each, kernel
from thinwire.compression.vector_ops import blocks
from thinwire.core.errors import BadPayload


class Pack(Coder):
    """Bit-packs symbols, little-endian; always present at the end of a chain, so a spec leaves it out.

    Symbols of fewer than 8 bits are two's complement in their `bits` lowest bits, the first one in the lowest bits of
    the first byte. The unused bits of the last byte are 0.
    """

    examples: ClassVar[tuple[str, ...]] = ("int8 > pack",)
    spec: ClassVar[str] = "pack"

    def pack(self, array: Symbols, bits: int = 0) -> memoryview:
        """Return the packed bytes; whole symbols (`bits` 0) are the array's own memory, without a copy."""
        if 0 < bits < 8:
            return memoryview(packed(array, bits).data)
        return memoryview(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).view(np.uint8).data)

    def view_packed(self, data: bytes | memoryview, items: int, bits: int) -> Packed:
        """Return symbols of fewer than 8 bits as they were sent; raise BadPayload as `unpack` does."""
        require_length(data, items, bits)
        raw = np.frombuffer(data, np.uint8)
        require_ended(raw, items, bits)
        return Packed(raw, items, bits)

    def unpack(self, data: bytes | memoryview, items: int, dtype: np.dtype[Any], bits: int = 0) -> Symbols:
        """Return `items` symbols; raise BadPayload unless the data has exactly their length and ends in zero bits."""
        bits = bits or 8 * dtype.itemsize
        require_length(data, items, bits)
        if bits < 8:
            return unpacked(np.frombuffer(data, np.uint8), items, bits)
        return np.frombuffer(data, dtype.newbyteorder("<"))


@dataclass(frozen=True)
class Packed:
    """Symbols of fewer than 8 bits that stay packed until they are used; a slice of them is an array of int8.

    A kernel reads them packed, numpy unpacks them block by block. Neither ever holds a byte for each value of a
    segment.
    """

    data: NDArray[np.uint8]
    size: int
    bits: int

    def __getitem__(self, span: slice) -> NDArray[np.int8]:
        """Return the symbols of a span with bounds and without a step."""
        first = span.start // 8  # eight symbols begin at a byte
        here = self.data[first * self.bits : packed_bytes(span.stop, self.bits)]
        return _unpacked(here, span.stop - first * 8, self.bits)[span.start - first * 8 :]

    def min(self) -> int:
        """Return the smallest symbol, or 0 if there is none."""
        run, at, bits = kernel("least"), self.data.ctypes.data, self.bits
        if run is not None:
            return int(min(each(0, self.size, lambda a, b: run(at + a * bits // 8, b - a, bits))))
        return min((int(self[a:b].min()) for a, b in blocks(self.size)), default=0)


@dataclass(frozen=True)
class SparseSymbols:
    """Symbols that are 0 except at strictly rising places. A slice of them is an array."""

    places: NDArray[np.int64]
    symbols: NDArray[np.int8]
    size: int

    def __getitem__(self, span: slice) -> NDArray[np.int8]:
        """Return the symbols of a span with bounds and without a step."""
        first, last = np.searchsorted(self.places, [span.start, span.stop])
        found = np.zeros(span.stop - span.start, np.int8)
        found[self.places[first:last] - span.start] = self.symbols[first:last]
        return found


def nonzero(symbols: Symbols) -> tuple[NDArray[np.int64], NDArray[np.int8]]:
    """Return the places of the symbols that are not 0, and those symbols."""
    if isinstance(symbols, SparseSymbols):
        return symbols.places, symbols.symbols
    dense = symbols[0 : symbols.size]
    places = np.flatnonzero(dense)
    return places, dense[places]


def require_length(data: bytes | memoryview, items: int, bits: int) -> None:
    """Raise BadPayload unless the data has the length of `items` symbols."""
    if len(data) != packed_bytes(items, bits):
        raise BadPayload(f"a stream of {len(data)} bytes", why=f"{items} items take {packed_bytes(items, bits)}")


def require_ended(data: NDArray[np.uint8], items: int, bits: int) -> None:
    """Raise BadPayload if the unused bits of the last byte are not 0."""
    rest = len(data) * 8 - items * bits
    if rest and data[-1] >> (8 - rest):
        raise BadPayload("bits behind the last symbol", why="they are 0 in what an encoder makes")


def packed(symbols: NDArray[np.int8], bits: int) -> NDArray[np.uint8]:
    """Return symbols of fewer than 8 bits packed in two's complement, the first in the lowest bits.

    >>> packed(np.int8([1, -1, 0, -2]), 2).tolist()
    [141]
    """
    run = kernel("pack")
    if run is not None:
        symbols, done = np.ascontiguousarray(symbols), np.empty(packed_bytes(symbols.size, bits), np.uint8)
        q, to = symbols.ctypes.data, done.ctypes.data
        each(0, symbols.size, lambda a, b: run(q + a, b - a, bits, to + a * bits // 8))
        return done
    if bits == 1:
        return np.packbits(symbols.view(np.uint8) & 1, bitorder="little")
    low = symbols.view(np.uint8) & np.uint8((1 << bits) - 1)
    if 8 % bits == 0:
        count = 8 // bits
        padded = np.zeros(-(-low.size // count) * count, np.uint8)
        padded[: low.size] = low
        out = padded[0::count].copy()
        for place in range(1, count):
            out |= padded[place::count] << np.uint8(place * bits)
        return out
    spread = (low[:, None] >> np.arange(bits, dtype=np.uint8)) & np.uint8(1)
    return np.packbits(spread.reshape(-1), bitorder="little")


def unpacked(data: NDArray[np.uint8], items: int, bits: int) -> NDArray[np.int8]:
    """Return the unpacked symbols; raise BadPayload if the unused bits of the last byte are not 0."""
    require_ended(data, items, bits)
    return _unpacked(data, items, bits)


def _unpacked(data: NDArray[np.uint8], items: int, bits: int) -> NDArray[np.int8]:
    run = kernel("unpack")
    if run is not None:
        if data.size * 8 < items * bits:
            raise ValueError(f"{data.size} bytes do not hold {items} symbols of {bits} bits")
        symbols = np.empty(items, np.int8)
        at, to = data.ctypes.data, symbols.ctypes.data
        each(0, items, lambda a, b: run(at + a * bits // 8, b - a, bits, to + a))
        return symbols
    if 8 % bits == 0:
        count = 8 // bits
        low = np.empty(len(data) * count, np.uint8)
        for place in range(count):
            low[place::count] = data >> np.uint8(place * bits) & np.uint8((1 << bits) - 1)
        low = low[:items]
    else:
        spread = np.unpackbits(data, count=items * bits, bitorder="little").reshape(items, bits)
        low = np.bitwise_or.reduce(spread << np.arange(bits, dtype=np.uint8), axis=1, dtype=np.uint8)
    up = np.uint8(8 - bits)
    signed: NDArray[np.int8] = (low << up).view(np.int8) >> up.view(np.int8)
    return signed


ZSTD_FROM = 64  # bytes: below this, zstd's header costs more than it saves
ZSTD_LEVEL = 3
ZSTD_PART = 1 << 17  # bytes: the decoder gives as much at once, the largest block of a frame


@dataclass(frozen=True)
class Zstd(Compressor):
    """Compresses each stream with Zstandard (RFC 8878) if that makes it shorter; the last stage of a chain."""

    examples: ClassVar[tuple[str, ...]] = ("identity > zstd", "topk(0.1) > int8 > zstd")
    paper: ClassVar[str] = "RFC 8878"
    spec: ClassVar[str] = "zstd"

    def compress(self, data: bytes | memoryview) -> bytes:
        """Return the compressed bytes, or the data as it is below 64 bytes."""
        if len(data) < ZSTD_FROM:
            return bytes(data)
        return zstd.compress(data, ZSTD_LEVEL)

    def decompress(self, data: bytes | memoryview, most: int) -> memoryview:
        """Return the decompressed bytes; the size that the data claims is checked before any allocation.

        The decoder gives them in parts, since it would hold them twice if it gave them whole.
        """
        decoder, at = zstd.ZstdDecompressor(), 0
        try:
            size = zstd.get_frame_info(data).decompressed_size or 0
            if not 0 < size <= most:
                raise BadPayload(f"a compressed stream of {size} bytes", why=f"at most {most} can be right")
            grown = bytearray(size)
            while part := b"" if decoder.eof else decoder.decompress(data, min(ZSTD_PART, size - at + 1)):
                grown[at : at + len(part)] = part
                at, data = at + len(part), b""
        except zstd.ZstdError as error:
            raise BadPayload("a stream that zstd cannot read", why=str(error)) from error
        if at != size or not decoder.eof or decoder.unused_data:
            raise BadPayload("a compressed stream that is not as long as it says")
        return memoryview(grown).toreadonly()
