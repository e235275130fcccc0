"""The kernels of `methods/eden.py`, which rotate on the way; None or False where numpy is the path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.codec import PackedSymbols, Symbols, not_finite
from thinwire.aggregation.native.path import kernel
from thinwire.aggregation.native.stored import stored
from thinwire.aggregation.native.threads import GRAIN, each
from thinwire.core.types import Vector

if TYPE_CHECKING:
    from thinwire.aggregation.held import Held


def write(
    values: Vector, word: int, levels: Vector, divisor: float, most: np.float32, bits: int,
    out: NDArray[np.uint8], scales: NDArray[np.uint8], first: int,
) -> None:  # fmt: skip
    """Symbols of `bits` bits each, and a float32 for each block, byte by byte; NonFiniteUpdate for NaN and infinity.

    `first`: the index of the first value, where the vector is a part of another one that begins at a whole block.
    """
    run = kernel("eden_encode")
    assert run is not None
    x, table, to, factors = values.ctypes.data, levels.ctypes.data, out.ctypes.data, scales.ctypes.data
    width = levels.size.bit_length()

    def part(a: int, b: int) -> bool:
        places = _room(), factors + a // GRAIN * 4, to + a * bits // 8
        room = places[0].ctypes.data
        return bool(run(x + 4 * a, b - a, first + a, word, width, bits, table, divisor, most, room, *places[1:]))

    if not all(each(0, values.size, part)):
        raise not_finite()


def write_held(
    values: Vector, held: Held, word: int, levels: Vector, divisor: float, most: np.float32, bits: int,
    out: NDArray[np.uint8], scales: NDArray[np.uint8],
) -> None:  # fmt: skip
    """As `write`, and values become what is to be held; the tail is not touched."""
    run = kernel("eden_held")
    assert run is not None
    x, r, table, to, factors = (array.ctypes.data for array in (values, held.vector, levels, out, scales))
    width = levels.size.bit_length()

    def part(a: int, b: int) -> bool:
        room = _room()
        at = room.ctypes.data, factors + a // GRAIN * 4, to + a * bits // 8
        return bool(run(x + 4 * a, r + 4 * a, held.sign, b - a, a, word, width, bits, table, divisor, most, *at))

    if not all(each(0, values.size, part)):
        raise not_finite()


def add(
    symbols: Symbols | PackedSymbols, scales: NDArray[np.uint8], span: slice, word: int, levels: Vector,
    factor: np.float32, adds: bool, into: Vector,
) -> bool:  # fmt: skip
    """What is rotated of into[0 ..] gets the values in `span` times a factor; the tail is not touched."""
    run = kernel("eden_add")
    if run is None:
        return False
    (q, bits), factors, table, to = stored(symbols), scales.ctypes.data, levels.ctypes.data, into.ctypes.data
    width, size, start = levels.size.bit_length(), symbols.size, span.start

    def part(a: int, b: int) -> None:
        room = _room()
        run(q, bits, factors, size, a, b, word, width, table, factor, adds, room.ctypes.data, to + 4 * (a - start))

    each(start, span.stop, part)
    return True


def _room() -> Vector:
    """For one block, of one thread."""
    run = kernel("eden_room")
    assert run is not None
    return np.empty(run(), np.float32)
