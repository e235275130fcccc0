"""Sums whose bits are final: float64, in eight lanes (i mod 8), which are added 0+4, 1+5, 2+6, 3+7 and so on.

Buckets of 4096 values are summed each by itself, and then one after the other. A kernel on any instruction set can do
the same; numpy's own `sum` promises no order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.codec import BUCKET, buckets
from thinwire.aggregation.native import sums as native
from thinwire.aggregation.vectors import blocks
from thinwire.core.types import Vector

LANES = 8


def bucket_sums(values: Vector, power: int = 1) -> NDArray[np.float64]:
    """The sum of |x|^power of each bucket; the squares of float32 are exact in float64."""
    done = native.bucket_sums(values, power)
    if done is not None:
        return done
    found = np.zeros(buckets(values.size))
    for start, stop in blocks(values.size):
        magnitudes = np.abs(values[start:stop]).astype(np.float64)
        found[start // BUCKET : buckets(stop)] = lane_sums(magnitudes if power == 1 else magnitudes * magnitudes)
    return found


def lane_sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sum of each bucket of 4096."""
    rows = buckets(values.size)
    if values.size < rows * BUCKET:
        values = np.concatenate([values, np.zeros(rows * BUCKET - values.size)])
    lanes = np.add.reduce(values.reshape(rows, BUCKET // LANES, LANES), axis=1)  # a row of eight after the other
    width = LANES
    while width > 1:
        width //= 2
        lanes = lanes[:, :width] + lanes[:, width:]
    sums: NDArray[np.float64] = lanes[:, 0]
    return sums


def in_order(sums: NDArray[np.float64]) -> float:
    """Of the buckets, one after the other.

    >>> in_order(np.array([1e16, 1.0, -1e16]))
    0.0
    """
    return float(np.add.accumulate(sums)[-1]) if sums.size else 0.0


def rms(values: Vector) -> float:
    """The root of the mean square."""
    return root_of(bucket_sums(values, 2), values.size)


def root_of(squares: NDArray[np.float64], size: int) -> float:
    """The same of the buckets' sums of squares."""
    return float(np.sqrt(in_order(squares) / max(1, size)))
