"""The kernels of `methods/natural.py`; False where numpy is the path."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.native.path import kernel
from thinwire.aggregation.native.threads import each
from thinwire.aggregation.vectors import BUCKET, not_finite
from thinwire.core.types import Vector


def write(values: Vector, word: int, symbols: NDArray[np.uint8], tops: NDArray[np.int8], first: int) -> None:
    """Symbols and exponents; values are counted from `first`. NonFiniteUpdate for NaN and infinity."""
    run = kernel("natural_encode")
    assert run is not None
    x, t, q = values.ctypes.data, tops.ctypes.data, symbols.ctypes.data
    if not all(each(0, values.size, lambda a, b: run(x + 4 * a, b - a, first + a, word, t + a // BUCKET, q + a))):
        raise not_finite()


def add(
    symbols: NDArray[np.int8], tops: NDArray[np.int8], span: slice, factor: np.float32, adds: bool, into: Vector
) -> bool:
    """into[0 ..] gets the values in `span` times a factor, added or in place of what stands there; False: not."""
    run = kernel("natural_add")
    if run is None:
        return False
    q, t, to = symbols.ctypes.data, tops.ctypes.data, into.ctypes.data
    each(span.start, span.stop, lambda a, b: run(q, t, a, b, factor, adds, to + 4 * (a - span.start)))
    return True
