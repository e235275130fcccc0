"""The wire format of one segment's update: a header that binds it to codec, layout and segment, then its streams.

    "TW" | version 1 | codec hash (8 bytes) | number of streams | for each: length * 2 + compressed | the streams

Numbers are varints (LEB128). The hash covers the codec's spec, the layout's digest and the segment. A frame of another
codec, model or segment is refused before any of its numbers is used. The header takes at most 16 bytes with one stream,
and 4 more for each further stream: a segment has at most 64 MiB, so a length takes 28 bits.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thinwire.core.errors import BadPayload

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


def head(bound: bytes, streams: Sequence[tuple[int, bool]]) -> bytes:
    """Return the header of a frame for streams of these (length, compressed)."""
    lengths = b"".join(varint(length * 2 + compressed) for length, compressed in streams)
    assert all(length * 2 < 1 << 7 * NUMBER_BYTES for length, _ in streams), "a stream is longer than a segment can be"
    return MAGIC + bytes([VERSION]) + bound + varint(len(streams)) + lengths


def pack(bound: bytes, streams: Sequence[Stream]) -> bytes:
    """Return the frame of these streams."""
    return b"".join([head(bound, [(len(s.data), s.compressed) for s in streams]), *(s.data for s in streams)])


def blank(bound: bytes, lengths: Sequence[int]) -> tuple[bytes, list[NDArray[np.uint8]]]:
    """Allocate a frame for streams of these lengths; return it and a writable view of each stream.

    The caller fills the views before it passes the frame on. CPython lets the code that allocates bytes fill them
    (PyBytes_FromStringAndSize without a string), so a kernel needs no second buffer and no copy.
    """
    first = head(bound, [(length, False) for length in lengths])
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
    raise BadPayload("a number in a frame's head that cannot be", why="it is too long, or not in its shortest form")


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
