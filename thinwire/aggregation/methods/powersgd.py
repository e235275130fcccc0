"""powersgd(rank): a matrix as the product of two thin ones, by one step of the power method."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.buckets import maxima
from thinwire.aggregation.codec import Role, not_finite
from thinwire.aggregation.hashing import lowbias32
from thinwire.aggregation.methods.arguments import read_whole
from thinwire.core.types import Vector

Matrix = NDArray[np.float32]
LARGEST_RANK = 32
MOST = np.float32(2.0**120)  # of a factor's entry: 32 products with entries of at most ROOM are finite
ROOM = np.float32(1.01)  # an entry of an orthonormal column is at most 1, and what rounding adds
DEPENDENT = 1e-6  # of a column's norm: less than this left over is rounding (float32 has 6e-8)


@dataclass(frozen=True)
class PowerSgd:
    """Sends P and Q for each matrix: P = orthonormal(M Q_before), Q = M^T P, and P Q^T is decoded.

    PowerSGD (Vogels et al. 2019): a warm start from the last call's Q lets a single power step do. There all workers
    average P, then Q, in the middle of a step, and have one subspace together; here each device has its own, and the
    products are averaged. A tensor is a matrix of its first dimension by all others; one on which two factors save
    nothing is sent as it is. Nothing is promised of one call, so it needs feedback. BLAS makes the factors, so their
    bits are this machine's: it never carries the downlink. What they decode to is the same everywhere.
    """

    role: ClassVar[Role] = "lowrank"
    examples: ClassVar[tuple[str, ...]] = ("powersgd(4)", "powersgd(2) > fp16 > zstd")
    rank: int

    @classmethod
    def read(cls, argument: str | None) -> PowerSgd:
        return cls(read_whole("powersgd", argument, 1, LARGEST_RANK, 4))

    @property
    def spec(self) -> str:
        return f"powersgd({self.rank})"

    def saves(self, rows: int, cols: int) -> bool:
        """Whether two factors are smaller than the matrix.

        >>> PowerSgd(4).saves(64, 64), PowerSgd(4).saves(8, 8), PowerSgd(4).saves(1, 1000)
        (True, False, False)
        """
        return (rows + cols) * self.rank < rows * cols

    def begin(self, cols: int) -> Matrix:
        """The first Q: any will do that no direction is missing from, so one by a hash."""
        return _drawn(cols, self.rank).copy()

    def factors(self, matrix: Matrix, before: Matrix) -> tuple[Matrix, Matrix]:
        """(P, Q) of a matrix; P is orthonormal, but for columns of zeros where the matrix has a lower rank.

        NonFiniteUpdate for NaN and infinity: what looks for the largest value finds them.
        """
        largest = maxima(matrix.reshape(-1)).max()
        if not np.isfinite(largest):
            raise not_finite()
        down = np.float32(2.0 ** -np.clip(np.frexp(largest)[1], -120, 120))  # so that no product overflows
        left = orthonormal(matrix @ np.asfortranarray(before * down))
        with np.errstate(over="ignore", invalid="ignore"):
            right = (left.T @ matrix).T  # not matrix.T @ left: BLAS walks along the rows as they stand
            if not float(largest) * matrix.shape[0] <= MOST:
                right = np.clip(np.nan_to_num(right, nan=0.0), -MOST, MOST)
        return left, right

    def warm(self, right: Matrix) -> Matrix:
        """The next call's Q_before: this Q with columns of norm 1, and a new one where the matrix had none."""
        wide = right.astype(np.float64)
        norms = np.sqrt(np.einsum("ij,ij->j", wide, wide))
        found = (wide / np.where(norms > 0, norms, 1)).astype(np.float32, order="C")
        if not norms.all():
            found[:, norms == 0] = self.begin(right.shape[0])[:, norms == 0]
        return found

    def product(self, left: Matrix, right: Matrix) -> Vector:
        """P Q^T, row after row: term by term, so that its bits are everybody's."""
        out = left[:, :1] * right[:, 0]
        for k in range(1, self.rank):
            out += left[:, k : k + 1] * right[:, k]
        flat: Vector = out.reshape(-1)
        return flat


@functools.cache
def _drawn(cols: int, rank: int) -> Matrix:
    drawn = lowbias32(np.arange(1, cols * rank + 1, dtype=np.uint32)) >> np.uint32(8)
    first: Matrix = (drawn.astype(np.float32) * np.float32(2.0**-23) - np.float32(1)).reshape(cols, rank)
    return first


def orthonormal(columns: Matrix) -> Matrix:
    """The columns made orthonormal by Gram and Schmidt's way, twice over; a column that depends on others is 0.

    >>> orthonormal(np.float32([[3, 0], [4, 0]])).tolist() == np.float32([[0.6, 0], [0.8, 0]]).tolist()
    True
    """
    done = columns.T.astype(np.float64, order="C")  # a column is a row here: its values stand together
    for k, column in enumerate(done):
        norm = math.sqrt(column @ column)
        for _ in range(2 if k else 0):
            column -= (done[:k] @ column) @ done[:k]
        left = math.sqrt(column @ column) if k else norm
        column *= 1 / left if left > DEPENDENT * norm else 0
    return done.T.astype(np.float32, order="C")
