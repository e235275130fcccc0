"""Vector operations that codecs share: checks of input vectors, blocks, buckets, sums and thresholds.

A bucket is 4096 values that share a scale; buckets begin again at each segment. A block is 2^16 values, which stay in
cache.

Sums have final bits: float64 in eight lanes (i mod 8), which are added 0+4, 1+5, 2+6, 3+7 and so on. Each bucket is
summed separately, and the buckets one after the other. A kernel on any instruction set can do the same; numpy's own
`sum` promises no order.
"""

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
    """Raise ValueError unless `x` is a contiguous, aligned float32 vector of this size.

    This is not a `ThinwireError`. Those refuse input of people and other machines, which never chooses an array's type
    or strides. The caller's own code does, so a wrong array is a bug in the caller; nothing is changed.
    """
    if x.dtype != np.float32 or x.ndim != 1 or not x.flags.c_contiguous:
        raise ValueError(f"expected a contiguous 1-D float32 vector, got {x.dtype} of shape {x.shape}")
    if not x.flags.aligned:
        raise ValueError("expected a float32 vector at a multiple of 4 bytes")
    if x.size != size:
        raise ValueError(f"expected {size} values, got {x.size}")


def require_writable(x: Vector, size: int) -> None:
    """Raise ValueError as `require_vector` does, or if `x` is read-only.

    A kernel gets only the address and cannot check it.
    """
    require_vector(x, size)
    if not x.flags.writeable:
        raise ValueError("expected a float32 vector that may be written, got one that is read-only")


def require_finite(x: Vector) -> None:
    """Raise NonFiniteUpdate if `x` holds NaN or infinity."""
    if not finite(x):
        raise not_finite()


def add_finite(x: Vector, other: Vector, sign: float = 1.0) -> None:
    """Add `sign` (1 or -1) times `other` to `x` in one pass; raise NonFiniteUpdate for NaN and infinity.

    After the error, `x` may hold a part of the sums.
    """
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
    """Return True if all values are finite. It reads block by block, so that no copy of the vector is made."""
    if x.dtype == np.float32 and x.flags.c_contiguous and x.flags.aligned:
        done = native.finite(x)
        if done is not None:
            return done
    return all(bool(np.isfinite(x[a:b]).all()) for a, b in blocks(x.size))


def blocks(stop: int, start: int = 0) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of the blocks that cover start .. stop, cut at multiples of BLOCK.

    >>> list(blocks(BLOCK + 1, start=10))
    [(10, 65536), (65536, 65537)]
    """
    while start < stop:
        end = min(start - start % BLOCK + BLOCK, stop)
        yield start, end
        start = end


def spanned(span: slice, size: int) -> tuple[int, int]:
    """Return start and stop of a span with step 1."""
    start, stop, step = span.indices(size)
    if step != 1:
        raise ValueError("a span has no step")
    return start, max(start, stop)


def maxima(values: Vector) -> Vector:
    """Return the largest magnitude of each bucket."""
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
    """Return a float32 copy of the values at `start` and after, each times the scale of its bucket."""
    out: Vector = values.astype(np.float32)
    ahead = min(-start % BUCKET, out.size)  # the rest of the bucket that began before `start`
    whole = (out.size - ahead) // BUCKET
    first, behind = buckets(start), ahead + whole * BUCKET
    if ahead:
        out[:ahead] *= scales[start // BUCKET]
    out[ahead:behind].reshape(whole, BUCKET)[...] *= scales[first : first + whole, None]
    if behind < out.size:
        out[behind:] *= scales[first + whole]
    return out


LANES = 8


def bucket_sums(values: Vector, power: int = 1) -> NDArray[np.float64]:
    """Return the sum of |x|^power of each bucket, power 1 or 2; squares of float32 are exact in float64."""
    done = native.bucket_sums(values, power)
    if done is not None:
        return done
    found = np.zeros(buckets(values.size))
    for start, stop in blocks(values.size):
        magnitudes = np.abs(values[start:stop]).astype(np.float64)
        found[start // BUCKET : buckets(stop)] = lane_sums(magnitudes if power == 1 else magnitudes * magnitudes)
    return found


def lane_sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum of each bucket of 4096 values, in eight lanes."""
    rows = buckets(values.size)
    if values.size < rows * BUCKET:
        values = np.concatenate([values, np.zeros(rows * BUCKET - values.size)])
    lanes = np.add.reduce(
        values.reshape(rows, BUCKET // LANES, LANES), axis=1
    )  # adds rows of eight one after the other
    width = LANES
    while width > 1:
        width //= 2
        lanes = lanes[:, :width] + lanes[:, width:]
    sums: NDArray[np.float64] = lanes[:, 0]
    return sums


def in_order(sums: NDArray[np.float64]) -> float:
    """Return the sum of the buckets' sums, added one after the other.

    >>> in_order(np.array([1e16, 1.0, -1e16]))
    0.0
    """
    return float(np.add.accumulate(sums)[-1]) if sums.size else 0.0


def rms(values: Vector) -> float:
    """Return the root of the mean square."""
    return root_of(bucket_sums(values, 2), values.size)


def root_of(squares: NDArray[np.float64], size: int) -> float:
    """Return the root of the mean square from the buckets' sums of squares."""
    return float(np.sqrt(in_order(squares) / max(1, size)))


MAGNITUDE = np.uint32(0x7FFFFFFF)  # all bits except the sign


def reaching(values: Vector, least: np.uint32, share: float) -> tuple[NDArray[np.integer], NDArray[np.uint32]]:
    """Return indices and bits of all values whose magnitude is at least that of the float with the bits `least`.

    `share` is the expected share of such values. As integers, magnitudes of floats sort like the floats. This pass over
    all values serves both `topk` and `threshold`.

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
