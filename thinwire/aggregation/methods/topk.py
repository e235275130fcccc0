"""topk(r): the largest magnitudes are sent, the rest waits."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.codec import Contractive, Indices, Kind, Role, not_finite
from thinwire.aggregation.methods.arguments import read_ratio
from thinwire.aggregation.reaching import MAGNITUDE, reaching
from thinwire.aggregation.vectors import require_finite
from thinwire.core.types import Vector

INFINITE = np.uint32(0x7F800000)  # from here on they are infinity and NaN
SAMPLED = 1 << 16  # magnitudes that a first guess at the threshold looks at


@dataclass(frozen=True)
class TopK:
    """Sends the share r of values with the largest magnitudes, exactly, with their places; ties to the lower one.

    Contractive with delta = ratio: what is left out is at most (1 - k/n) of the squared norm. Needs feedback to
    converge (Stich et al. 2018, "Sparsified SGD with memory"). k = max(1, ceil(ratio n)), at least one value.

    >>> TopK(Decimal("0.5")).select(np.float32([1, -3, 3, 2]), 0)
    (array([1, 2]), array([-3.,  3.], dtype=float32))
    """

    role: ClassVar[Role] = "sparsifier"
    fixed: ClassVar[bool] = True
    seeded: ClassVar[bool] = False
    looks: ClassVar[bool] = True  # NaN and infinity are larger than what is sent
    examples: ClassVar[tuple[str, ...]] = ("topk(0.01)", "topk(0.3)", "topk(1)")
    ratio: Decimal

    @classmethod
    def read(cls, argument: str | None) -> TopK:
        return cls(read_ratio("topk", argument))

    @property
    def spec(self) -> str:
        return f"topk({self.ratio:f})"

    def kind(self) -> Kind:
        return Contractive(float(self.ratio))

    def count(self, size: int) -> int:
        return share(self.ratio, size)

    def select(self, values: Vector, word: int) -> tuple[Indices, Vector]:
        count = self.count(values.size)
        if count == values.size:
            require_finite(values)
            return np.arange(count, dtype=np.int64), values.copy()
        near, bits = candidates(values, count)
        magnitudes = bits & MAGNITUDE
        if magnitudes.max() >= INFINITE:
            raise not_finite()
        least = np.partition(magnitudes, near.size - count)[near.size - count]
        sent = magnitudes > least
        ties = np.flatnonzero(magnitudes == least)
        sent[ties[: count - np.count_nonzero(sent)]] = True
        return near[sent].astype(np.int64), bits[sent].view(np.float32)


@functools.cache
def share(ratio: Decimal, size: int) -> int:
    """How many of `size` values a ratio sends: max(1, ceil(ratio size)), exactly.

    >>> share(Decimal("0.01"), 101), share(Decimal("0.01"), 5)
    (2, 1)
    """
    return min(size, max(1, math.ceil(Fraction(ratio) * size)))


def candidates(values: Vector, count: int) -> tuple[NDArray[np.integer], NDArray[np.uint32]]:
    """Places and bits of all values that reach a threshold which at least `count` of them do."""
    found = reaching(values, *guessed(values, count))
    return found if found[0].size >= count else _all(values)


def _all(values: Vector) -> tuple[NDArray[np.integer], NDArray[np.uint32]]:
    """Where the guess was wrong: it costs only time."""
    return np.arange(values.size), values.view(np.uint32)


def guessed(values: Vector, count: int) -> tuple[np.uint32, float]:
    """A threshold that about so many magnitudes reach, rather more, and the share of all that is; from a sample."""
    step = max(1, values.size // SAMPLED)
    expected = count / step
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 8)  # four deviations
    size = -(-values.size // step)
    if step < 2 or rank >= size:
        return np.uint32(0), 1.0
    sample = values[::step].view(np.uint32) & MAGNITUDE
    return np.uint32(np.partition(sample, size - rank)[size - rank]), rank / size
