"""threshold(t): what is large beside the rest."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import ClassVar

import numpy as np

from thinwire.aggregation.buckets import maxima
from thinwire.aggregation.codec import Contractive, Indices, Kind, Role, not_finite
from thinwire.aggregation.methods.arguments import read_number
from thinwire.aggregation.reaching import reaching
from thinwire.aggregation.sums import rms
from thinwire.core.types import Vector

LARGEST_SEGMENT = 1 << 24  # values


@dataclass(frozen=True)
class Threshold:
    """Sends the values of at least t root mean squares, and always the largest, with their places.

    Strom (2015) with a threshold that follows the values. What is left out has less than t^2 of the squared norm, and
    the largest value is at least its share of it: delta = 1 - t^2 for t < 1, else 1 in 2^24 at least.
    """

    role: ClassVar[Role] = "sparsifier"
    examples: ClassVar[tuple[str, ...]] = ("threshold(2.5)", "threshold(0.5)")
    fixed: ClassVar[bool] = False
    seeded: ClassVar[bool] = False
    looks: ClassVar[bool] = True  # NaN and infinity are in the mean
    times: Decimal

    @classmethod
    def read(cls, argument: str | None) -> Threshold:
        return cls(read_number("threshold", argument, Decimal(1000), "2.5"))

    @property
    def spec(self) -> str:
        return f"threshold({self.times:f})"

    def kind(self) -> Kind:
        return Contractive(max(1 - float(self.times) ** 2, 1 / LARGEST_SEGMENT))

    def count(self, size: int) -> int:
        return size

    def select(self, values: Vector, word: int) -> tuple[Indices, Vector]:
        if not values.size:
            return np.zeros(0, np.int64), values.copy()
        with np.errstate(invalid="ignore"):  # NaN that signals
            mean = rms(values)  # squares of float32 are finite in float64
        if not np.isfinite(mean):
            raise not_finite()
        with np.errstate(over="ignore"):
            least = min(np.float32(float(self.times) * mean), maxima(values).max())
        if not least:
            largest = np.array([np.argmax(np.abs(values))])
            return largest, values[largest]
        places, bits = reaching(values, least.view(np.uint32), min(1.0, float(self.times) ** -2))  # Chebyshev's share
        return places.astype(np.int64, copy=False), bits.view(np.float32)
