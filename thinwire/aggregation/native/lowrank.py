"""The kernel of `PowerSgd.product`; False where numpy is the path."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.native.path import kernel
from thinwire.aggregation.native.threads import each
from thinwire.core.types import Vector


def add(
    left: NDArray[np.float32], turned: NDArray[np.float32], start: int, stop: int, factor: np.float32, adds: bool,
    into: Vector,
) -> bool:  # fmt: skip
    """into[0 ..] gets the values start .. stop of left @ turned times a factor, added or in place; False: not."""
    run = kernel("lowrank_add")
    if run is None:
        return False
    (rank, cols), p, q, to = turned.shape, left.ctypes.data, turned.ctypes.data, into.ctypes.data
    each(start, stop, lambda a, b: run(p, q, cols, rank, a, b, factor, adds, to + 4 * (a - start)))
    return True
