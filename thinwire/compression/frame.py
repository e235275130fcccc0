"""The wire format of one segment's update: a header that binds it to codec, layout and segment, then its streams.

    "TW" | version 1 | codec hash (8 bytes) | number of streams | for each: length * 2 + compressed | the streams

Numbers are varints (LEB128). The hash covers the codec's spec, the layout's digest and the segment. A frame of another
codec, model or segment is refused before any of its numbers is used. The header takes at most 16 bytes with one stream,
and 4 more for each further stream: a segment has at most 64 MiB, so a length takes 28 bits.

`StreamCoders` has the coders of a chain's streams. `delta`, `rice` or `rans` codes indices. `pack` codes symbols, or
`rice` or `rans` where they have at most 8 bits. `pack` codes scales. A compressor at the end of a chain works on each
of these streams separately. The word of the key is sent as it is.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from thinwire.compression.base import (
    Compressor,
    FusedQuantizer,
    Indices,
    Quantizer,
    Scales,
    Sparsifier,
    Symbols,
    packed_bytes,
)
from thinwire.compression.vector_ops import blocks, sparse_add, write_scaled
from thinwire.core.errors import BadPayload

if TYPE_CHECKING:
    from thinwire.compression.codecs.delta_rice import Delta, Rice
    from thinwire.compression.codecs.pack_zstd import Pack, SparseSymbols
    from thinwire.compression.codecs.rans import Rans
    from thinwire.core.types import Vector

NEW_BYTES = ctypes.pythonapi.PyBytes_FromStringAndSize
NEW_BYTES.restype, NEW_BYTES.argtypes = ctypes.py_object, [ctypes.c_char_p, ctypes.c_ssize_t]

MAGIC = b"TW"
VERSION = 1
HASH_BYTES = 8
NUMBER_BYTES = 4  # the most bytes of a varint: twice a stream's length is under 2^28
MAX_OVERHEAD = 24


@dataclass(frozen=True)
class Stream:
    """The bytes of one stream; `compressed` is True if they passed through a compressor."""

    data: bytes | memoryview
    compressed: bool = False


def codec_hash(spec: str, layout_digest: str, segment: int) -> bytes:
    """Return the eight bytes that bind a frame to codec, layout and segment."""
    text = f"{spec}\n{layout_digest}\n{segment}"
    return hashlib.sha256(text.encode()).digest()[:HASH_BYTES]


def header(bound: bytes, streams: Sequence[tuple[int, bool]]) -> bytes:
    """Return the header of a frame for streams of these (length, compressed)."""
    lengths = b"".join(varint(length * 2 + compressed) for length, compressed in streams)
    assert all(length * 2 < 1 << 7 * NUMBER_BYTES for length, _ in streams), "a stream is longer than a segment can be"
    return MAGIC + bytes([VERSION]) + bound + varint(len(streams)) + lengths


def pack(bound: bytes, streams: Sequence[Stream]) -> bytes:
    """Return the frame of these streams."""
    return b"".join([header(bound, [(len(s.data), s.compressed) for s in streams]), *(s.data for s in streams)])


def blank(bound: bytes, lengths: Sequence[int]) -> tuple[bytes, list[NDArray[np.uint8]]]:
    """Allocate a frame for streams of these lengths; return it and a writable view of each stream.

    The caller fills the views before it passes the frame on. CPython lets the code that allocates bytes fill them
    (PyBytes_FromStringAndSize without a string), so a kernel needs no second buffer and no copy.
    """
    first = header(bound, [(length, False) for length in lengths])
    size = len(first) + sum(lengths)
    payload: bytes = NEW_BYTES(None, size)
    start = ctypes.cast(ctypes.c_char_p(payload), ctypes.c_void_p).value or 0
    prefer_large(start, size)
    ctypes.memmove(start, first, len(first))
    room, places, at = np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(start)), np.uint8), [], len(first)
    for length in lengths:
        places.append(room[at : at + length])
        at += length
    return payload, places


def unpack(payload: bytes | memoryview, bound: bytes, expected: int) -> list[Stream]:
    """Return the streams of a frame as views into it.

    Raise BadPayload if it is foreign, cut, or longer than its header declares.
    """
    view = memoryview(payload)
    start = len(MAGIC) + 1 + HASH_BYTES
    if len(view) < start or bytes(view[:2]) != MAGIC:
        raise BadPayload("not a frame", why="it does not begin with TW")
    if view[2] != VERSION:
        raise BadPayload(f"a frame of version {view[2]}", why=f"this program reads version {VERSION}")
    if bytes(view[3:start]) != bound:
        raise BadPayload("a frame of another codec, model or segment", why="its hash is not the one expected")
    count, at = read_varint(view, start)
    if count != expected:
        raise BadPayload(f"a frame of {count} streams", why=f"the codec has {expected}")
    sizes = []
    for _ in range(count):
        size, at = read_varint(view, at)
        sizes.append(size)
    if at + sum(size >> 1 for size in sizes) != len(view):
        raise BadPayload("a frame that is not as long as it says", why="it was cut or added to")
    streams = []
    for size in sizes:
        streams.append(Stream(view[at : at + (size >> 1)], bool(size & 1)))
        at += size >> 1
    return streams


def varint(value: int) -> bytes:
    """Return a number as LEB128: seven bits a byte, and the highest bit set if more bytes follow.

    >>> varint(300).hex()
    'ac02'
    """
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(view: memoryview, at: int) -> tuple[int, int]:
    """Return (value, offset behind it); raise BadPayload unless the number has its shortest form."""
    value = 0
    for place in range(NUMBER_BYTES):
        if at >= len(view):
            raise BadPayload("a frame that ends within a number")
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            if byte == 0 and place:
                break
            return value, at
    raise BadPayload(
        "a number in a frame's header that is not valid", why="it is too long, or not in its shortest form"
    )


# Huge pages for new frames: one page fault each 2 MiB instead of each 4 KiB, as numpy does it on Linux.


PAGE = 4096
LEAST = 1 << 22  # bytes: huge pages pay from here on
MADV_HUGEPAGE = 14


def prefer_large(address: int, size: int) -> None:
    """Advise the kernel to use huge pages for this memory; the advice may be ignored."""
    advise = _madvise()
    if advise is not None and size >= LEAST:
        start = -(-address // PAGE) * PAGE
        advise(start, (address + size - start) // PAGE * PAGE, MADV_HUGEPAGE)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return advise


WORD = struct.Struct("<I")  # also the number of indices, if a sparsifier's number is not fixed


# Coders are imported on first use: a chain with a fused encoder makes no stream.


def _rice() -> Rice:
    from thinwire.compression.codecs.delta_rice import Rice

    return Rice()


def _rans() -> Rans:
    from thinwire.compression.codecs.rans import Rans

    return Rans()


def _delta() -> Delta:
    from thinwire.compression.codecs.delta_rice import Delta

    return Delta()


def _sparse_symbols(places: Indices, symbols: Symbols, size: int) -> SparseSymbols:
    from thinwire.compression.codecs.pack_zstd import SparseSymbols

    return SparseSymbols(places, symbols, size)


def _pack() -> Pack:
    from thinwire.compression.codecs.pack_zstd import Pack

    return Pack()


NumberCoder: TypeAlias = Literal["rice", "rans"]  # of indices, and of symbols of at most 8 bits


@dataclass(frozen=True)
class StreamCoders:
    """The coders of a chain. Its `read_*` methods raise BadPayload before memory is allocated for a stream."""

    named: NumberCoder | None = None
    last: Compressor | None = None

    @property
    def specs(self) -> list[str]:
        """Return the specs of the coders that are not always present."""
        return ([self.named] if self.named else []) + ([self.last.spec] if self.last else [])

    @property
    def _numbers(self) -> Rice | Rans | None:
        """Return the coder of numbers that the chain names."""
        if self.named is None:
            return None
        return _rans() if self.named == "rans" else _rice()

    def indices(self, indices: Indices, of: Sparsifier) -> Stream:
        """Return the stream of sorted indices."""
        count, coder = b"" if of.fixed else WORD.pack(indices.size), self._numbers
        return self.shrink(count + (coder.pack_indices(indices) if coder else _delta().pack(indices)))

    def read_indices(self, stream: Stream, size: int, of: Sparsifier) -> Indices:
        """Return the sorted indices under `size` in a stream."""
        most, coder = of.count(size), self._numbers
        data = memoryview(self.grow(stream, self.most_of_indices(size, of)))
        if not of.fixed:
            least = min(1, size)  # the largest value is always sent
            if len(data) < WORD.size or not least <= WORD.unpack(data[: WORD.size])[0] <= most:
                raise BadPayload("a number of indices that is not valid", why=f"it is {least} to {most}")
            most, data = int(WORD.unpack(data[: WORD.size])[0]), data[WORD.size :]
        return coder.unpack_indices(data, most, size) if coder else _delta().unpack(data, most, size)

    def most_of_indices(self, size: int, of: Sparsifier) -> int:
        """Return the largest number of bytes of the indices of a vector of `size`."""
        most, count, coder = of.count(size), 0 if of.fixed else WORD.size, self._numbers
        return count + (coder.max_index_bytes(most, size) if coder else _delta().max_bytes(most, size))

    def symbols(self, symbols: Symbols | SparseSymbols, of: Quantizer) -> Stream:
        """Return the stream of symbols, of an array or of `SparseSymbols`."""
        if not isinstance(symbols, np.ndarray):
            return self.shrink(_rans().pack_sparse(symbols.places, symbols.symbols, symbols.size, of.bits))
        coder = self._coder_of(of)
        return self.shrink(coder.pack_symbols(symbols, of.bits) if coder else _pack().pack(symbols, of.bits))

    def read_symbols(self, stream: Stream, sent: int, of: Quantizer) -> Symbols:
        """Return `sent` symbols of a stream, still packed if the quantizer can add them so."""
        data = self.grow(stream, self.most_of_symbols(sent, of))
        sparse = of.entropy_coded and isinstance(of, FusedQuantizer) and _rans().unpack_sparse(data, sent, of.bits)
        if sparse:
            return cast("Symbols", _sparse_symbols(*sparse, sent))
        if (coder := self._coder_of(of)) is not None:
            return coder.unpack_symbols(data, sent, of.bits)
        if of.bits < 8 and isinstance(of, FusedQuantizer):
            # `FusedQuantizer` says what it may do with them.
            return cast("Symbols", _pack().view_packed(data, sent, of.bits))
        return _pack().unpack(data, sent, of.symbols_dtype, of.bits)

    def most_of_symbols(self, sent: int, of: Quantizer) -> int:
        """Return the largest number of bytes of `sent` symbols."""
        coder = self._coder_of(of)
        return coder.max_symbol_bytes(sent, of.bits) if coder else packed_bytes(sent, of.bits)

    def _coder_of(self, of: Quantizer) -> Rice | Rans | None:
        """Return the coder of a quantizer's symbols, or None if they are packed."""
        if of.entropy_coded:
            return _rans()
        return self._numbers if of.bits <= 8 else None

    def scales(self, scales: Scales) -> Stream:
        """Return the stream of scales."""
        return self.shrink(_pack().pack(scales))

    def read_scales(self, stream: Stream, count: int, of: Quantizer) -> Scales:
        """Return `count` scales of a stream."""
        dtype = of.scales_dtype
        return _pack().unpack(self.grow(stream, count * dtype.itemsize), count, dtype)

    def shrink(self, data: bytes | memoryview) -> Stream:
        """Return the compressed stream, or the data as it is if that is not longer."""
        packed = self.last.compress(data) if self.last and len(data) else b""
        return Stream(packed, True) if 0 < len(packed) < len(data) else Stream(data)

    def grow(self, stream: Stream, most: int) -> bytes | memoryview:
        """Return the bytes of a stream, decompressed; raise BadPayload if they are invalid or more than `most`."""
        if not stream.compressed:
            return stream.data
        if self.last is None:
            raise BadPayload("a compressed stream", why="the codec has no compressor")
        try:
            grown = self.last.decompress(stream.data, most)
        except BadPayload:
            raise
        except Exception as error:  # another package's code may raise anything for untrusted bytes
            raise BadPayload("a stream that is not readable", why=type(error).__name__) from error
        if len(grown) > most:
            raise BadPayload(f"a compressed stream of {len(grown)} bytes", why=f"at most {most} can be right")
        return grown


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
        own: Symbols | SparseSymbols = self.symbols
        shared = isinstance(own, np.ndarray) and np.may_share_memory(own, x)
        return replace(self, symbols=self.symbols.copy()) if shared else self

    def add(self, weight: float | None, into: Vector, start: int, stop: int, shift: int = 0) -> None:
        """Compute into[start - shift : stop - shift] += weight * decoded[start:stop].

        Without a weight, the decoded values replace those of `into`. The work is proportional to the number of values
        sent.
        """
        factor, adds = np.float32(1 if weight is None else weight), weight is not None
        first, last = start, stop
        if self.indices is not None:
            first, last = (int(i) for i in np.searchsorted(self.indices, [start, stop]))
        elif isinstance(self.quantizer, FusedQuantizer):
            here, to = slice(start, stop), into[start - shift : stop - shift]
            if self.quantizer.add(self.symbols, self.scales, here, self.word, factor, adds, to):
                return
        for a, b in blocks(last, start=first):
            self._add_block(slice(a, b), factor, adds, into, shift)

    def _add_block(self, here: slice, factor: np.float32, adds: bool, into: Vector, shift: int) -> None:
        """Add or replace the values that were sent at the positions `here`."""
        values = self.quantizer.dequantize(self.symbols, self.scales, here, self.word)
        if self.indices is not None:  # strictly rising, so that each is added once
            sparse_add(self.indices[here], values, factor, shift, adds, into)
        else:
            write_scaled(values, factor, adds, into, slice(here.start - shift, here.stop - shift))
