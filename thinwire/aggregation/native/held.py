"""The kernels that add what is held, encode, and find what is left of a bucket while it is in cache; for no numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.codec import BUCKET, buckets, not_finite
from thinwire.aggregation.native import parts
from thinwire.aggregation.native.path import kernel
from thinwire.aggregation.native.threads import each_of, parts_between
from thinwire.core.types import Vector

if TYPE_CHECKING:
    from thinwire.aggregation.held import Held


def levels(
    values: Vector, held: Held, levels: int, most: np.float32, word: int | None, bits: int, out: NDArray[np.uint8],
    scales: Vector,
) -> None:  # fmt: skip
    """As `native.levels.write`."""
    s, q = scales.ctypes.data, out.ctypes.data
    args = levels, most, word is None
    parts.write_held(
        "levels_held", values, held, lambda a: (*args, a, word or 0, bits, s + a // BUCKET * 4, q + a * bits // 8)
    )


def sign(values: Vector, held: Held, signs: NDArray[np.uint8], means: Vector) -> None:
    m, to = means.ctypes.data, signs.ctypes.data
    parts.write_held("sign_held", values, held, lambda a: (m + a // BUCKET * 8, to + a // 8))


def fp16(values: Vector, held: Held, halves: NDArray[np.uint8], exponents: NDArray[np.int8]) -> None:
    e, h = exponents.ctypes.data, halves.ctypes.data
    parts.write_held("fp16_held", values, held, lambda a: (e + a // BUCKET, h + 2 * a))


def bf16(values: Vector, held: Held, halves: NDArray[np.uint8]) -> None:
    h = halves.ctypes.data
    parts.write_held("bf16_held", values, held, lambda a: (h + 2 * a,))


def squares(values: Vector, held: Held) -> NDArray[np.float64]:
    """Values become p; the sum of each bucket's squares."""
    sums = np.empty(buckets(values.size))
    to = sums.ctypes.data
    parts.write_held("add_squares", values, held, lambda a: (to + a // BUCKET * 8,))
    return sums


def steps(values: Vector, held: Held, step: np.float32, bits: int, out: NDArray[np.uint8]) -> None:
    """As `native.ternary.write_steps`, of values that are p already."""
    q = out.ctypes.data
    parts.write_held("steps_held", values, held, lambda a: (step, bits, q + a * bits // 8))


def ternary(
    values: Vector, held: Held, starts: tuple[int, ...], most: np.float32, bits: int, out: NDArray[np.uint8],
    scales: Vector,
) -> None:  # fmt: skip
    """As `native.ternary.write` inside a residual."""
    run = kernel("ternary_held")
    assert run is not None
    edges = np.array([*starts, values.size], np.int64)
    firsts = np.concatenate([[0], np.cumsum(-(-np.diff(edges) // BUCKET))])  # each tensor's first scale
    x, r, e, s, q = (array.ctypes.data for array in (values, held.vector, edges, scales, out))

    def part(a: int, b: int) -> bool:
        at = s + int(firsts[a]) * 4, q + int(edges[a]) * bits // 8
        return bool(run(x, r, held.sign, e + 8 * a, b - a, most, bits, *at))

    if not all(each_of(parts_between(edges.tolist()), part)):
        raise not_finite()
