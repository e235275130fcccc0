"""How one data set is cut into the parts of many clients: `iid`, or by labels, `dirichlet(0.3)`.

    iid            a permutation in equal parts
    dirichlet(a)   for each label, shares drawn from Dirichlet(a, .., a): the smaller a, the fewer labels a client has
                   (Hsu, Qi and Brown 2019)

The cut depends on (labels, parts, spec, seed) only, so that every client can work out its own part.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .errors import BadTask, BadUsage
from .keys import Key, derive, seed63
from .site import Site

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Indices = NDArray[np.int64]
    Labels = Sequence[Any] | NDArray[Any]

FEWEST = 2  # examples in a part: one to train on, one to be measured on
DIRICHLET = re.compile(r"dirichlet\(\s*([0-9.eE+-]+)\s*\)")


class Cut(Protocol):
    """A way to cut: label arrays to one sorted array of indices for each part."""

    def parts(self, labels: NDArray[Any], count: int, seed: int) -> list[Indices]: ...


@dataclass(frozen=True)
class Iid:
    """Equal parts (their sizes differ by at most one), drawn without regard to the labels."""

    def parts(self, labels: NDArray[Any], count: int, seed: int) -> list[Indices]:
        order = _draw(seed, "iid").permutation(len(labels))
        return [np.sort(part).astype(np.int64) for part in np.array_split(order, count)]


@dataclass(frozen=True)
class Dirichlet:
    """Each label's examples in shares of its own; parts under `FEWEST` are filled from the largest one."""

    alpha: float

    def parts(self, labels: NDArray[Any], count: int, seed: int) -> list[Indices]:
        draw = _draw(seed, "dirichlet")
        parts: list[list[int]] = [[] for _ in range(count)]
        for label in np.unique(labels):
            mine = draw.permutation(np.flatnonzero(labels == label))
            shares = draw.dirichlet(np.full(count, self.alpha))
            cuts = np.round(np.cumsum(shares)[:-1] * len(mine)).astype(int)
            for part, found in zip(parts, np.split(mine, cuts)):
                part += found.tolist()
        for part in parts:
            while len(part) < FEWEST:
                part.append(max(parts, key=len).pop())
        return [np.array(sorted(part), np.int64) for part in parts]


def parse_split(spec: str) -> Cut:
    """The cut of a spec; `BadUsage` when there is none such.

    >>> parse_split("dirichlet(0.3)")
    Dirichlet(alpha=0.3)
    """
    text = spec.strip()
    if text == "iid":
        return Iid()
    if match := DIRICHLET.fullmatch(text):
        try:
            alpha = float(match[1])
        except ValueError:
            alpha = math.nan
        if 0 < alpha < 1e6:
            return Dirichlet(alpha)
    raise BadUsage(f"no split {spec!r}", why="known: iid and dirichlet(ALPHA), ALPHA above 0", hint="dirichlet(0.3)")


def partition(labels: Labels, count: int, split: str, seed: int) -> list[Indices]:
    """All parts: disjoint, together everything, each of at least two examples."""
    cut, labels = parse_split(split), np.asarray(labels)
    if count < 1:
        raise BadUsage(f"{count} parts cannot be", hint="--clients 8")
    if len(labels) < FEWEST * count:
        raise BadTask(
            f"{len(labels)} examples are too few for {count} clients",
            why=f"each needs at least {FEWEST}",
            hint=f"--clients {max(1, len(labels) // FEWEST)}",
        )
    return cut.parts(labels, count, seed)


def own_part(labels: Labels, site: Site) -> Indices:
    """The indices of the examples that are this site's, for `data(site)` of a task whose data is one common set."""
    return partition(labels, site.partitions, site.split, site.seed)[site.partition]


def held_out(indices: Indices, share: float, site: Site) -> tuple[Indices, Indices]:
    """(train, test): a seeded `share` of the examples is kept for measuring, and at least one is left for each."""
    count = min(max(1, round(share * len(indices))), len(indices) - 1)
    order = _draw(site.seed, "held-out", site.partition).permutation(len(indices))
    return np.sort(indices[order[count:]]), np.sort(indices[order[:count]])


def _draw(seed: int, *labels: str | int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed63(derive(Key(seed), "split", *labels))))
