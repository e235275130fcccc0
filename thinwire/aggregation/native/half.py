"""The kernels of `methods/fp16.py` and `methods/bf16.py`; None where numpy is the path."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.codec import BUCKET
from thinwire.aggregation.native import parts
from thinwire.aggregation.native.path import kernel
from thinwire.aggregation.native.threads import each
from thinwire.core.types import Vector


def fp16_write(values: Vector, halves: NDArray[np.uint8], exponents: NDArray[np.int8]) -> None:
    e, h = exponents.ctypes.data, halves.ctypes.data
    parts.write("fp16_encode", values, lambda a: (e + a // BUCKET, h + 2 * a))


def bf16_write(values: Vector, halves: NDArray[np.uint8]) -> None:
    h = halves.ctypes.data
    parts.write("bf16_encode", values, lambda a: (h + 2 * a,))


def finite(halves: NDArray[np.float16] | NDArray[np.uint16], exponent: int) -> bool | None:
    """Whether none has all of the exponent's bits."""
    run = kernel("halves_finite")
    if run is None:
        return None
    at = halves.ctypes.data
    return all(each(0, halves.size, lambda a, b: run(at + 2 * a, b - a, exponent)))
