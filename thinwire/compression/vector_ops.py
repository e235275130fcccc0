"""Vectors before they are worked on: what is refused, and the blocks and buckets that they are cut into."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.compression.base import BLOCK, BUCKET, buckets, not_finite
from thinwire.compression.native import quantize as native
from thinwire.compression.native import sparse as sparse_native
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
    done = native.add_finite(x, other, sign)
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


# Buckets of 4096 values that share a scale; they begin anew at each segment.


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


# Sums whose bits are final: float64, in eight lanes (i mod 8), which are added 0+4, 1+5, 2+6, 3+7 and so on.
#
# Buckets of 4096 values are summed each by itself, and then one after the other. A kernel on any instruction set can do
# the same; numpy's own `sum` promises no order.


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


# Which values are large enough: the pass over all of them that topk and threshold share.


MAGNITUDE = np.uint32(0x7FFFFFFF)  # all bits but the sign's


def reaching(values: Vector, least: np.uint32, share: float) -> tuple[NDArray[np.integer], NDArray[np.uint32]]:
    """Places and bits of all values whose magnitude is at least that of the bits `least`; about this share is expected.

    As integers, magnitudes of floats sort like the floats, and equal ones are equal bits.

    >>> places, bits = reaching(np.float32([1, -3, 2]), np.float32(2).view(np.uint32), 1.0)
    >>> places.tolist(), bits.view(np.float32).tolist()
    ([1, 2], [-3.0, 2.0])
    """
    found = sparse_native.select_above(values, least, share)
    if found is not None:
        return found
    bits = values.view(np.uint32)
    places = np.flatnonzero(bits & MAGNITUDE >= least)
    return places, bits[places]
