"""The kernels of `sums.py`, of `buckets.maxima` and of `methods/sign.py`; None or False where numpy is the path."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.codec import BUCKET, PackedSymbols, Symbols, buckets
from thinwire.aggregation.native import parts
from thinwire.aggregation.native.path import kernel
from thinwire.aggregation.native.stored import stored
from thinwire.aggregation.native.threads import each
from thinwire.core.types import Vector


def bucket_sums(values: Vector, power: int) -> NDArray[np.float64] | None:
    run = kernel("bucket_sums")
    if run is None or values.dtype != np.float32 or not values.flags.c_contiguous:
        return None
    sums = np.empty(buckets(values.size))
    x, to = values.ctypes.data, sums.ctypes.data
    each(0, values.size, lambda a, b: run(x + 4 * a, b - a, power == 2, to + a // BUCKET * 8))
    return sums


def maxima(values: Vector) -> Vector | None:
    run = kernel("maxima")
    if run is None or values.dtype != np.float32 or not values.flags.c_contiguous:
        return None
    found = np.empty(buckets(values.size), np.float32)
    x, to = values.ctypes.data, found.ctypes.data
    each(0, values.size, lambda a, b: run(x + 4 * a, b - a, to + a // BUCKET * 4))
    return found


def sign_write(values: Vector, signs: NDArray[np.uint8], means: Vector) -> None:
    m, to = means.ctypes.data, signs.ctypes.data
    parts.write("sign_encode", values, lambda a: (m + a // BUCKET * 8, to + a // 8))


def sign_add(
    symbols: Symbols | PackedSymbols, means: Vector, span: slice, factor: np.float32, adds: bool, into: Vector
) -> bool:
    means = np.require(means, np.float32, ["C", "A"])  # in a frame they may stand at any byte
    return parts.add("sign_add", (*stored(symbols), means), span, factor, adds, into)
