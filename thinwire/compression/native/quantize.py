"""Kernels of the quantizers, of sums and maxima of buckets, and of checks for NaN and infinity.

Each function calls its kernel on the addresses of its arrays. Functions with a numpy oracle return None (or False) if
numpy is the path; all others require another path.

The `*_held` kernels encode with error feedback. They compensate, encode and update the memory of a bucket while it is
in cache. Where an index is hashed, `first` is the index of the first value, if the vector is a part of another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from thinwire.compression.base import BUCKET, PackedSymbols, Symbols, buckets, not_finite
from thinwire.compression.native import threads
from thinwire.compression.native.library import NUMPY, chosen, kernel
from thinwire.compression.native.sparse import stored
from thinwire.compression.native.threads import GRAIN, each, each_of, parts_between
from thinwire.core.types import Vector

if TYPE_CHECKING:
    from thinwire.compression.memory import Memory


def fp16_write(values: Vector, halves: NDArray[np.uint8], exponents: NDArray[np.int8]) -> None:
    """Write float16 values and exponents of `values`; raise NonFiniteUpdate for NaN and infinity."""
    e, h = exponents.ctypes.data, halves.ctypes.data
    threads.write_in_parts("fp16_encode", values, lambda a: (e + a // BUCKET, h + 2 * a))


def bf16_write(values: Vector, halves: NDArray[np.uint8]) -> None:
    """Write bfloat16 values of `values`; raise NonFiniteUpdate for NaN and infinity."""
    h = halves.ctypes.data
    threads.write_in_parts("bf16_encode", values, lambda a: (h + 2 * a,))


def halves_finite(halves: NDArray[np.float16] | NDArray[np.uint16], exponent: int) -> bool | None:
    """Return True if no 16-bit float has all bits of `exponent` set."""
    run = kernel("halves_finite")
    if run is None:
        return None
    at = halves.ctypes.data
    return all(each(0, halves.size, lambda a, b: run(at + 2 * a, b - a, exponent)))


def levels_checks_finite() -> bool:
    """Return True if the kernel of `levels_encode` is available, which refuses NaN and infinity."""
    return chosen() != NUMPY


def levels_encode(
    values: Vector, levels: int, most: np.float32, word: int | None
) -> tuple[NDArray[np.int8], Vector] | None:
    """Return symbols and scales; raise NonFiniteUpdate for NaN and infinity, which it finds without another pass."""
    run = kernel("levels_encode")
    if run is None:
        return None
    symbols, scales = np.empty(values.size, np.int8), np.empty(buckets(values.size), np.float32)
    levels_write(values, levels, most, word, 8, symbols.view(np.uint8), scales)
    return symbols, scales


def levels_write(
    values: Vector, levels: int, most: np.float32, word: int | None, bits: int, out: NDArray[np.uint8], scales: Vector,
    first: int = 0,
) -> None:  # fmt: skip
    """Write symbols in `bits` bits each, and scales, as `levels_encode` does."""
    s, q = scales.ctypes.data, out.ctypes.data
    args = levels, most, word is None
    threads.write_in_parts(
        "levels_encode", values,
        lambda a: (*args, first + a, word or 0, bits, s + a // BUCKET * 4, q + a * bits // 8),
    )  # fmt: skip


def levels_round(values: Vector, scales: Vector, levels: int, word: int | None, first: int) -> NDArray[np.int8] | None:
    """Return symbols for given scales."""
    if kernel("levels_round") is None:
        return None
    symbols = np.empty(values.size, np.int8)
    levels_write_rounded(values, scales, levels, word, 8, symbols.view(np.uint8), first)
    return symbols


def levels_write_rounded(
    values: Vector, scales: Vector, levels: int, word: int | None, bits: int, out: NDArray[np.uint8], first: int = 0
) -> None:
    """Write symbols in `bits` bits each for given scales."""
    run = kernel("levels_round")
    assert run is not None
    x, s, q = values.ctypes.data, scales.ctypes.data, out.ctypes.data

    def part(a: int, b: int) -> None:
        at = s + a // BUCKET * 4, levels, word is None, first + a, word or 0, bits, q + a * bits // 8
        run(x + 4 * a, b - a, *at)

    each(0, values.size, part)


def levels_add(
    symbols: Symbols | PackedSymbols, scales: Vector, span: slice, factor: np.float32, adds: bool, into: Vector,
    starts: tuple[int, ...] = (0,),
) -> bool:  # fmt: skip
    """Add or replace decoded values as `threads.add_in_parts` does; buckets begin again at each of `starts`."""
    scales = np.require(scales, np.float32, ["C", "A"])  # scales in a frame may begin at any byte
    edges = np.array([*starts, symbols.size], np.int64)
    return threads.add_in_parts("levels_add", (*stored(symbols), scales, edges), span, factor, adds, into)


def natural_write(values: Vector, word: int, symbols: NDArray[np.uint8], tops: NDArray[np.int8], first: int) -> None:
    """Write symbols and exponents; raise NonFiniteUpdate for NaN and infinity."""
    t, q = tops.ctypes.data, symbols.ctypes.data
    threads.write_in_parts("natural_encode", values, lambda a: (first + a, word, t + a // BUCKET, q + a))


def bucket_sums(values: Vector, power: int) -> NDArray[np.float64] | None:
    """Return the sum of |x|^power of each bucket."""
    run = kernel("bucket_sums")
    if run is None or values.dtype != np.float32 or not values.flags.c_contiguous:
        return None
    sums = np.empty(buckets(values.size))
    x, to = values.ctypes.data, sums.ctypes.data
    each(0, values.size, lambda a, b: run(x + 4 * a, b - a, power == 2, to + a // BUCKET * 8))
    return sums


def maxima(values: Vector) -> Vector | None:
    """Return the largest magnitude of each bucket."""
    run = kernel("maxima")
    if run is None or values.dtype != np.float32 or not values.flags.c_contiguous:
        return None
    found = np.empty(buckets(values.size), np.float32)
    x, to = values.ctypes.data, found.ctypes.data
    each(0, values.size, lambda a, b: run(x + 4 * a, b - a, to + a // BUCKET * 4))
    return found


def sign_write(values: Vector, signs: NDArray[np.uint8], means: Vector) -> None:
    """Write a sign bit for each value and two means for each bucket; raise NonFiniteUpdate for NaN and infinity."""
    m, to = means.ctypes.data, signs.ctypes.data
    threads.write_in_parts("sign_encode", values, lambda a: (m + a // BUCKET * 8, to + a // 8))


def sign_add(
    symbols: Symbols | PackedSymbols, means: Vector, span: slice, factor: np.float32, adds: bool, into: Vector
) -> bool:
    """Add or replace decoded values as `threads.add_in_parts` does."""
    means = np.require(means, np.float32, ["C", "A"])  # means in a frame may begin at any byte
    return threads.add_in_parts("sign_add", (*stored(symbols), means), span, factor, adds, into)


def ternary_write(
    values: Vector, starts: tuple[int, ...], sigmas: float, most: np.float32, word: int | None, bits: int,
    out: NDArray[np.uint8], scales: Vector,
) -> None:  # fmt: skip
    """Write symbols of `bits` bits each, and scales, of tensors that begin at `starts`.

    Without a word, round to nearest on the maximum of each bucket, as inside error feedback.
    """
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


def steps_write(values: Vector, step: np.float32, bits: int, out: NDArray[np.uint8]) -> None:
    """Write 1 where a value is at least `step`, -1 where it is at most -step, else 0."""
    run = kernel("steps_encode")
    assert run is not None
    x, q = values.ctypes.data, out.ctypes.data
    each(0, values.size, lambda a, b: run(x + 4 * a, b - a, step, bits, q + a * bits // 8))


def eden_write(
    values: Vector, word: int, levels: Vector, divisor: float, most: np.float32, bits: int,
    out: NDArray[np.uint8], scales: NDArray[np.uint8], first: int,
) -> None:  # fmt: skip
    """Write symbols of `bits` bits each, and the bytes of a float32 for each block.

    Raise NonFiniteUpdate for NaN and infinity. `first` is the index of the first value, if the vector is a part of
    another one; that part begins at a whole block.
    """
    run = kernel("eden_encode")
    assert run is not None
    x, table, to, factors = values.ctypes.data, levels.ctypes.data, out.ctypes.data, scales.ctypes.data
    width = levels.size.bit_length()

    def part(a: int, b: int) -> bool:
        places = _eden_room(), factors + a // GRAIN * 4, to + a * bits // 8
        room = places[0].ctypes.data
        return bool(run(x + 4 * a, b - a, first + a, word, width, bits, table, divisor, most, room, *places[1:]))

    if not all(each(0, values.size, part)):
        raise not_finite()


def eden_write_held(
    values: Vector, held: Memory, word: int, levels: Vector, divisor: float, most: np.float32, bits: int,
    out: NDArray[np.uint8], scales: NDArray[np.uint8],
) -> None:  # fmt: skip
    """Encode as `eden_write` does, with error feedback; `values` becomes the updated memory, except for the tail."""
    run = kernel("eden_held")
    assert run is not None
    x, r, table, to, factors = (array.ctypes.data for array in (values, held.vector, levels, out, scales))
    width = levels.size.bit_length()

    def part(a: int, b: int) -> bool:
        room = _eden_room()
        at = room.ctypes.data, factors + a // GRAIN * 4, to + a * bits // 8
        return bool(run(x + 4 * a, r + 4 * a, held.sign, b - a, a, word, width, bits, table, divisor, most, *at))

    if not all(each(0, values.size, part)):
        raise not_finite()


def eden_add(
    symbols: Symbols | PackedSymbols, scales: NDArray[np.uint8], span: slice, word: int, levels: Vector,
    factor: np.float32, adds: bool, into: Vector,
) -> bool:  # fmt: skip
    """Add or replace the rotated values in `span` times `factor`; the tail is not changed."""
    run = kernel("eden_add")
    if run is None:
        return False
    (q, bits), factors, table, to = stored(symbols), scales.ctypes.data, levels.ctypes.data, into.ctypes.data
    width, size, start = levels.size.bit_length(), symbols.size, span.start

    def part(a: int, b: int) -> None:
        room = _eden_room()
        run(q, bits, factors, size, a, b, word, width, table, factor, adds, room.ctypes.data, to + 4 * (a - start))

    each(start, span.stop, part)
    return True


def _eden_room() -> Vector:
    """Return the working memory of one thread, for one block."""
    run = kernel("eden_room")
    assert run is not None
    return np.empty(run(), np.float32)


def levels_write_held(
    values: Vector, held: Memory, levels: int, most: np.float32, word: int | None, bits: int, out: NDArray[np.uint8],
    scales: Vector,
) -> None:  # fmt: skip
    """Encode as `levels_write` does, with error feedback; `values` becomes the updated memory."""
    s, q = scales.ctypes.data, out.ctypes.data
    args = levels, most, word is None
    threads.write_held_in_parts(
        "levels_held", values, held, lambda a: (*args, a, word or 0, bits, s + a // BUCKET * 4, q + a * bits // 8)
    )


def sign_write_held(values: Vector, held: Memory, signs: NDArray[np.uint8], means: Vector) -> None:
    """Encode as `sign_write` does, with error feedback; `values` becomes the updated memory."""
    m, to = means.ctypes.data, signs.ctypes.data
    threads.write_held_in_parts("sign_held", values, held, lambda a: (m + a // BUCKET * 8, to + a // 8))


def fp16_write_held(values: Vector, held: Memory, halves: NDArray[np.uint8], exponents: NDArray[np.int8]) -> None:
    """Encode as `fp16_write` does, with error feedback; `values` becomes the updated memory."""
    e, h = exponents.ctypes.data, halves.ctypes.data
    threads.write_held_in_parts("fp16_held", values, held, lambda a: (e + a // BUCKET, h + 2 * a))


def bf16_write_held(values: Vector, held: Memory, halves: NDArray[np.uint8]) -> None:
    """Encode as `bf16_write` does, with error feedback; `values` becomes the updated memory."""
    h = halves.ctypes.data
    threads.write_held_in_parts("bf16_held", values, held, lambda a: (h + 2 * a,))


def squares_held(values: Vector, held: Memory) -> NDArray[np.float64]:
    """Compensate `values` in place by the memory; return the sum of each bucket's squares."""
    sums = np.empty(buckets(values.size))
    to = sums.ctypes.data
    threads.write_held_in_parts("add_squares", values, held, lambda a: (to + a // BUCKET * 8,))
    return sums


def steps_write_held(values: Vector, held: Memory, step: np.float32, bits: int, out: NDArray[np.uint8]) -> None:
    """Encode compensated values as `steps_write` does; `values` becomes the updated memory."""
    q = out.ctypes.data
    threads.write_held_in_parts("steps_held", values, held, lambda a: (step, bits, q + a * bits // 8))


def ternary_write_held(
    values: Vector, held: Memory, starts: tuple[int, ...], most: np.float32, bits: int, out: NDArray[np.uint8],
    scales: Vector,
) -> None:  # fmt: skip
    """Encode as `ternary_write` does, with error feedback; `values` becomes the updated memory."""
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


def finite(x: Vector) -> bool | None:
    """Return True if all values are finite."""
    run = kernel("finite")
    if run is None:
        return None
    at = x.ctypes.data
    return all(each(0, x.size, lambda a, b: run(at + 4 * a, b - a)))


def add_finite(x: Vector, other: Vector, sign: float) -> bool | None:
    """Add `sign` times `other` to `x`; return True if all sums are finite, else some may be missing."""
    run = kernel("add_finite")
    if run is None:
        return None
    to, of = x.ctypes.data, other.ctypes.data
    return all(each(0, x.size, lambda a, b: run(to + 4 * a, of + 4 * a, b - a, sign)))
