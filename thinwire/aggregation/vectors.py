"""Vectors before they are worked on: what is refused, and the blocks and buckets that they are cut into."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.codec import BLOCK, not_finite
from thinwire.aggregation.native import finite as native
from thinwire.core.types import Vector


def require_vector(x: Vector, size: int) -> None:
    """ValueError unless it is a contiguous float32 vector of this size, at an address that a float32 may have.

    Not a `ThinwireError`: those are refusals of what people and other machines give, which never chooses an array's
    type or strides. Our own code does, so another one is a mistake in the code that calls, and nothing is changed.
    """
    if x.dtype != np.float32 or x.ndim != 1 or not x.flags.c_contiguous:
        raise ValueError(f"expected a contiguous 1-D float32 vector, got {x.dtype} of shape {x.shape}")
    if not x.flags.aligned:
        raise ValueError("expected a float32 vector at a multiple of 4 bytes")
    if x.size != size:
        raise ValueError(f"expected {size} values, got {x.size}")


def require_writable(x: Vector, size: int) -> None:
    """The same, and that it may be written to: a kernel has the address alone, and would not ask."""
    require_vector(x, size)
    if not x.flags.writeable:
        raise ValueError("expected a float32 vector that may be written, got one that is read-only")


def require_finite(x: Vector) -> None:
    """NonFiniteUpdate when there is NaN or infinity in it."""
    if not finite(x):
        raise not_finite()


def add_finite(x: Vector, other: Vector, sign: float = 1.0) -> None:
    """X += sign other in one pass, sign 1 or -1; NonFiniteUpdate for NaN and infinity, of which x may hold a part."""
    require_vector(other, x.size)
    done = native.added(x, other, sign)
    if done is None:
        add = np.add if sign > 0 else np.subtract
        with np.errstate(over="ignore", invalid="ignore"):
            for start, stop in blocks(x.size):
                add(x[start:stop], other[start:stop], out=x[start:stop])
                require_finite(x[start:stop])
    elif not done:
        raise not_finite()


def finite(x: NDArray[Any]) -> bool:
    """Whether all values are finite, looked at block by block so that no copy of the vector is made."""
    if x.dtype == np.float32 and x.flags.c_contiguous and x.flags.aligned:
        done = native.finite(x)
        if done is not None:
            return done
    return all(bool(np.isfinite(x[a:b]).all()) for a, b in blocks(x.size))


def blocks(stop: int, start: int = 0) -> Iterator[tuple[int, int]]:
    """(from, to) of the blocks that cover start .. stop, cut where the vector's blocks are.

    >>> list(blocks(BLOCK + 1, start=10))
    [(10, 65536), (65536, 65537)]
    """
    while start < stop:
        end = min(start - start % BLOCK + BLOCK, stop)
        yield start, end
        start = end


def spanned(span: slice, size: int) -> tuple[int, int]:
    """Start and stop of a span with step 1."""
    start, stop, step = span.indices(size)
    if step != 1:
        raise ValueError("a span has no step")
    return start, max(start, stop)
