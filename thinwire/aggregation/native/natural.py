"""The kernel of `methods/natural.py`, for paths that are not numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.codec import BUCKET
from thinwire.aggregation.native import parts
from thinwire.core.types import Vector


def write(values: Vector, word: int, symbols: NDArray[np.uint8], tops: NDArray[np.int8], first: int) -> None:
    """Symbols and exponents; values are counted from `first`."""
    t, q = tops.ctypes.data, symbols.ctypes.data
    parts.write("natural_encode", values, lambda a: (first + a, word, t + a // BUCKET, q + a))
