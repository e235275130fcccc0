"""The kernels of `methods/levels.py`, called on its arrays; None where numpy is the path."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.codec import BUCKET, PackedSymbols, Symbols, buckets
from thinwire.aggregation.native import parts
from thinwire.aggregation.native.path import NUMPY, chosen, kernel
from thinwire.aggregation.native.stored import stored
from thinwire.aggregation.native.threads import each
from thinwire.core.types import Vector


def looks() -> bool:
    """Whether `encode` is there to refuse what is not finite."""
    return chosen() != NUMPY


def encode(values: Vector, levels: int, most: np.float32, word: int | None) -> tuple[NDArray[np.int8], Vector] | None:
    """Symbols and scales; NonFiniteUpdate for NaN and infinity, which it sees without a pass of their own."""
    run = kernel("levels_encode")
    if run is None:
        return None
    symbols, scales = np.empty(values.size, np.int8), np.empty(buckets(values.size), np.float32)
    write(values, levels, most, word, 8, symbols.view(np.uint8), scales)
    return symbols, scales


def write(
    values: Vector, levels: int, most: np.float32, word: int | None, bits: int, out: NDArray[np.uint8], scales: Vector,
    first: int = 0,
) -> None:  # fmt: skip
    """The same into arrays that are given, symbols in `bits` bits each; values are counted from `first`."""
    s, q = scales.ctypes.data, out.ctypes.data
    args = levels, most, word is None
    parts.write(
        "levels_encode", values,
        lambda a: (*args, first + a, word or 0, bits, s + a // BUCKET * 4, q + a * bits // 8),
    )  # fmt: skip


def rounded(values: Vector, scales: Vector, levels: int, word: int | None, first: int) -> NDArray[np.int8] | None:
    """Symbols for scales that are given."""
    if kernel("levels_round") is None:
        return None
    symbols = np.empty(values.size, np.int8)
    write_rounded(values, scales, levels, word, 8, symbols.view(np.uint8), first)
    return symbols


def write_rounded(
    values: Vector, scales: Vector, levels: int, word: int | None, bits: int, out: NDArray[np.uint8], first: int = 0
) -> None:
    """The same into an array that is given, symbols in `bits` bits each."""
    run = kernel("levels_round")
    assert run is not None
    x, s, q = values.ctypes.data, scales.ctypes.data, out.ctypes.data

    def part(a: int, b: int) -> None:
        at = s + a // BUCKET * 4, levels, word is None, first + a, word or 0, bits, q + a * bits // 8
        run(x + 4 * a, b - a, *at)

    each(0, values.size, part)


def add(
    symbols: Symbols | PackedSymbols, scales: Vector, span: slice, factor: np.float32, adds: bool, into: Vector,
    starts: tuple[int, ...] = (0,),
) -> bool:  # fmt: skip
    """See `parts.add`; buckets begin anew at each of `starts`."""
    scales = np.require(scales, np.float32, ["C", "A"])  # in a frame they may stand at any byte
    edges = np.array([*starts, symbols.size], np.int64)
    return parts.add("levels_add", (*stored(symbols), scales, edges), span, factor, adds, into)
