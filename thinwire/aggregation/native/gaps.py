"""The kernels of the coders `delta` and `rice`, and of what is done with places; None where numpy is the path.

A stream that a kernel cannot read gives None too: the oracle reads it again and says what is wrong with it.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.native.path import kernel
from thinwire.core.types import Vector

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
