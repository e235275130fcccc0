"""The kernels of `methods/fp16.py` and `methods/bf16.py`; None or False where numpy is the path."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.native.path import kernel
from thinwire.aggregation.native.threads import each
from thinwire.aggregation.vectors import BUCKET, not_finite
from thinwire.core.types import Vector


def fp16_write(values: Vector, halves: NDArray[np.uint8], exponents: NDArray[np.int8]) -> None:
    run = kernel("fp16_encode")
    assert run is not None
    x, e, h = values.ctypes.data, exponents.ctypes.data, halves.ctypes.data
    if not all(each(0, values.size, lambda a, b: run(x + 4 * a, b - a, e + a // BUCKET, h + 2 * a))):
        raise not_finite()


def bf16_write(values: Vector, halves: NDArray[np.uint8]) -> None:
    run = kernel("bf16_encode")
    assert run is not None
    x, h = values.ctypes.data, halves.ctypes.data
    if not all(each(0, values.size, lambda a, b: run(x + 4 * a, b - a, h + 2 * a))):
        raise not_finite()


def fp16_add(
    halves: NDArray[np.float16], exponents: NDArray[np.int8], span: slice, factor: np.float32, adds: bool, into: Vector
) -> bool:
    run = kernel("fp16_add")
    if run is None:
        return False
    h, e, to = halves.ctypes.data, exponents.ctypes.data, into.ctypes.data
    each(span.start, span.stop, lambda a, b: run(h, e, a, b, factor, adds, to + 4 * (a - span.start)))
    return True


def bf16_add(halves: NDArray[np.uint16], span: slice, factor: np.float32, adds: bool, into: Vector) -> bool:
    run = kernel("bf16_add")
    if run is None:
        return False
    h, to = halves.ctypes.data, into.ctypes.data
    each(span.start, span.stop, lambda a, b: run(h, a, b, factor, adds, to + 4 * (a - span.start)))
    return True


def finite(halves: NDArray[np.float16] | NDArray[np.uint16], exponent: int) -> bool | None:
    """Whether none has all of the exponent's bits."""
    run = kernel("halves_finite")
    if run is None:
        return None
    at = halves.ctypes.data
    return all(each(0, halves.size, lambda a, b: run(at + 2 * a, b - a, exponent)))
