"""Sparsifiers: select the coordinates to send, the largest (`topk`, `threshold`) or random ones (`randk`)."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from thinwire.compression.base import (
    Contractive,
    ErrorBound,
    Indices,
    SeededSparsifier,
    Sparsifier,
    Unbiased,
)
from thinwire.compression.codecs import read_number, read_ratio
from thinwire.compression.vector_ops import MAGNITUDE, maxima, reaching, require_finite, rms
from thinwire.core.errors import CodecError, NonFiniteUpdate
from thinwire.core.prng import lowbias32

if TYPE_CHECKING:
    from thinwire.core.types import Vector

INFINITE = np.uint32(0x7F800000)  # bits of infinity; NaN has larger ones
SAMPLED = 1 << 16  # magnitudes in the sample from which `guessed` takes the threshold


@dataclass(frozen=True)
class RatioSparsifier(Sparsifier):
    """The base class of sparsifiers that send a share of the values: `ratio`, at least one value.

    The kind is that of the largest values, or of random ones: delta = ratio.
    """

    ratio: Decimal

    @classmethod
    def read(cls, argument: str | None) -> Self:
        """Make the codec from its argument, the ratio."""
        return cls(read_ratio(cls._name(), argument))

    @classmethod
    def _name(cls) -> str:
        return cls.__name__.lower()

    @property
    def spec(self) -> str:
        return f"{self._name()}({self.ratio:f})"

    def kind(self) -> ErrorBound:
        return Contractive(float(self.ratio))

    def count(self, size: int) -> int:
        """Return the number of values that are sent of `size`."""
        return share(self.ratio, size)

    def with_ratio(self, least: Decimal) -> Self:
        return replace(self, ratio=max(self.ratio, least, key=Fraction).normalize())


@dataclass(frozen=True)
class TopK(RatioSparsifier):
    """Sends the share r of values with the largest magnitudes, exactly, with their indices; ties go to the lower index.

    Contractive with delta = ratio: the values left out hold at most (1 - k/n) of the squared norm. Needs feedback to
    converge (Stich et al. 2018, "Sparsified SGD with memory"). k = max(1, ceil(ratio n)), at least one value.

    >>> TopK(Decimal("0.5")).select(np.float32([1, -3, 3, 2]), 0)
    (array([1, 2]), array([-3.,  3.], dtype=float32))
    """

    examples: ClassVar[tuple[str, ...]] = ("topk(0.01)", "topk(0.3)", "topk(1)")
    paper: ClassVar[str] = "Stich et al. 2018"
    rejects_non_finite: ClassVar[bool] = True  # NaN and infinity have the largest bits, so they are always selected

    def select(self, values: Vector, word: int) -> tuple[Indices, Vector]:
        count = self.count(values.size)
        if count == values.size:
            require_finite(values)
            return np.arange(count, dtype=np.int64), values.copy()
        near, bits = candidates(values, count)
        magnitudes = bits & MAGNITUDE
        if magnitudes.max() >= INFINITE:
            raise NonFiniteUpdate
        least = np.partition(magnitudes, near.size - count)[near.size - count]
        sent = magnitudes > least
        ties = np.flatnonzero(magnitudes == least)
        sent[ties[: count - np.count_nonzero(sent)]] = True
        return near[sent].astype(np.int64), bits[sent].view(np.float32)


@functools.cache
def share(ratio: Decimal, size: int) -> int:
    """Return the number of values that a ratio sends of `size`: max(1, ceil(ratio size)), exactly.

    >>> share(Decimal("0.01"), 101), share(Decimal("0.01"), 5)
    (2, 1)
    """
    return min(size, max(1, math.ceil(Fraction(ratio) * size)))


def candidates(values: Vector, count: int) -> tuple[NDArray[np.integer], NDArray[np.uint32]]:
    """Return indices and bits of all values that reach some threshold, which at least `count` of them do."""
    found = reaching(values, *guessed(values, count))
    return found if found[0].size >= count else _all(values)


def _all(values: Vector) -> tuple[NDArray[np.integer], NDArray[np.uint32]]:
    """Return all values as candidates: a wrong guess of the threshold costs only time."""
    return np.arange(values.size), values.view(np.uint32)


def guessed(values: Vector, count: int) -> tuple[np.uint32, float]:
    """Return a threshold that slightly more than `count` magnitudes should reach, and their expected share.

    Both come from a sample.
    """
    step = max(1, values.size // SAMPLED)
    expected = count / step
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 8)  # four deviations
    size = -(-values.size // step)
    if step < 2 or rank >= size:
        return np.uint32(0), 1.0
    sample = values[::step].view(np.uint32) & MAGNITUDE
    return np.uint32(np.partition(sample, size - rank)[size - rank]), rank / size


MAX_FLOAT32 = np.finfo(np.float32).max
ROUNDS = 4
GOLDEN = 0x9E3779B9


@dataclass(frozen=True)
class RandK(RatioSparsifier, SeededSparsifier):
    """Sends the share r of values at random indices, which encoder and decoder derive from a seed in the frame.

    Contractive with delta = r in expectation (Stich et al. 2018). `randk(r, unbiased)` sends the values times n/k, so
    that the mean is exact and omega = 1/r - 1. Error feedback refuses that form for r up to 1/2, where omega is 1 or
    more: it would diverge. Values that would overflow are sent as the largest finite number.

    The indices are the first k of a permutation of all. The permutation is a Feistel network with four rounds on the
    next larger even number of bits, walked until it returns into the range (Black and Rogaway 2002).
    """

    examples: ClassVar[tuple[str, ...]] = ("randk(0.1)", "randk(0.5) > int8", "randk(0.1, unbiased) > eden(1)")
    paper: ClassVar[str] = "Stich et al. 2018; Black and Rogaway 2002"
    unbiased: bool = False

    @classmethod
    def read(cls, argument: str | None) -> Self:
        """Make the codec from its argument: the ratio, and `unbiased` for values times 1/r."""
        ratio, comma, word = (argument or "").partition(",")
        if comma and word.strip() != "unbiased":
            why, hint = "beside its ratio it takes the word unbiased", f"randk({ratio.strip()}, unbiased)"
            raise CodecError(f"randk({argument}) is not valid", why=why, hint=hint)
        return cls(read_ratio("randk", ratio), bool(comma))

    @property
    def spec(self) -> str:
        return f"randk({self.ratio:f}, unbiased)" if self.unbiased else super().spec

    def kind(self) -> ErrorBound:
        return Unbiased(float(1 / self.ratio) - 1) if self.unbiased else super().kind()

    def select(self, values: Vector, word: int) -> tuple[Indices, Vector]:
        places, sent = super().select(values, word)
        if self.unbiased:
            with np.errstate(over="ignore"):
                sent *= np.float32(values.size / max(1, places.size))
            np.clip(sent, -MAX_FLOAT32, MAX_FLOAT32, out=sent)
        return places, sent

    def places(self, size: int, word: int) -> Indices:
        half = max(1, -(-max(size - 1, 1).bit_length() // 2))
        found = _permuted(np.arange(self.count(size), dtype=np.uint32), half, word)
        while (out := found >= size).any():
            found[out] = _permuted(found[out], half, word)
        return np.sort(found).astype(np.int64)


def _permuted(numbers: NDArray[np.uint32], half: int, word: int) -> NDArray[np.uint32]:
    """Return each number's image under a permutation of 0 .. 4^half - 1."""
    bits, mask = np.uint32(half), np.uint32((1 << half) - 1)
    left, right = numbers >> bits, numbers & mask
    for number in range(1, ROUNDS + 1):
        salt = np.uint32((word + number * GOLDEN) & 0xFFFFFFFF)
        left, right = right, left ^ (lowbias32(right ^ salt) & mask)
    return left << bits | right


MAX_SEGMENT = 1 << 24  # values


@dataclass(frozen=True)
class Threshold(Sparsifier):
    """Sends the values of at least t root mean squares, and always the largest, with their indices.

    It sends the values themselves (Aji and Heafield 2017). Strom (2015), whose threshold is a fixed number, sends the
    threshold in their place, as `twobit`. The values left out hold less than t^2 of the squared norm, and the largest
    value holds at least its share of it: delta = 1 - t^2 for t < 1, else at least 1 in 2^24.
    """

    examples: ClassVar[tuple[str, ...]] = ("threshold(2.5)", "threshold(0.5)")
    paper: ClassVar[str] = "Aji and Heafield 2017"
    fixed: ClassVar[bool] = False
    rejects_non_finite: ClassVar[bool] = True  # NaN and infinity make the mean square not finite
    times: Decimal

    @classmethod
    def read(cls, argument: str | None) -> Threshold:
        """Make the codec from its argument, the threshold in root mean squares."""
        return cls(read_number("threshold", argument, Decimal(1000), "2.5"))

    @property
    def spec(self) -> str:
        return f"threshold({self.times:f})"

    def kind(self) -> ErrorBound:
        return Contractive(max(1 - float(self.times) ** 2, 1 / MAX_SEGMENT))

    def count(self, size: int) -> int:
        """Return the largest number of values that are sent, which is `size`."""
        return size

    def select(self, values: Vector, word: int) -> tuple[Indices, Vector]:
        if not values.size:
            return np.zeros(0, np.int64), values.copy()
        with np.errstate(invalid="ignore"):  # signaling NaN
            mean = rms(values)  # squares of float32 are finite in float64
        if not np.isfinite(mean):
            raise NonFiniteUpdate
        with np.errstate(over="ignore"):
            least = min(np.float32(float(self.times) * mean), maxima(values).max())
        if not least:
            largest = np.array([np.argmax(np.abs(values))])
            return largest, values[largest]
        places, bits = reaching(values, least.view(np.uint32), min(1.0, float(self.times) ** -2))  # Chebyshev's share
        return places.astype(np.int64, copy=False), bits.view(np.float32)
