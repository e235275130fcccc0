"""Where symbols stand in memory: in an array, or side by side as they were sent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from thinwire.aggregation.codec import PackedSymbols, Symbols


def stored(symbols: Symbols | PackedSymbols) -> tuple[int, int]:
    """Where a kernel finds symbols, and the bits that each has there."""
    if isinstance(symbols, np.ndarray):
        return symbols.ctypes.data, 8 * symbols.itemsize
    return symbols.data.ctypes.data, symbols.bits
