"""The kernels of the coders `delta` and `rice`, and of what is done with places; None where numpy is the path.

A stream that a kernel cannot read gives None too: the oracle reads it again and says what is wrong with it.
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

VARINT = 10  # bytes of any 64 bits at the most
RICE_BLOCK, RICE_BITS = 4096, 26  # numbers a parameter; bits of a number at the most, where there is no shorter raw


def delta_write(places: Places) -> bytes | None:
    run = kernel("delta_write")
    if run is None:
        return None
    out = np.empty(VARINT * places.size, np.uint8)
    return out[: run(_at(places), places.size, out.ctypes.data)].tobytes()


def delta_read(data: bytes | memoryview, items: int, size: int) -> Places | None:
    return _read("delta_read", data, items, size, np.empty(items, np.int64))


def rice_write_places(places: Places) -> bytes | None:
    return _rice("rice_write_places", np.ascontiguousarray(places, np.int64), RICE_BITS)


def rice_write_symbols(symbols: NDArray[np.int8], raw: int) -> bytes | None:
    return _rice("rice_write_symbols", np.ascontiguousarray(symbols, np.int8), raw, raw)


def rice_read_places(data: bytes | memoryview, items: int, size: int) -> Places | None:
    return _read("rice_read_places", data, items, size, np.empty(items, np.int64))


def rice_read_symbols(data: bytes | memoryview, items: int, raw: int) -> NDArray[np.int8] | None:
    return _read("rice_read_symbols", data, items, raw, np.empty(items, np.int8))


def sparse_add(places: Places, values: Vector, factor: np.float32, shift: int, adds: bool, into: Vector) -> bool:
    """into[places - shift] gets values * factor, added or in place of what stands there; False: not."""
    run = kernel("sparse_add")
    if run is None:
        return False
    values = np.require(values, np.float32, ["C", "A"])  # in a frame they may stand at any byte
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
        return None  # more than sorted places can take: whatever that is, it is not written past the end
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


# The kernel that finds what reaches a threshold; None where numpy is the path.


SPARE = 4096  # places beyond what was expected
AHEAD = 16  # that are written before it is known how many of them count

Found = tuple[NDArray[np.int32], NDArray[np.uint32]]


def select_above(values: Vector, least: np.uint32, share: float) -> Found | None:
    """Places and bits of all values whose magnitude is at least `least`, where about this share is expected."""
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


# The kernels of the coder `pack`; None where numpy is the path.


def packed(symbols: NDArray[np.int8], bits: int) -> NDArray[np.uint8] | None:
    """Of 1 to 7 bits."""
    run = kernel("pack")
    if run is None:
        return None
    symbols = np.ascontiguousarray(symbols)
    out = np.empty(-(-symbols.size * bits // 8), np.uint8)
    q, to = symbols.ctypes.data, out.ctypes.data
    each(0, symbols.size, lambda a, b: run(q + a, b - a, bits, to + a * bits // 8))
    return out


def unpacked(data: NDArray[np.uint8], items: int, bits: int) -> NDArray[np.int8] | None:
    """The other way."""
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
    """The least symbol, or 0."""
    run = kernel("least")
    if run is None:
        return None
    at = data.ctypes.data
    found: list[int] = each(0, items, lambda a, b: run(at + a * bits // 8, b - a, bits))
    return min(found)


# Where symbols stand in memory: in an array, or side by side as they were sent.


def stored(symbols: Symbols | PackedSymbols) -> tuple[int, int]:
    """Where a kernel finds symbols, and the bits that each has there."""
    if isinstance(symbols, np.ndarray):
        return symbols.ctypes.data, 8 * symbols.itemsize
    return symbols.data.ctypes.data, symbols.bits
