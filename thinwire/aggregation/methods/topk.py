"""topk(r): the largest magnitudes are sent, the rest waits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.codec import Contractive, Indices, Kind, Role
from thinwire.aggregation.methods.arguments import read_ratio
from thinwire.core.types import Vector

SAMPLED = 1 << 16  # magnitudes that a first guess at the threshold looks at


@dataclass(frozen=True)
class TopK:
    """Sends the share r of values with the largest magnitudes, exactly, with their places; ties to the lower one.

    Contractive with delta = ratio: what is left out is at most (1 - k/n) of the squared norm. Needs feedback to
    converge (Stich et al. 2018, "Sparsified SGD with memory"). k = max(1, ceil(ratio n)), at least one value.

    >>> TopK(Decimal("0.5")).select(np.float32([1, -3, 3, 2]), 0)
    array([1, 2])
    """

    role: ClassVar[Role] = "sparsifier"
    fixed: ClassVar[bool] = True
    seeded: ClassVar[bool] = False
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

    def select(self, values: Vector, word: int) -> Indices:
        count = self.count(values.size)
        if count == values.size:
            return np.arange(count, dtype=np.int64)
        # As integers, magnitudes of floats sort like the floats, and equal ones are equal bits.
        magnitudes = values.view(np.uint32) & np.uint32(0x7FFFFFFF)
        near = np.flatnonzero(magnitudes >= surely_low(magnitudes, count))
        candidates = magnitudes[near]
        least = np.partition(candidates, near.size - count)[near.size - count]
        above = near[candidates > least]
        ties = near[candidates == least][: count - above.size]
        return np.sort(np.concatenate([above, ties]))


def share(ratio: Decimal, size: int) -> int:
    """How many of `size` values a ratio sends: max(1, ceil(ratio size)), exactly.

    >>> share(Decimal("0.01"), 101), share(Decimal("0.01"), 5)
    (2, 1)
    """
    return min(size, max(1, math.ceil(Fraction(ratio) * size)))


def surely_low(magnitudes: NDArray[np.uint32], count: int) -> np.uint32:
    """A threshold that at least `count` magnitudes reach: guessed from a sample, then counted, so always true."""
    step = magnitudes.size // SAMPLED
    sample = magnitudes[:: max(1, step)]
    expected = count / max(1, step)
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 8)  # four deviations: a wrong guess costs only time
    if step < 2 or rank >= sample.size:
        return np.uint32(0)
    guess = np.uint32(np.partition(sample, sample.size - rank)[sample.size - rank])
    return guess if np.count_nonzero(magnitudes >= guess) >= count else np.uint32(0)
