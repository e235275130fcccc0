"""Masks of secure aggregation, and the packing of masked vectors.

A vector is whole numbers modulo 2^width, in lanes: uint16 for a width up to 16, else uint32; weights and metrics are
uint64. A mask is a stream of AES-256 in counter mode that is added or subtracted modulo the lane (Bonawitz et al. 2017,
section 4). Packing keeps `width` bits of each lane, so what it drops of a mask it drops of the sum too.

Each kernel in `csrc/lanes.hpp` is called beside its numpy oracle, which defines its bits. Vectors are worked on in
chunks that stay in the second-level cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.compression.native import each, kernel
from thinwire.compression.vector_ops import blocks
from thinwire.privacy.keys import hkdf
from thinwire.privacy.secret_rng import CHUNK, ZEROS, stream

Lanes = NDArray[np.unsignedinteger[Any]]  # uint16, uint32 or uint64
Packed = bytes | memoryview | NDArray[np.uint8]

MAX_WIDTH = 32
BLOCK = 16  # bytes of AES


def lane_dtype(width: int) -> type[np.uint16 | np.uint32]:
    """Return the type of the lanes that hold numbers of `width` bits; raise ValueError unless it is in 1 .. 32."""
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"a width of {width} bits is not in 1 .. {MAX_WIDTH}")
    return np.uint16 if width <= 16 else np.uint32


def mask_key(shared: bytes, context2: bytes, label: str) -> bytes:
    """Return the AES key of one vector's mask: HKDF of what two clients share, or of a self mask's seed.

    `context2` names round, cohort and models (the threat model's ctx2), `label` the vector, such as "update".

    Invariant: no two vectors have one key. Else the difference of two masked vectors would be that of the plain ones.
    """
    return hkdf(shared, f"mask/{label}", context2)


def add_mask(lanes: Lanes, key: bytes, sign: int, start: int = 0) -> None:
    """Add (sign 1) or subtract (sign -1) the mask of a key to lanes start .. start + lanes.size of a vector, in place.

    Invariant: lane i gets the bytes i * itemsize .. (i + 1) * itemsize of AES-256-CTR(key, counter 0), little-endian,
    whatever the span. Adding and then subtracting a mask changes nothing.
    """
    add_masks(lanes, [(key, sign)], start)


def add_masks(lanes: Lanes, masks: Sequence[tuple[bytes, int]], start: int = 0) -> None:
    """Add or subtract the masks of several (key, sign) as `add_mask` does, reading and writing the lanes once."""
    _require_lanes(lanes)
    if start < 0 or any(sign not in (1, -1) for _, sign in masks):
        raise ValueError("a mask is added (1) or subtracted (-1), from a lane of the vector on")
    each(0, lanes.size, lambda a, b: _add_masks(lanes[a:b], masks, start + a))


def _add_masks(lanes: Lanes, masks: Sequence[tuple[bytes, int]], start: int) -> None:
    block, skipped = divmod(start * lanes.itemsize, BLOCK)
    streams = [(stream(key, block), sign < 0) for key, sign in masks]
    for one, _ in streams:
        one.update(bytes(skipped))
    room, zeros, run = np.empty(CHUNK, np.uint8), memoryview(ZEROS), kernel("lanes_add")
    at, to, size, count = room.ctypes.data, lanes.ctypes.data, lanes.itemsize, CHUNK // lanes.itemsize
    for a in range(0, lanes.size, count):
        b = min(a + count, lanes.size)
        drawn, here = room[: (b - a) * size].data, zeros[: (b - a) * size]
        for one, subtracts in streams:
            one.update_into(here, drawn)
            if run is not None:
                run(to + a * size, at, b - a, size, subtracts)
            elif subtracts:
                lanes[a:b] -= np.frombuffer(drawn, lanes.dtype.newbyteorder("<"))
            else:
                lanes[a:b] += np.frombuffer(drawn, lanes.dtype.newbyteorder("<"))


def packed_size(count: int, width: int) -> int:
    """Return the bytes of `count` lanes packed in `width` bits each."""
    return (count * width + 7) // 8


def pack(lanes: Lanes, width: int, out: bytearray | memoryview | NDArray[np.uint8]) -> None:
    """Write the lowest `width` bits of each lane to `out`, which has `packed_size` bytes and is contiguous.

    Lane i takes the bits i * width .. (i + 1) * width, bit 0 the lowest one of the first byte. The unused bits of the
    last byte are 0.

    >>> out = np.empty(3, np.uint8)
    >>> pack(np.uint16([0x0ABC, 0xF123]), 12, out)
    >>> out.tobytes().hex()
    'bc3a12'
    """
    _require_width(lanes, width)
    raw = np.frombuffer(out, np.uint8)
    if raw.size != packed_size(lanes.size, width) or not raw.flags.writeable:
        raise ValueError(f"{lanes.size} lanes of {width} bits take {packed_size(lanes.size, width)} bytes")
    if width == 8 * lanes.itemsize:
        raw.view(lanes.dtype.newbyteorder("<"))[:] = lanes
        return
    run, size = kernel("lanes_pack"), lanes.itemsize
    if run is not None:
        x, to = lanes.ctypes.data, raw.ctypes.data
        each(0, lanes.size, lambda a, b: run(x + a * size, b - a, size, width, to + a * width // 8))
        return
    for a, b in blocks(lanes.size):
        bits = np.unpackbits(lanes[a:b].astype(lanes.dtype.newbyteorder("<")).view(np.uint8), bitorder="little")
        kept = bits.reshape(b - a, 8 * size)[:, :width]
        raw[packed_size(a, width) : packed_size(b, width)] = np.packbits(kept.reshape(-1), bitorder="little")


def check_packed(packed: Packed, count: int, width: int) -> None:
    """Raise ValueError unless the bytes are those of `count` packed lanes: their length, and zeros behind the last."""
    if len(packed) != packed_size(count, width):
        raise ValueError(f"{count} lanes of {width} bits take {packed_size(count, width)} bytes, not {len(packed)}")
    used = count * width % 8
    if used and packed[-1] >> used:
        raise ValueError("the bits behind the last lane are not 0")


def add_packed(packed: Packed, width: int, into: Lanes, start: int = 0) -> None:
    """Add lanes start .. start + into.size of a packed vector to `into`, modulo the lane.

    Raises ValueError if the bytes do not hold these lanes. What is behind them is not read: see `check_packed`.
    """
    _require_width(into, width)
    raw = np.frombuffer(packed, np.uint8)
    stop = start + into.size
    if start < 0 or raw.size < packed_size(stop, width):
        raise ValueError(f"{raw.size} bytes do not hold the lanes {start} .. {stop} of {width} bits")
    size = into.itemsize
    if width == 8 * size:
        here = raw[start * size : stop * size].view(into.dtype.newbyteorder("<"))
        into += here
        return
    run = kernel("lanes_add_packed")
    if run is not None:
        at, to = raw.ctypes.data, into.ctypes.data
        each(start, stop, lambda a, b: run(at, raw.size, width, a, b - a, size, to + (a - start) * size))
        return
    for a, b in blocks(into.size):
        first = (start + a) // 8  # eight lanes begin at a byte
        count = start + b - first * 8
        bits = np.unpackbits(raw[first * width :], count=count * width, bitorder="little").reshape(count, width)
        whole = np.zeros((b - a, 8 * size), np.uint8)
        whole[:, :width] = bits[count - (b - a) :]
        into[a:b] += np.packbits(whole.reshape(-1), bitorder="little").view(into.dtype.newbyteorder("<"))


def centered(lanes: Lanes, width: int) -> NDArray[np.int32] | NDArray[np.int64]:
    """Return the number in -2^(width-1) .. 2^(width-1) - 1 that each lane is modulo 2^width; int64 for 64-bit lanes.

    >>> centered(np.uint16([1, 0xFFF, 0xF800]), 12).tolist()
    [1, -1, -2048]
    """
    _require_width(lanes, width)
    up = 8 * lanes.itemsize - width
    signed = np.dtype(f"i{lanes.itemsize}")
    found: NDArray[Any] = np.empty(lanes.size, np.int64 if lanes.itemsize == 8 else np.int32)
    for a, b in blocks(lanes.size):
        found[a:b] = (lanes[a:b] << lanes.dtype.type(up)).view(signed) >> signed.type(up)
    return found


def _require_lanes(lanes: Lanes) -> None:
    kinds = (np.uint16, np.uint32, np.uint64)
    if lanes.dtype not in kinds or lanes.ndim != 1 or not (lanes.flags.c_contiguous and lanes.flags.aligned):
        raise ValueError("lanes are one contiguous array of uint16, uint32 or uint64")


def _require_width(lanes: Lanes, width: int) -> None:
    _require_lanes(lanes)
    if lanes.dtype != (np.uint64 if width == 64 else lane_dtype(width)):
        raise ValueError(f"a width of {width} bits is not one of {lanes.dtype} lanes")
