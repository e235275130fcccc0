"""Name the data set of a line in a device's privacy ledger, and the release in which it took part.

A data set has a name that its owner gave it, and a path. Releases of one count for another if they share one of the
two, or if one path is inside the other, because the smaller folder is a part of the larger one. Both may change, one
after the other, so this holds along a chain: unnamed at /old, then `ward` at /old, then `ward` at /new. Parts of a
split (`--partition`) are one data set, because another split overlaps.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from thinwire.core.errors import DataLost


@dataclass(frozen=True)
class DataSet:
    """Holds what identifies the data of an assignment: the owner's `name` ("" if it has none), and `data`.

    `data` is the path with all links resolved. A task without a path has data of its own, and `data` is "task NAME".
    """

    name: str
    data: str

    @classmethod
    def of(cls, name: str, path: Path | None, task: str) -> DataSet:
        """Return the data set of a task that gets this path."""
        return cls(name, f"task {task}" if path is None else os.path.realpath(path))

    def is_same(self, other: DataSet) -> bool:
        """Return True if releases of one count for the other.

        >>> [DataSet("", "/data/ward").is_same(DataSet("", path)) for path in ("/data", "/data/ward/7", "/data/war")]
        [True, True, False]
        """
        one, two = (f"{path.rstrip(os.sep)}{os.sep}" for path in (self.data, other.data))
        return one.startswith(two) or two.startswith(one) or (self.name != "" and self.name == other.name)

    def __post_init__(self) -> None:
        if not all(isinstance(getattr(self, one.name), str) for one in fields(self)):
            raise ValueError("a data set has a name, which may be empty, and a path or a task")


class DataSets:
    """The data sets of a client's tasks, by the path to which its links led when the client started.

    A worker that has read the data keeps them, and the next one reads what is there then. So when the links lead
    elsewhere, nobody knows whose records are in a release until the client starts again.
    """

    def __init__(self, name: str, path: Path | None, tasks: Collection[str]) -> None:
        self._name, self._path = name, path
        self._begun = {task: DataSet.of(name, path, task) for task in tasks}

    def __iter__(self) -> Iterator[DataSet]:
        return iter(self._begun.values())

    def __call__(self, task: str) -> DataSet:
        """Return the data set of a task; raise `DataLost` if its path leads elsewhere than when the client started."""
        begun, now = self._begun[task], DataSet.of(self._name, self._path, task)
        if now != begun:
            raise DataLost(
                "the data of this client are elsewhere than when it started",  # an aggregator is told this, and no path
                why=f"they were {begun.data} and are {now.data}: what one of them spends would be booked for the other",
                hint="start the client again",
            )
        return begun


def same_datasets(dataset: DataSet, others: Collection[DataSet]) -> set[DataSet]:
    """Return a data set and those of the `others` that are the same, or the same as one of these, and so on."""
    found, left = {dataset}, set(others) - {dataset}
    while more := {one for one in left if any(map(one.is_same, found))}:
        found, left = found | more, left - more
    return found


@dataclass(frozen=True)
class Booking:
    """Holds a line of the ledger: a release of `population` in which a data set took part.

    `release` is the JSON of the release. `run` and its `identity` are those of the assignment. `key` is the fingerprint
    of the device's key, by which the aggregator counts its releases.
    """

    at: float
    name: str
    data: str
    population: str
    release: str
    run: str
    identity: str
    round: int
    assignment: str
    sequence: int  # of the run's last reply before this one
    key: str = ""

    @property
    def dataset(self) -> DataSet:
        """Return the data set."""
        return DataSet(self.name, self.data)

    @property
    def id(self) -> tuple[object, ...]:
        """Return what two deliveries of one assignment have in common."""
        of_run = self.run, self.round, self.sequence  # an aggregator may give one id to assignments of several runs
        return (self.identity, self.assignment, *of_run, self.dataset, self.population, self.release)

    def __post_init__(self) -> None:
        for one in fields(self):
            kinds: tuple[type, ...] = {"at": (int, float), "round": (int,), "sequence": (int,)}.get(one.name, (str,))
            if not isinstance(getattr(self, one.name), kinds):
                raise ValueError(f"{one.name} is not of its type")
        if not (self.population and self.release and self.assignment and self.data):
            raise ValueError("a booking names its population, release, assignment and data")
