"""The reductions that a plan may name in `[server] reduce`, each with its paper and its breakdown point.

The breakdown point is the largest share of hostile updates with which the change stays near the honest ones, however
large the hostile ones are. That of the mean is 0: one update moves it anywhere.

Distances and radii are of updates divided by their normaliser, the sum of the weights of their local steps (`mean.py`).
A client that trained longer is therefore no outlier for that.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.reduction_base import Combination, CoordinateWise, Distances, Reduction, Rows, between
from thinwire.core.errors import CodecError
from thinwire.core.registry import Registry
from thinwire.core.types import Vector

CONTRACT = "a subclass of thinwire.aggregation.Reduction: docs/how/own-aggregation.md"
THREE = 3  # the fewest updates of which a majority can be honest


@dataclass
class Median(CoordinateWise):
    """Takes the coordinate-wise median (Yin et al. 2018, "Byzantine-robust distributed learning", option I).

    Breakdown point 1/2: while fewer than half are hostile, each coordinate lies between two honest values.
    """

    fewest = THREE

    def of_block(self, rows: Rows) -> Vector:
        """Return the median of each column; of an even number of rows the mean of the two in the middle."""
        count = len(rows)
        middle = between(rows, (count - 1) // 2, count // 2 + 1)
        return middle[0] if len(middle) == 1 else (middle[0] + middle[1]) / np.float32(2)


@dataclass
class Trimmed(CoordinateWise):
    """Takes the trimmed mean of each coordinate (Yin et al. 2018, option II): without the b largest and smallest.

    Below 0.5, b is a share of the round's updates, rounded down; from 1 on it is a count. Breakdown point b / n: while
    at most b are hostile, each coordinate lies between two honest values.
    """

    b: float

    def __post_init__(self) -> None:
        whole = self.b >= 1 and self.b == int(self.b)
        if not (0 < self.b < 0.5 or whole):
            raise CodecError(
                f"trimmed({self.b:g}) is not valid",
                why="b is a share of the updates below 0.5, or from 1 on a whole number of them, on each side",
                hint='[server] reduce = "trimmed(0.2)"',
            )
        self.fewest = 2 * int(self.b) + 1 if whole else max(THREE, math.ceil(1 / self.b))

    def of_block(self, rows: Rows) -> Vector:
        """Return the trimmed mean of each column."""
        cut = int(self.b) if self.b >= 1 else int(self.b * len(rows) + 1e-9)
        kept = between(rows, cut, len(rows) - cut)
        total = kept[0].astype(np.float64)
        for values in kept[1:]:
            total += values
        return (total / len(kept)).astype(np.float32)


@dataclass
class MultiKrum(Combination):
    """Multi-Krum (Blanchard et al. 2017): the mean of the m updates that are nearest to their neighbours.

    An update's score is the sum of its squared distances to its n - f - 2 nearest others; of equal scores the earlier
    row is chosen. It needs n >= 2 f + 3 updates, of which f may be hostile: the breakdown point is (n - 3) / 2n.
    """

    f: int
    m: int
    chooses: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.f < 1 or self.m < 1 or {int(self.f), int(self.m)} != {self.f, self.m}:
            raise CodecError(
                f"krum with f = {self.f:g} and m = {self.m:g} is not valid",
                why="f is the number of hostile updates that are withstood, m how many are chosen: whole numbers",
                hint='[server] reduce = "krum(1)"',
            )
        self.f, self.m = int(self.f), int(self.m)
        self.fewest = max(2 * self.f + 3, self.m + self.f + 2)

    def weights(self, distances: Distances) -> NDArray[np.float64]:
        """Return 1 / m for each chosen update."""
        count = len(distances)
        others = distances + np.diag(np.full(count, np.inf))  # no update is its own neighbour
        near = np.sort(others, axis=1)[:, : max(1, count - self.f - 2)]
        chosen = np.argsort(near.sum(axis=1), kind="stable")[: self.m]
        weights = np.zeros(count)
        weights[chosen] = 1 / self.m
        return weights


@dataclass
class Krum(MultiKrum):
    """Krum (Blanchard et al. 2017): the one update that is nearest to its neighbours.

    The scores and the breakdown point are those of `MultiKrum`.
    """

    m: int = field(default=1, init=False)


class Centred(Combination):
    """Searches a centre, beginning at the update with the least sum of distances to the others.

    An update farther from it than 1e5 times the median distance has weight 0, because float64 does not tell the
    distances between the others beside that one.
    """

    fewest = THREE
    reach: ClassVar[float] = 1e5

    @abstractmethod
    def search(self, distances: Distances, first: int) -> NDArray[np.float64]:
        """Return the weights of the centre, beginning at the update `first`."""

    def weights(self, distances: Distances) -> NDArray[np.float64]:
        """Return the weights of the centre, 0 for updates that are out of reach."""
        away = np.sqrt(distances)
        first = int(np.argmin(away.sum(axis=1)))
        near = np.flatnonzero(away[first] <= self.reach * np.median(away[first]))
        weights = np.zeros(len(distances))
        weights[near] = self.search(distances[np.ix_(near, near)], int(np.flatnonzero(near == first)[0]))
        return weights


@dataclass
class GeometricMedian(Centred):
    """The geometric median (Pillutla et al. 2022, RFA), the point with the least sum of distances to all updates.

    Weiszfeld's iteration on the updates' distances, smoothed as in the paper: a distance below 1e-6 of the median one
    counts as that. It ends when no weight changes by more than 1e-9, or after 1000 steps, which read no update again.
    Breakdown point 1/2.
    """

    steps: ClassVar[int] = 1000

    def search(self, distances: Distances, first: int) -> NDArray[np.float64]:
        """Return the weights of the geometric median."""
        weights = np.full(len(distances), 1 / len(distances))
        for _ in range(self.steps):
            away = _distances_from(weights, distances)
            if (least := 1e-6 * float(np.median(away))) == 0:  # most updates are equal
                weights = np.zeros(len(distances))
                weights[first] = 1.0
                break
            before, inverse = weights, 1 / np.maximum(away, least)
            weights = inverse / inverse.sum()
            if np.abs(weights - before).max() < 1e-9:
                break
        return weights


@dataclass
class Clipped(Centred):
    """Centered clipping (Karimireddy et al. 2021): v' = v + mean of (x_i - v), each no longer than the radius tau.

    The paper begins at the change of the round before, which suits clients that all take part in every round. The first
    centre is here an update of this round (`Centred`), so that another cohort or a restart needs no earlier round. It
    has the breakdown point 1/2, and three steps go from it at most 3 tau f / n in the direction of f hostile updates.
    """

    tau: float
    steps: ClassVar[int] = 3

    def __post_init__(self) -> None:
        if not (0 < self.tau < math.inf):
            raise CodecError(
                f"clipped({self.tau:g}) is not valid", why="tau is a radius above 0", hint='reduce = "clipped(10)"'
            )

    def search(self, distances: Distances, first: int) -> NDArray[np.float64]:
        """Return the weights of the last centre."""
        weights = np.zeros(len(distances))
        weights[first] = 1.0
        for _ in range(self.steps):
            away = _distances_from(weights, distances)
            shares = np.minimum(1.0, self.tau / np.maximum(away, self.tau))
            weights = weights * (1 - shares.mean()) + shares / len(distances)
        return weights


def _distances_from(weights: NDArray[np.float64], distances: Distances) -> NDArray[np.float64]:
    """Return the distance of each update from their sum by weights that add up to 1.

    |x_i - sum_j w_j x_j|^2 = (D w)_i - w D w / 2, with the squared distances D.
    """
    to_each = distances @ weights
    found: NDArray[np.float64] = np.sqrt(np.maximum(to_each - weights @ to_each / 2, 0.0))
    return found


def admit(name: str, thing: Any) -> Callable[..., Reduction]:
    """Return a reduction class that is not Thinwire's; raise CodecError if a method is missing."""
    if not (isinstance(thing, type) and issubclass(thing, Reduction)):
        raise CodecError(f"{name!r} is no reduction", why="it is no subclass of Reduction", hint=CONTRACT)
    if missing := sorted(getattr(thing, "__abstractmethods__", ())):
        raise CodecError(f"{name!r} is no reduction", why=f"it has no {', '.join(missing)}", hint=CONTRACT)
    return thing


reductions: Registry[Callable[..., Reduction]] = Registry("reduction", admit=admit, places=True)
reductions.add("median", Median)
reductions.add("trimmed", Trimmed)
reductions.add("krum", Krum)
reductions.add("multi-krum", MultiKrum)
reductions.add("geometric-median", GeometricMedian)
reductions.add("clipped", Clipped)

_CALL = re.compile(r"([^()]*)(?:\(([^()]*)\)\s*)?")


def reduction_of(spec: str) -> Reduction:
    """Return the reduction of a plan's `[server] reduce`, which is not "mean"; raise CodecError if it is not valid.

    >>> reduction_of("multi-krum(1, 2)")
    MultiKrum(f=1, m=2)
    """
    call = _CALL.fullmatch(spec)
    if call is None:
        raise CodecError(f"[server] reduce = {spec!r}", why="it is a name, with numbers in brackets", hint='"krum(1)"')
    name, given = call[1].strip(), [word.strip() for word in (call[2] or "").split(",") if word.strip()]
    made = reductions.find(name, also=["mean"])
    try:
        return made(*[float(word) for word in given])
    except (TypeError, ValueError, OverflowError) as error:
        why = "its brackets hold other numbers than it takes"
        raise CodecError(f"[server] reduce = {spec!r}", why=why, hint=f"{name}: {_takes(made)}") from error


def _takes(made: Any) -> str:
    """Return the parameters of a reduction in words."""
    names = [one.name for one in fields(made) if one.init] if is_dataclass(made) else []
    return f"it takes {', '.join(names)}" if names else "it takes nothing"
