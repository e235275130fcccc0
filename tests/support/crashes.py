"""A process that dies at a place that is chosen, and what of a run must not depend on where that was.

A run is killed at the last one of equal places, or at all of them if the environment variable THINWIRE_EVERY_PLACE is
set. Places are equal where the same functions of ours are at work after events of the same kinds. Two kinds of places
are equal to the place before them, but for what nobody reads after the death:

- "append": its transaction is rolled back. `test_crash_anywhere.py` kills at unequal appends too, other tests do not.
- "fsync" of a file that nobody reads: a draft has its name only after this, and the files of a version are written
  again unless the commit that names them has been made (`finish`). So the events before make no difference, and a run
  is killed once for each function that writes such a file. Other syncs of a folder follow a renaming: their place is a
  new state of the disk.

A run is killed in a child of the test's process (`Fates`), which goes on with a copy of the disk: so the life until the
death is lived once for all places, and each place costs what comes after it.

The clock stands still while the aggregator is dead. "The same" means: same order of accepted heads and deadline ticks,
so same model and replica at every version, same aggregated sets and same outcomes.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import pytest

import thinwire
from tests.support.faulty_fleet import FaultyFleet, told_of
from tests.support.linked_fleet import LinkedFleet
from tests.support.outcomes import every_assignment_has_one_outcome
from tests.support.store_agreement import assert_sums_agree, empty_database
from thinwire.core import Layout, RunPlan, VirtualClock
from thinwire.core.events import (
    ClientSelected,
    Event,
    ModelStored,
    ReplicaStored,
    RoundClosed,
    RoundOpened,
    UpdateAccepted,
)
from thinwire.core.statedir import AggregatorHome, sync_path
from thinwire.core.types import Assignment, UpdateId, UpdateOutcome, Vector
from thinwire.server import round_close
from thinwire.server.context import RunCommands
from thinwire.server.round_close import finish
from thinwire.server.run import drive
from thinwire.server.state.assignment_ledger import MAX_KEPT
from thinwire.server.state.run_state import RunState
from thinwire.server.submit import FirstModel, submit
from thinwire.simulation import ScriptedDevice, ScriptedFleet, task_report
from thinwire.store import FileSpool, Store
from thinwire.store.projection import Projection

Lived = TypeVar("Lived")

PACKAGE = f"{Path(thinwire.__file__).parent}{os.sep}"
LAYOUT = Layout.of({"w": (6, 4), "b": (4,)})
NEVER = -1  # a place that no life comes to
LIFE_S = 120  # after which a child ends that goes on for ever
WORK_S = 10.0  # the longest that a thread of a small run works at a step
KINDS = ("commit", "fsync", "before a commit", "after a commit")  # of places at which a run is killed


class Killed(BaseException):
    """The process is gone: nothing after this line runs."""


class Place(str):
    """A kind of place, and where equal ones are: our functions at work, and the kinds of events journalled last."""

    __slots__ = ("functions", "journalled")

    functions: tuple[CodeType, ...]
    journalled: tuple[type[Event], ...]

    @property
    def is_unread(self) -> bool:
        """Return True where a file is synced that nobody reads yet: a draft, or a version's before its commit."""
        is_draft = self == "fsync" and self.functions[0] is not sync_path.__code__
        return is_draft or (self == "fsync" and finish.__code__ in self.functions)


@dataclass
class Fate:
    """Counts the places at which a process can die, and dies at the `at`-th of them, once."""

    at: int = 0
    places: list[Place] = field(default_factory=list)
    journalled: tuple[type[Event], ...] = ()

    def here(self, place: str) -> None:
        self.places.append(Place(place))
        self.places[-1].functions = () if self.at else functions_at_work()
        self.places[-1].journalled = self.journalled
        if self._is_last():
            raise Killed(place)

    def _is_last(self) -> bool:
        return len(self.places) == self.at


class Fates(Fate):
    """Dies at each of these places, each time in a child process, and goes on as if nothing had happened.

    A child has a copy of the disk, which is `folder`, at the same path; afterwards its parent has the original there
    again. The parent's threads have no work while it forks: a lock that one of them held would stay held in the child.
    """

    def __init__(self, folder: Path, chosen: Collection[int]) -> None:
        super().__init__(at=NEVER)
        self.folder, self.chosen = folder, set(chosen)
        self.work: list[Future[Any]] = []  # that threads were given
        self.deaths, self.failed = 0, ""
        self.died = ""  # in a child: where
        self.tells: int | None = None  # in a child: where it writes what failed

    @property
    def where(self) -> str:
        return f"killed at place {len(self.places)}: {self.places[-1]}"

    def _is_last(self) -> bool:
        if self.tells is not None or self.failed or len(self.places) not in self.chosen:
            return False
        wait(self.work, timeout=WORK_S)
        self.work.clear()
        reads, writes = os.pipe()
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of a fork beside threads
            child = os.fork()
        aside = self.folder.with_name(f"{self.folder.name}-original")
        if child == 0:
            gc.disable()  # it would write to all of the parent's memory
            signal.alarm(LIFE_S)
            self.tells, self.died = writes, self.where
            self.folder.rename(aside)
            shutil.copytree(aside, self.folder)
            return True
        os.close(writes)
        with open(reads, encoding="utf-8") as told:
            self.failed = told.read()
        _, status = os.waitpid(child, 0)
        shutil.rmtree(self.folder)
        aside.rename(self.folder)
        if status and not self.failed:
            self.failed = f"the test's child that was {self.where} ended with the status {status}"
        self.deaths += 1
        return False

    def over(self, failed: str) -> None:
        """End a child, whatever happens: it must not go on as a second process of the tests."""
        try:
            assert self.tells is not None
            os.write(self.tells, failed.encode(errors="replace"))
        finally:
            os._exit(0)


def functions_at_work() -> tuple[CodeType, ...]:
    """Return the functions of the package that called this one, the innermost first."""
    found, frame = [], sys._getframe(1)
    while (caller := frame.f_back) is not None:
        frame = caller
        if frame.f_code.co_filename.startswith(PACKAGE):
            found.append(frame.f_code)
    return tuple(found)


def unequal(places: Sequence[Place], kinds: Sequence[str] = KINDS, writers: bool = False) -> list[int]:
    """Return the numbers, from 1, of the last one of equal places of these kinds.

    With `writers` all syncs of the same two innermost functions are equal: `test_crash_anywhere.py` kills at the
    others, and a mode of rounds that writes a file of its own has a function of its own there.
    """
    last, every = dict[object, int](), bool(os.environ.get("THINWIRE_EVERY_PLACE"))
    for at, place in enumerate(places, start=1):
        if place in kinds or every:
            journalled = () if place.is_unread else place.journalled
            where: object = (place.functions, journalled)
            if writers and place == "fsync":
                where = place.functions[:2]
            last[str(place), where, at if every else 0] = at
    return sorted(last.values())


@contextlib.contextmanager
def deadly(fate: Fate, store: Store) -> Iterator[None]:
    """While it lasts, the process may die after each append, each commit and each fsync."""
    finish, record = Projection.finish, store.record

    def appended(projection: Projection) -> None:
        finish(projection)
        fate.here("append")

    def committed(run_id: str, events: Sequence[Event], *more: Any, **named: Any) -> None:
        fate.journalled = tuple(map(type, events))
        record(run_id, events, *more, **named)
        fate.here("commit")

    with (
        patch.object(Projection, "finish", appended),
        patch.object(store, "record", committed),
        patch("os.fsync", lambda descriptor: fate.here("fsync")),
    ):
        yield


def around_commits(fate: Fate, store: Store) -> None:
    """From now on the process may die before and after each commit."""
    record = store.record

    def committed(run_id: str, events: Sequence[Event], *more: Any, **named: Any) -> None:
        fate.journalled = tuple(map(type, events))
        fate.here("before a commit")
        record(run_id, events, *more, **named)
        fate.here("after a commit")

    store.record = committed  # type: ignore[method-assign]  # the kill


class World:
    """Devices, their clock, and the disk: all that outlives an aggregator."""

    kind: type[FaultyFleet] = FaultyFleet

    def __init__(self, folder: Path, fate: Fate, plan: RunPlan, devices: Sequence[ScriptedDevice]) -> None:
        self.fate, self.home, self.clock, self.plan = fate, AggregatorHome.under(folder), VirtualClock(), plan
        self.home.database.write_bytes(empty_database())
        self.dies_at = math.inf  # on the clock, beside what the fate says
        self.fleet = self.kind(FileSpool(self.home.spool), self.clock, task_report(plan, LAYOUT), devices)

    def live(self) -> Outcome:
        """The whole run, with one death at most."""
        nothing, first = np.zeros(0, np.float32), np.zeros(LAYOUT.size, np.float32)
        with contextlib.ExitStack() as opened:
            store = opened.enter_context(Store.open(self.home.database, durable=False))
            run_id = submit(
                store, self.home, self.plan, FirstModel(LAYOUT, task_report(self.plan, LAYOUT), first, nothing)
            )
            with deadly(self.fate, store):
                try:
                    self._drive(run_id, store, agreed=self.fate.at != 0)
                except Killed:
                    store = opened.enter_context(Store.open(self.home.database, durable=False))  # as it lies there
                    self.fleet = self.fleet.restart(FileSpool(self.home.spool))
                    self._drive(run_id, store)
            return Outcome(store, run_id, self.fleet, self.home)

    def _drive(self, run_id: str, store: Store, agreed: bool = False) -> None:
        """Drive the run. Until its death it goes as the undisturbed run, whose tables were compared."""
        linked = LinkedFleet(self.fleet, store, run_id, agreed)
        drive(run_id, store=store, fleet=linked, home=self.home, clock=self.clock, commands=RunCommands(self._alive))

    def _alive(self) -> None:
        if self.clock.now() >= self.dies_at:
            self.dies_at = math.inf
            raise Killed("its hour has come")


def change(name: str, size: int, assignment: Assignment) -> Vector:
    """What a device answers: another each round, and always the same."""
    drawn: Vector = np.random.default_rng([ord(name), assignment.round]).standard_normal(size).astype(np.float32)
    return drawn


class Outcome:
    """What a run came to."""

    def __init__(self, store: Store, run_id: str, fleet: ScriptedFleet, home: AggregatorHome | None = None) -> None:
        self.events = [event for _, event in store.events(run_id)]
        assert_sums_agree(store, run_id, self.events)
        every_assignment_has_one_outcome(store, run_id, self.events)
        self.status = store.run(run_id).status
        self.run_state = RunState()
        for event in self.events:
            self.run_state.apply(event)
        self.devices, self.fleet = list(fleet.devices), fleet
        self.folder = home.run(run_id) if home is not None else Path()
        self.told = told_of(fleet.devices.values())

    def of(self, *kinds: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kinds)]

    @property
    def outcomes(self) -> dict[UpdateId, UpdateOutcome]:
        return {
            outcome.update_id: outcome
            for name in self.devices
            for outcome in self.run_state.ledger.outcomes.of(name, MAX_KEPT)
        }

    def same(self) -> dict[str, object]:
        """All that must not depend on where it was killed."""
        return {
            "status": self.status,
            "models": [(e.version, e.digest, e.state) for e in self.of(ModelStored)],
            "replicas": [(e.version, e.digest) for e in self.of(ReplicaStored)],
            "selected": sorted(
                [assignment_id for e in self.of(RoundOpened) for assignment_id in e.assignments.values()]
            ),
            "selected since": [e.assignment_id for e in self.of(ClientSelected) if e.why],
            "accepted": [(e.round, e.update_id, e.staleness, e.discount) for e in self.of(UpdateAccepted)],
            "closed": [(e.round, e.reason, e.version, e.aggregated, sorted(e.dropped)) for e in self.of(RoundClosed)],
            "outcomes": self.outcomes,
        }


Begin = Callable[[Path, Fate], World]
Whole = tuple[Outcome, list[Place]]  # what a run comes to that nobody kills, and the places at which one could


def undisturbed_once(begin: Begin) -> Any:
    """A module's fixture `undisturbed`: a `Whole`."""

    @pytest.fixture(scope="module", name="undisturbed")
    def made(tmp_path_factory: pytest.TempPathFactory) -> Whole:
        fate = Fate()
        return begin(tmp_path_factory.mktemp("undisturbed"), fate).live(), fate.places

    return made


def each_death(
    folder: Path, chosen: Collection[int], live: Callable[[Path, Fate], Lived], check: Callable[[Lived, str], object]
) -> int:
    """Live once for each of these places with a death there, and check what it came to; return the number of deaths.

    `live` opens the store anew after a death: of the first one the child has connections that are its parent's too.
    `check` is called with what `live` returns, and a sentence that says where it died. It is called in a child process:
    what it changes in memory is lost, and what it raises is raised here again, as an `AssertionError`.
    """
    disk = folder / "disk"
    fates = Fates(disk, chosen)

    class Noted(ThreadPoolExecutor):
        def submit(self, *given: Any, **named: Any) -> Future[Any]:
            fates.work.append(super().submit(*given, **named))
            return fates.work[-1]

    try:
        with patch.object(round_close, "ThreadPoolExecutor", Noted):
            made = live(disk, fates)
        if fates.tells is not None:
            check(made, fates.died)
    except BaseException:
        if fates.tells is None:
            raise
        fates.over(f"{fates.died}\n{traceback.format_exc()}")
    if fates.tells is not None:
        fates.over("")
    shutil.rmtree(disk)
    assert not fates.failed, fates.failed
    assert fates.deaths, "no life came to one of these places"
    return fates.deaths


def killed(
    begin: Begin, folder: Path, places: Sequence[Place], check: Callable[[Outcome, str], object],
    which: slice = slice(None), kinds: Sequence[str] = KINDS, writers: bool = False,
) -> int:  # fmt: skip
    """Check what the run comes to that is killed at one of the unequal places of these kinds, for each of them."""
    return each_death(
        folder, unequal(places, kinds, writers)[which], lambda disk, fate: begin(disk, fate).live(), check
    )
