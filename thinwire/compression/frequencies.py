"""Frequencies of small numbers, by which `rans` codes them: measured ones, and those of distributions of one parameter.

Encoder and decoder must have equal frequencies on every machine, so all arithmetic here is of whole numbers. A stream
carries measured frequencies as levels, four an octave, each as the difference to the one before it. A level is at most
9 % off, which costs 0.002 bits a number.

Distributions have one parameter, a byte c, and a ratio m / (1 + m) with m = 2^(c / 8): `geometric` has the classes of
gaps whose mean is m, and `normal` has symbols whose frequency falls as ratio^(s^2). A parameter is at most 4.5 % off.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from thinwire.core.errors import BadPayload

ONE = 60  # binary places of a probability
UNIT = 256  # of costs: 1/256 bit
LEVELS = 63  # of a measured frequency; 0: the number does not occur
STEPS = 4  # levels an octave
LEVEL_BITS = 6
GEOMETRIC_BITS = 14  # 100 classes, each of which must be possible, take 0.6 % of 2^14
MEANS = 8 * 25  # the largest parameter of `geometric`: its mean is 2^25


@dataclass(frozen=True)
class Frequencies:
    """The frequencies of the numbers 0, 1, ..: they add up to 2^bits, and 0 stands for a number that never occurs."""

    bits: int
    of: tuple[int, ...]

    def cost(self, counts: Sequence[int]) -> int:
        """Return the length of the code of so many of each number, in `UNIT`; each that occurs has a frequency."""
        return sum(n * (UNIT * self.bits - logarithm(f)) for n, f in zip(counts, self.of, strict=False) if n)

    @property
    def is_certain(self) -> bool:
        """Return True if only one number occurs, whose code has no bits."""
        return max(self.of) == 1 << self.bits

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Return the sum of the frequencies before each number."""
        return tuple(accumulate(self.of[:-1], initial=0))


@functools.cache
def logarithm(number: int) -> int:
    """Return 256 times the logarithm to base 2, rounded down.

    >>> logarithm(4096), logarithm(3)
    (3072, 405)
    """
    return int((number**UNIT).bit_length() - 1)


def power(eighths: int) -> int:
    """Return 2^16 times 2^(eighths / 8), rounded down; `eighths` is at least -128.

    >>> power(8), power(1)
    (131072, 71467)
    """
    return isqrt(isqrt(isqrt(1 << (128 + eighths))))


def normalized(weights: Sequence[int], bits: int) -> Frequencies:
    """Return frequencies in proportion to weights, and at least 1 for a weight over 0."""
    total, room = sum(weights), (1 << bits) - sum(w > 0 for w in weights)
    found = [1 + w * room // total if w else 0 for w in weights]
    found[weights.index(max(weights))] += (1 << bits) - sum(found)
    return Frequencies(bits, tuple(found))


# Classes of gaps: a gap under 8 is its class; each further octave has four classes, and the rest of a gap is sent as it
# is. Within a class a geometric distribution is nearly even: that costs at most 0.004 bits.

CLASSES = 100  # of gaps under 2^26
WIDTHS = np.array([max(0, (c >> 2) - 1) for c in range(CLASSES)], np.uint8)  # bits of the rest of a gap
FIRSTS = np.array([c if c < 8 else (4 + (c & 3)) << ((c >> 2) - 1) for c in range(CLASSES)], np.int64)


def classes_of(gaps: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return the class of each gap.

    >>> classes_of(np.array([0, 7, 8, 9, 10, (1 << 24) - 1])).tolist()
    [0, 7, 8, 8, 9, 91]
    """
    return (np.searchsorted(FIRSTS, gaps, side="right") - 1).astype(np.uint8)


@functools.lru_cache(maxsize=32)
def geometric(parameter: int) -> Frequencies:
    """Return the frequencies of the classes of gaps whose mean is 2^(parameter / 8)."""
    ratio, left = _ratio(parameter), 1 << ONE
    weights = list[int]()
    for number in range(CLASSES - 1):
        ratio = ratio * ratio >> ONE if number >= 8 and number % 4 == 0 else ratio  # twice as many gaps in a class
        rest = left * ratio >> ONE
        weights.append(max(1, left - rest))
        left = rest
    return normalized([*weights, max(1, left)], GEOMETRIC_BITS)


def mean_parameter(total: int, count: int) -> int:
    """Return the parameter of `geometric` for `count` gaps that add up to `total`."""
    return bisect_right(_BETWEEN, (total << 16) // count)


def _ratio(parameter: int) -> int:
    mean = power(parameter)
    return (mean << ONE) // (mean + (1 << 16))


# The mean from which on the next parameter is nearer: 2^16 times 2^((2 c + 1) / 16).
_BETWEEN = [isqrt(isqrt(isqrt(isqrt(1 << (256 + 2 * c + 1))))) for c in range(MEANS)]

SMALLEST_NORMAL, MAX_NORMAL = 24, 255  # eighths: parameter 0 is 2^(-3)
_TWICE_SQUARES = [power(parameter - SMALLEST_NORMAL) for parameter in range(MAX_NORMAL)]


@functools.lru_cache(maxsize=32)
def normal(parameter: int, symbols: tuple[int, ...]) -> Frequencies:
    """Return the frequencies of these symbols, in proportion to ratio^(s^2): near those of rounded normal values."""
    ratio, weight = _ratio(parameter - SMALLEST_NORMAL), 1 << ONE
    twice, step, weights = ratio * ratio >> ONE, ratio, list[int]()
    for _ in range(1 + max(map(abs, symbols))):
        weights.append(max(1, weight))
        weight, step = weight * step >> ONE, step * twice >> ONE
    return normalized([weights[abs(s)] for s in symbols], bits_for(len(symbols)))


def fitting_normal(counts: Sequence[int], symbols: Sequence[int]) -> tuple[int, Frequencies]:
    """Return the parameter of `normal` that best suits so many of each symbol, and its frequencies.

    If large symbols are more frequent than among equal ones, as in the largest values of a vector, that is the largest
    parameter, whose frequencies are equal: no other is tried.
    """
    given = tuple(symbols)
    squares = sum(n * s * s for n, s in zip(counts, given, strict=True))
    if squares * len(given) >= sum(counts) * sum(s * s for s in given):
        return MAX_NORMAL, normal(MAX_NORMAL, given)
    parameter = bisect_left(_TWICE_SQUARES, (squares << 17) // sum(counts))
    found = normal(parameter, given)
    for step in (-1, 1):
        while 0 <= parameter + step <= MAX_NORMAL:
            nearby = normal(parameter + step, given)
            if nearby.cost(counts) >= found.cost(counts):
                break
            parameter, found = parameter + step, nearby
    return parameter, found


def bits_for(numbers: int) -> int:
    """Return the bits of the frequencies of so many numbers: those that never occur take at most 1.1 % from others."""
    return 12 if numbers <= 32 else 15


# Levels: measured frequencies as a stream carries them.

_WEIGHTS = [0, *(isqrt(isqrt(1 << (64 + level))) for level in range(LEVELS))]
_LEVEL_FROM = [isqrt(isqrt(isqrt(1 << (128 + 2 * level - 1)))) for level in range(1, LEVELS)]


def levels_of(counts: Sequence[int]) -> list[int]:
    """Return the level of each count; the largest count has the highest one."""
    scale, top = max(counts), power(2 * (LEVELS - 1))
    return [1 + bisect_right(_LEVEL_FROM, n * top // scale) if n else 0 for n in counts]


def of_levels(levels: Sequence[int], bits: int) -> Frequencies:
    """Return the frequencies of these levels."""
    return normalized([_WEIGHTS[level] for level in levels], bits)


class Bits:
    """A string of bits, the first one in the lowest place."""

    def __init__(self, number: int = 0) -> None:
        self._number, self.size = number, 0

    def put(self, number: int, width: int) -> None:
        """Append the lowest bits of a number."""
        self._number |= number << self.size
        self.size += width

    def take(self, width: int) -> int:
        """Return the next bits as a number; behind the end they are 0."""
        found = self._number >> self.size & ((1 << width) - 1)
        self.size += width
        return found

    @property
    def data(self) -> bytes:
        """Return what was put, in whole bytes."""
        return self._number.to_bytes(-(-self.size // 8), "little")


def write_levels(levels: Sequence[int], width: int, lag: int) -> bytes:
    """Return the levels of numbers of `width` bits: the last number, then each level.

    The first `lag` levels are sent as they are, others as the difference to the level `lag` before them: 0, -1, 1, -2
    .. are the numbers 1, 2, 3, 4 .. in Elias' gamma code (1975).
    """
    out = Bits()
    out.put(len(levels) - 1, width)
    for place, level in enumerate(levels):
        if place < lag:
            out.put(level, LEVEL_BITS)
            continue
        change = level - levels[place - lag]
        number = 2 * change + 1 if change >= 0 else -2 * change
        zeros = number.bit_length() - 1
        out.put(1 << zeros, zeros + 1)
        out.put(number & ((1 << zeros) - 1), zeros)
    return out.data


def read_levels(data: memoryview, width: int, lag: int) -> tuple[list[int], int]:
    """Return the levels at the beginning of a stream, and the number of bytes that they take; or raise BadPayload."""
    most = -(-(width + (13 << width)) // 8)  # of a difference under 64: 6 zeros, a 1, 6 bits
    bits = Bits(int.from_bytes(data[:most], "little"))
    levels = list[int]()
    for place in range(bits.take(width) + 1):
        if place < lag:
            levels.append(bits.take(LEVEL_BITS))
            continue
        zeros = 0
        while not bits.take(1):
            zeros += 1
            if zeros > LEVEL_BITS:
                raise BadPayload("a level that is not readable", why="its difference is too large, or cut off")
        number = 1 << zeros | bits.take(zeros)
        levels.append(levels[place - lag] + (number >> 1 if number & 1 else -(number >> 1)))
    size = -(-bits.size // 8)
    if size > len(data) or bits.take(8 * size - bits.size):
        raise BadPayload("frequencies that are cut off, or with bits behind them")
    if not (min(levels) >= 0 and max(levels) == LEVELS and levels[-1]):
        raise BadPayload("frequencies that rans never sends", why=f"levels are 0 to {LEVELS}, and the highest occurs")
    return levels, size
