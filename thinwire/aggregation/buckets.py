"""Buckets of 4096 values that share a scale; they begin anew at each segment."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.codec import BUCKET, buckets
from thinwire.aggregation.native import sums as native
from thinwire.aggregation.vectors import blocks
from thinwire.core.types import Vector


def maxima(values: Vector) -> Vector:
    """The largest magnitude of each bucket."""
    done = native.maxima(values)
    if done is not None:
        return done
    found = np.empty(buckets(values.size), np.float32)
    for start, stop in blocks(values.size):
        magnitudes = np.abs(values[start:stop])
        whole, first = magnitudes.size // BUCKET, start // BUCKET
        magnitudes[: whole * BUCKET].reshape(whole, BUCKET).max(axis=1, out=found[first : first + whole])
        if whole * BUCKET < magnitudes.size:
            found[-1] = magnitudes[whole * BUCKET :].max()
    return found


def scaled(values: NDArray[Any], scales: Vector, start: int) -> Vector:
    """A float32 copy of the values that stand at `start` and after, each times its bucket's scale."""
    out: Vector = values.astype(np.float32)
    ahead = min(-start % BUCKET, out.size)  # the rest of a bucket that began before
    whole = (out.size - ahead) // BUCKET
    first, behind = buckets(start), ahead + whole * BUCKET
    if ahead:
        out[:ahead] *= scales[start // BUCKET]
    out[ahead:behind].reshape(whole, BUCKET)[...] *= scales[first : first + whole, None]
    if behind < out.size:
        out[behind:] *= scales[first + whole]
    return out
