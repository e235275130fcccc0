"""A matrix that is known by its factors: added to a vector in part, without being multiplied out as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from thinwire.aggregation.codec import BLOCK
from thinwire.aggregation.methods.powersgd import Matrix, PowerSgd
from thinwire.aggregation.native import parts
from thinwire.core.types import Vector


@dataclass(frozen=True)
class Product:
    """A matrix that stands at `at` of the vector, as its factors; `turned` is Q with its columns as rows."""

    step: PowerSgd
    at: int
    left: Matrix
    turned: Matrix

    def added(self, first: int, last: int, factor: np.float32, adds: bool, into: Vector) -> bool:
        """As `Adds.add`, for the vector's first .. last."""
        rank, cols = self.turned.shape
        span = slice(first - self.at, last - self.at)
        return parts.add("lowrank_add", (self.left, self.turned, cols, rank), span, factor, adds, into)

    def blocks(self, first: int, last: int) -> Iterator[tuple[int, Vector]]:
        """(place, values) of the vector's first .. last, counted from `first`, some rows at a time."""
        cols = self.turned.shape[1]
        rows = max(1, BLOCK // cols)
        for row in range((first - self.at) // cols, -(-(last - self.at) // cols), rows):
            at = self.at + row * cols
            block = self.step.product(self.left[row : row + rows], self.turned.T)
            a, b = max(first, at), min(last, at + block.size)
            yield a - first, block[a - at : b - at]


def add_part(part: Vector | Product, first: int, last: int, factor: np.float32, adds: bool, into: Vector) -> None:
    """into[0 ..] gets the vector's first .. last, which are this part or of it."""
    if isinstance(part, Product) and part.added(first, last, factor, adds, into):
        return
    for at, values in part.blocks(first, last) if isinstance(part, Product) else [(0, part)]:
        scaled = values if factor == 1 else values * factor
        if adds:
            into[at : at + values.size] += scaled
        else:
            into[at : at + values.size] = scaled
