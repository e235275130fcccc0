"""Partitioners: splitting one data set into the parts of many clients, at random (`iid`) or by labels.

    iid            a permutation in equal parts
    by(key)        whole groups of one value of `key` (a writer, a package): the largest first, each to the smallest
                   part, so that with as many clients as values each client has one value
    shards(n)      examples sorted by label, cut into n shards a client, which are drawn (McMahan et al. 2017)
    dirichlet(a)   for each label, shares drawn from Dirichlet(a, .., a): the smaller a, the fewer labels a client has
                   (Yurochkin et al. 2019). Hsu, Qi and Brown 2019 draw the labels of each client instead, and
                   give all clients equally many examples

A task gives one array of labels, under the key `label`, or several arrays by their keys. `dirichlet` and `shards` use
the first array.

Invariant: a split depends on (labels, parts, spec, seed) only, so every client can compute its own part.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .errors import BadSplit, BadTask, BadUsage
from .layout import Key, derive, seed63
from .protocol import ClientInfo

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Indices = NDArray[np.int64]
    Labels = Sequence[Any] | NDArray[Any]
    Keyed = dict[str, NDArray[Any]]

FEWEST = 2  # examples in a part: one for training, one for evaluation
LABEL = "label"  # the key of labels that were given without one
DIRICHLET = re.compile(r"dirichlet\(\s*([0-9.eE+-]+)\s*\)")
BY = re.compile(r"by\(\s*([A-Za-z][A-Za-z0-9_-]*)\s*\)")
SHARDS = re.compile(r"shards\(\s*([1-9][0-9]{0,3})\s*\)")


class Partitioner(Protocol):
    """A partitioner: splits examples by their labels."""

    def parts(self, keyed: Keyed, count: int, seed: int) -> list[Indices]:
        """Return one sorted array of indices for each of `count` parts; `keyed` holds all examples' labels by key."""


@dataclass(frozen=True)
class IidPartitioner:
    """Parts of equal size (up to one example), drawn independently of the labels."""

    def parts(self, keyed: Keyed, count: int, seed: int) -> list[Indices]:
        """Return a random permutation in equal parts."""
        order = _draw(seed, "iid").permutation(len(_first(keyed)))
        return [np.sort(part).astype(np.int64) for part in np.array_split(order, count)]


@dataclass(frozen=True)
class DirichletPartitioner:
    """Distributes each label's examples by shares of its own; the largest part fills parts smaller than `FEWEST`."""

    alpha: float

    def parts(self, keyed: Keyed, count: int, seed: int) -> list[Indices]:
        """Return parts by each label's drawn shares."""
        labels, draw = _first(keyed), _draw(seed, "dirichlet")
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


@dataclass(frozen=True)
class NaturalIdPartitioner:
    """Distributes whole groups of one value; nothing is drawn.

    More parts than values, or a part smaller than `FEWEST`, raises BadSplit.
    """

    key: str

    def parts(self, keyed: Keyed, count: int, seed: int) -> list[Indices]:
        """Return parts of whole groups, the largest group first, each added to the smallest part."""
        if self.key not in keyed:
            known = ", ".join(keyed)
            raise BadUsage(
                f"no key {self.key!r} to cut by", why=f"the task gives: {known}", hint=f"by({next(iter(keyed))})"
            )
        values, group, sizes = np.unique(keyed[self.key], return_inverse=True, return_counts=True)
        if len(values) < count:
            why = "a group is never cut in two"
            raise BadSplit(
                f"{len(values)} values of {self.key} for {count} clients", why=why, hint=f"--clients {len(values)}"
            )
        held, owner = np.zeros(count, np.int64), np.zeros(len(values), np.int64)
        for value in np.argsort(-sizes, kind="stable"):
            owner[value] = np.argmin(held)
            held[owner[value]] += sizes[value]
        if held.min() < FEWEST:
            why = f"a client needs at least {FEWEST}"
            raise BadSplit(f"a value of {self.key} has {held.min()} example", why=why, hint="fewer --clients")
        return [np.flatnonzero(owner[group] == part).astype(np.int64) for part in range(count)]


@dataclass(frozen=True)
class ShardPartitioner:
    """Gives each part `each` drawn shards of the sorted labels: few labels a client, and parts of nearly equal size."""

    each: int

    def parts(self, keyed: Keyed, count: int, seed: int) -> list[Indices]:
        """Return parts of `each` shards."""
        labels = _first(keyed)
        if len(labels) < FEWEST * self.each * count:
            raise BadSplit(
                f"{len(labels)} examples are too few for {self.each * count} shards",
                why=f"each has at least {FEWEST}",
                hint=f"shards({max(1, len(labels) // (FEWEST * count))})",
            )
        draw = _draw(seed, "shards")
        mixed = draw.permutation(len(labels))  # so that examples of one label are in random order
        runs = np.array_split(mixed[np.argsort(labels[mixed], kind="stable")], self.each * count)
        dealt = draw.permutation(len(runs)).reshape(count, self.each)
        return [np.sort(np.concatenate([runs[run] for run in mine])).astype(np.int64) for mine in dealt]


def parse_split(spec: str) -> Partitioner:
    """Return the partitioner of a spec; raise `BadUsage` for an unknown one.

    >>> parse_split("dirichlet(0.3)")
    DirichletPartitioner(alpha=0.3)
    """
    text = spec.strip()
    if text == "iid":
        return IidPartitioner()
    if match := DIRICHLET.fullmatch(text):
        try:
            alpha = float(match[1])
        except ValueError:
            alpha = math.nan
        if 0 < alpha < 1e6:
            return DirichletPartitioner(alpha)
    if match := BY.fullmatch(text):
        return NaturalIdPartitioner(match[1])
    if match := SHARDS.fullmatch(text):
        return ShardPartitioner(int(match[1]))
    known = "known: iid, dirichlet(ALPHA) with ALPHA above 0, by(KEY), shards(N)"
    raise BadUsage(f"no split {spec!r}", why=known, hint="dirichlet(0.3)")


def partition(labels: Labels | Mapping[str, Labels], count: int, split: str, seed: int) -> list[Indices]:
    """Split a data set into `count` disjoint parts that cover all examples and have at least two examples each."""
    cut, keyed = parse_split(split), _keyed(labels)
    size = len(_first(keyed))
    if count < 1:
        raise BadUsage(f"{count} parts is not valid", hint="--clients 8")
    if size < FEWEST * count:
        raise BadSplit(
            f"{size} examples are too few for {count} clients",
            why=f"each needs at least {FEWEST}",
            hint=f"--clients {max(1, size // FEWEST)}",
        )
    return cut.parts(keyed, count, seed)


def _keyed(labels: Labels | Mapping[str, Labels]) -> Keyed:
    keyed = {
        key: np.asarray(found) for key, found in (labels if isinstance(labels, Mapping) else {LABEL: labels}).items()
    }
    if len({len(found) for found in keyed.values()}) != 1:
        raise BadTask("the labels of the keys differ in length", why="each names every example once")
    return keyed


def _first(keyed: Keyed) -> NDArray[Any]:
    return next(iter(keyed.values()))


def own_part(labels: Labels | Mapping[str, Labels], client: ClientInfo) -> Indices:
    """Return the indices of this client's examples, for `data(client)` of a task whose clients share one data set.

    The latest split is kept: in a simulation each client needs its part of the same one.
    """
    keyed, digest = _keyed(labels), hashlib.sha256()
    for key, found in keyed.items():
        digest.update(repr((key, found.dtype.str, len(found))).encode())
        digest.update(repr(found.tolist()).encode() if found.dtype.hasobject else found.tobytes())
    split = digest.hexdigest(), client.partitions, client.split, client.seed
    if (parts := _latest.get(split)) is None:
        parts = partition(keyed, client.partitions, client.split, client.seed)
        _latest.clear()
        _latest[split] = parts
    return parts[client.partition].copy()


_latest: dict[tuple[str, int, str, int], list[Indices]] = {}


def held_out(indices: Indices, share: float, client: ClientInfo) -> tuple[Indices, Indices]:
    """Split indices into (train, test): `share` of the examples is held out for evaluation.

    The client's seed and the number of examples decide which, so one example more moves others too: a run with
    `[privacy] mode = "example"` counts on a training set in which it does not. Each side has at least one example.
    """
    if len(indices) < FEWEST:
        raise BadSplit(
            f"{len(indices)} of the examples to train on and to hold out", why="each side needs one",
            hint="more examples for this client, or Split(train) without a test set",
        )  # fmt: skip
    count = min(max(1, round(share * len(indices))), len(indices) - 1)
    order = _draw(client.seed, "held-out", client.partition).permutation(len(indices))
    return np.sort(indices[order[count:]]), np.sort(indices[order[:count]])


def _draw(seed: int, *labels: str | int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed63(derive(Key(seed), "split", *labels))))
