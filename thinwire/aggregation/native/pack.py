"""The kernels of the coder `pack`; None where numpy is the path."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.native.path import kernel
from thinwire.aggregation.native.threads import each


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
