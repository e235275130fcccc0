"""The kernels that look for NaN and infinity; None where numpy is the path."""

from __future__ import annotations

from thinwire.aggregation.native.path import kernel
from thinwire.aggregation.native.threads import each
from thinwire.core.types import Vector


def finite(x: Vector) -> bool | None:
    """Whether all values are finite."""
    run = kernel("finite")
    if run is None:
        return None
    at = x.ctypes.data
    return all(each(0, x.size, lambda a, b: run(at + 4 * a, b - a)))


def added(x: Vector, other: Vector, sign: float) -> bool | None:
    """X += sign other, and whether all sums are finite; some may be missing where they are not."""
    run = kernel("add_finite")
    if run is None:
        return None
    to, of = x.ctypes.data, other.ctypes.data
    return all(each(0, x.size, lambda a, b: run(to + 4 * a, of + 4 * a, b - a, sign)))
