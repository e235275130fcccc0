"""Kernels of indices and bit-packing: `delta`, `rice`, `pack`, sparse addition and selection above a threshold.

Each function returns None (or False) if numpy is the path. A stream that a kernel cannot read gives None too: the numpy
oracle then reads it again and raises the error with the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from thinwire.compression.native.library import kernel
from thinwire.compression.native.threads import each
from thinwire.core.types import Vector

if TYPE_CHECKING:
    from thinwire.compression.base import PackedSymbols, Symbols


Places = NDArray[np.int64]
T = TypeVar("T", np.int64, np.int8)

VARINT = 10  # the most bytes of a 64-bit varint
RICE_BLOCK, RICE_BITS = 4096, 26  # numbers a parameter; the most bits of a number that has no raw form


def delta_write(places: Places) -> bytes | None:
    """Return the varints of the gaps between strictly rising indices."""
    run = kernel("delta_write")
    if run is None:
        return None
    out = np.empty(VARINT * places.size, np.uint8)
    return out[: run(_at(places), places.size, out.ctypes.data)].tobytes()


def delta_read(data: bytes | memoryview, items: int, size: int) -> Places | None:
    """Return `items` strictly rising indices under `size`."""
    return _read("delta_read", data, items, size, np.empty(items, np.int64))


def rice_write_places(places: Places) -> bytes | None:
    """Return the Rice codes of the gaps between strictly rising indices."""
    return _rice("rice_write_places", np.ascontiguousarray(places, np.int64), RICE_BITS)


def rice_write_symbols(symbols: NDArray[np.int8], raw: int) -> bytes | None:
    """Return the Rice codes of signed symbols of `raw` bits."""
    return _rice("rice_write_symbols", np.ascontiguousarray(symbols, np.int8), raw, raw)


def rice_read_places(data: bytes | memoryview, items: int, size: int) -> Places | None:
    """Return `items` strictly rising indices under `size`."""
    return _read("rice_read_places", data, items, size, np.empty(items, np.int64))


def rice_read_symbols(data: bytes | memoryview, items: int, raw: int) -> NDArray[np.int8] | None:
    """Return `items` signed symbols of `raw` bits."""
    return _read("rice_read_symbols", data, items, raw, np.empty(items, np.int8))


def sparse_add(places: Places, values: Vector, factor: np.float32, shift: int, adds: bool, into: Vector) -> bool:
    """Write values * factor to into[places - shift], added if `adds`, else in place of its values.

    Return False if numpy is the path: nothing was done.
    """
    run = kernel("sparse_add")
    if run is None:
        return False
    values = np.require(values, np.float32, ["C", "A"])  # values in a frame may begin at any byte
    run(_at(places), values.ctypes.data, places.size, factor, shift, adds, into.ctypes.data)
    return True


def _rice(name: str, items: NDArray[np.int64] | NDArray[np.int8], most: int, *raw: int) -> bytes | None:
    run = kernel(name)
    if run is None:
        return None
    parameters, sizes = np.empty(-(-items.size // RICE_BLOCK), np.uint8), np.empty(2, np.int64)
    room = most * items.size // 8 + 1
    unary, low = np.zeros(room, np.uint8), np.empty(room, np.uint8)
    buffers = (one.ctypes.data for one in (parameters, unary, low, sizes))
    if not run(items.ctypes.data, items.size, *raw, room, *buffers):
        return None  # too long for sorted indices: the kernel stopped at the end of its buffers
    return b"".join([parameters.data, unary[: sizes[0]].data, low[: sizes[1]].data])


def _read(name: str, data: bytes | memoryview, items: int, limit: int, out: NDArray[T]) -> NDArray[T] | None:
    run = kernel(name)
    if run is None or not items:
        return None
    raw = np.frombuffer(data, np.uint8)
    return out if run(raw.ctypes.data, raw.size, items, limit, out.ctypes.data) else None


def _at(places: Places) -> int:
    if places.dtype != np.int64 or not places.flags.c_contiguous:
        raise ValueError(f"places are contiguous int64, not {places.dtype}")
    return int(places.ctypes.data)


SPARE = 4096  # room for more indices than expected
AHEAD = 16  # the kernel writes sixteen before it knows how many of them count

Found = tuple[NDArray[np.int32], NDArray[np.uint32]]


def select_above(values: Vector, least: np.uint32, share: float) -> Found | None:
    """Return indices and bits of all values whose magnitude has at least the bits `least`.

    `share` is the expected share of these values.
    """
    run = kernel("reaching")
    if run is None:
        return None
    x = values.ctypes.data

    def part(a: int, b: int) -> Found:
        room = min(b - a, int(1.2 * share * (b - a)) + SPARE) + AHEAD
        while True:
            places, bits = np.empty(room, np.int32), np.empty(room, np.uint32)
            found = run(x + 4 * a, b - a, least, a, room, places.ctypes.data, bits.ctypes.data)
            if found + AHEAD <= room:
                return places[:found], bits[:found]
            room = found + AHEAD

    parts = each(0, values.size, part)
    if len(parts) == 1:
        return parts[0]
    return np.concatenate([places for places, _ in parts]), np.concatenate([bits for _, bits in parts])


def packed(symbols: NDArray[np.int8], bits: int) -> NDArray[np.uint8] | None:
    """Return symbols packed in 1 to 7 bits."""
    run = kernel("pack")
    if run is None:
        return None
    symbols = np.ascontiguousarray(symbols)
    out = np.empty(-(-symbols.size * bits // 8), np.uint8)
    q, to = symbols.ctypes.data, out.ctypes.data
    each(0, symbols.size, lambda a, b: run(q + a, b - a, bits, to + a * bits // 8))
    return out


def unpacked(data: NDArray[np.uint8], items: int, bits: int) -> NDArray[np.int8] | None:
    """Return `items` unpacked symbols."""
    run = kernel("unpack")
    if run is None:
        return None
    if data.size * 8 < items * bits:
        raise ValueError(f"{data.size} bytes do not hold {items} symbols of {bits} bits")
    symbols = np.empty(items, np.int8)
    at, to = data.ctypes.data, symbols.ctypes.data
    each(0, items, lambda a, b: run(at + a * bits // 8, b - a, bits, to + a))
    return symbols


def least(data: NDArray[np.uint8], items: int, bits: int) -> int | None:
    """Return the smallest of the packed symbols, or 0 if all are larger."""
    run = kernel("least")
    if run is None:
        return None
    at = data.ctypes.data
    found: list[int] = each(0, items, lambda a, b: run(at + a * bits // 8, b - a, bits))
    return min(found)


def stored(symbols: Symbols | PackedSymbols) -> tuple[int, int]:
    """Return the address at which a kernel finds symbols, in an array or packed, and the bits that each has there."""
    if isinstance(symbols, np.ndarray):
        return symbols.ctypes.data, 8 * symbols.itemsize
    return symbols.data.ctypes.data, symbols.bits
