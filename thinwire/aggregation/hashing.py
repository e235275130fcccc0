"""Counter-based draws: what is drawn for a value depends on its index and a word of the key, on nothing before it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thinwire.core.types import Vector


def uniform(start: int, stop: int, word: int) -> Vector:
    """U in [0, 1) for each index: the upper 24 bits of lowbias32(index ^ word) / 2^24."""
    mixed = np.arange(start, stop, dtype=np.uint32)
    mixed ^= np.uint32(word)
    lowbias32(mixed)
    mixed >>= np.uint32(8)
    drawn = mixed.astype(np.float32)
    drawn *= np.float32(2.0**-24)
    return drawn


def lowbias32(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """A two-multiply hash of 32 bits with very low bias, in place (Wellons 2018, "Prospecting for Hash Functions").

    >>> int(lowbias32(np.uint32([1]))[0])
    1753845952
    """
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x
