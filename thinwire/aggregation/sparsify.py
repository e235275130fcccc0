"""Sparsifiers: which coordinates of a segment are sent at all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from thinwire.aggregation.codec import Contractive, Indices, Kind
from thinwire.core.types import Vector


@dataclass(frozen=True)
class TopK:
    """The share `ratio` of coordinates with the largest magnitudes, exact within a segment; ties to the lower index.

    Contractive with delta = ratio: what is left out is at most (1 - k/n) of the squared norm. Needs feedback to
    converge (Stich et al. 2018, "Sparsified SGD with memory"). k = max(1, ceil(ratio n)), at least one value.

    >>> TopK(Fraction(1, 2)).select(np.float32([1, -3, 3, 2]))
    array([1, 2])
    """

    ratio: Fraction

    def kind(self) -> Kind:
        return Contractive(float(self.ratio))

    def count(self, size: int) -> int:
        return min(size, max(1, math.ceil(self.ratio * size)))

    def select(self, values: Vector) -> Indices:
        count = self.count(values.size)
        if count == values.size:
            return np.arange(count, dtype=np.int64)
        # As integers, magnitudes of floats sort like the floats, and equal ones are equal bits.
        magnitudes = values.view(np.uint32) & np.uint32(0x7FFFFFFF)
        least = np.partition(magnitudes, values.size - count)[values.size - count]
        above = np.flatnonzero(magnitudes > least)
        ties = np.flatnonzero(magnitudes == least)[: count - above.size]
        return np.sort(np.concatenate([above, ties]))
