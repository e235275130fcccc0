"""The kernels of `methods/ternary.py` and `methods/twobit.py`, for paths that are not numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.codec import BUCKET, not_finite
from thinwire.aggregation.native.path import kernel
from thinwire.aggregation.native.threads import each, each_of, parts_between
from thinwire.core.types import Vector


def write(
    values: Vector, starts: tuple[int, ...], sigmas: float, most: np.float32, word: int | None, bits: int,
    out: NDArray[np.uint8], scales: Vector,
) -> None:  # fmt: skip
    """Symbols of `bits` bits each, and scales, of tensors that begin at `starts`; no word: as inside a residual."""
    run = kernel("ternary_encode")
    assert run is not None
    edges = np.array([*starts, values.size], np.int64)
    firsts = np.concatenate([[0], np.cumsum(-(-np.diff(edges) // BUCKET))])  # each tensor's first scale
    x, e, s, q = values.ctypes.data, edges.ctypes.data, scales.ctypes.data, out.ctypes.data

    def part(a: int, b: int) -> bool:
        at = s + int(firsts[a]) * 4, q + int(edges[a]) * bits // 8
        return bool(run(x, e + 8 * a, b - a, sigmas, most, word is None, word or 0, bits, *at))

    if not all(each_of(parts_between(edges.tolist()), part)):
        raise not_finite()


def write_steps(values: Vector, step: np.float32, bits: int, out: NDArray[np.uint8]) -> None:
    """1 where a value is at least `step`, -1 where it is at most -step."""
    run = kernel("steps_encode")
    assert run is not None
    x, q = values.ctypes.data, out.ctypes.data
    each(0, values.size, lambda a, b: run(x + 4 * a, b - a, step, bits, q + a * bits // 8))
