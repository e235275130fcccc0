"""A crash anywhere changes nothing: after every journal append, every commit and every fsync of a run of five rounds.

The clock stands still while the aggregator is dead. "The same" means: same order of accepted heads and deadline ticks,
so same model and shadow at every version, same folded sets and same verdicts.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests.store.agreement import assert_sums_agree, empty_database
from thinwire.aggregation.algorithms import algorithm_of, carried
from thinwire.core import Layout, RunPlan, VirtualClock
from thinwire.core.events import (
    ClientAsked,
    ClientFailed,
    Event,
    ModelStored,
    RoundClosed,
    RoundOpened,
    ShadowStored,
    UpdateAccepted,
    UpdateDropped,
)
from thinwire.core.home import AggregatorHome
from thinwire.core.types import Ask, UpdateId, Vector, Verdict
from thinwire.server.past import KEPT, Past
from thinwire.server.run import drive
from thinwire.server.submit import submit
from thinwire.simulation import MadeUp, ScriptedDevice, ScriptedFleet, Turn, reported
from thinwire.store import FileSpool, MeasureRow, Store
from thinwire.store.projection import Projection

SHARES = 8  # of all places: one test each
LAYOUT = Layout.of({"w": (6, 4), "b": (4,)})
PLAN = RunPlan.parse("""
[run]
task = "toy"
rounds = 5
[cohort]
clients = 3
wait_for = 5
deadline_s = 200
min_replies = 1
[local]
lr = 1.0
[uplink]
codec = "topk(0.2) > int8"
[downlink]
codec = "int8"
[server]
optimizer = "fedavgm"
""")
SCRIPT = {
    1: [Turn(), Turn(compute_s=2.0, again=("same", "new")), Turn(compute_s=9.0), Turn(compute_s=2.0)],
    2: [Turn(), Turn(compute_s=2.0), Turn(compute_s=0.5, held=1)],
    3: [Turn(), Turn(compute_s=2.0, garbage=True), Turn(compute_s=3.0), Turn(compute_s=2.0)],
    4: [Turn(compute_s=0.0, failure=("task-error", "x")), Turn(again=("changed",)), Turn(compute_s=3.0), Turn()],
    5: [Turn(), Turn(compute_s=2.0, upload_s=0.5), Turn(compute_s=3.0, lost="answer"), Turn()],
}


class Killed(BaseException):
    """The process is gone: nothing after this line runs."""


@dataclass
class Fate:
    """Counts the places at which a process can die, and dies at the `at`-th of them, once."""

    at: int = 0
    places: list[str] = field(default_factory=list)

    def here(self, place: str) -> None:
        self.places.append(place)
        if len(self.places) == self.at:
            raise Killed(place)


class World:
    """Devices, their clock, and the disk: all that outlives an aggregator."""

    def __init__(self, folder: Path, fate: Fate, plan: RunPlan = PLAN) -> None:
        self.fate, self.home, self.clock, self.plan = fate, AggregatorHome.under(folder), VirtualClock(), plan
        self.home.database.write_bytes(empty_database())
        self.dead = ""  # who died last
        self.roles: dict[int, list[str]] = {}  # round -> ask_ids in the order in which they were taken up
        travels = carried(algorithm_of(plan), LAYOUT)
        works = [MadeUp(name, travels, partial(change, name, travels.size)) for name in "abcde"]
        devices = [ScriptedDevice(work.name, work, self.turn) for work in works]
        self.fleet = ScriptedFleet(FileSpool(self.home.spool), self.clock, reported(plan, LAYOUT), devices)

    def turn(self, ask: Ask) -> Turn:
        """The script of a round's first, second, third ask; the third device of rounds 1 and 5 dies of it."""
        if ask.kind != "train":
            return Turn(compute_s=0.0)
        roles = self.roles.setdefault(ask.round, [])
        if ask.ask_id not in roles:
            roles.append(ask.ask_id)
            self._enter(ask, len(roles) - 1)
        return SCRIPT[ask.round][roles.index(ask.ask_id)]

    def _enter(self, ask: Ask, role: int) -> None:
        name = ask.ask_id.rsplit(".", 1)[1]
        if (ask.round, role) in ((1, 2), (5, 2)):
            self.fleet.die(name, 4.0)
            self.dead = name
        if (ask.round, role) == (3, 0):
            self.fleet.come(self.dead, 0.2)

    def live(self) -> Outcome:
        """The whole run, with one death at most."""
        nothing, first = np.zeros(0, np.float32), np.zeros(LAYOUT.size, np.float32)
        with Store.open(self.home.database, durable=False) as store:  # of a run it keeps in memory what never changes
            run_id = submit(store, self.home, self.plan, LAYOUT, first, nothing, {}, reported(self.plan, LAYOUT))
            with deadly(self.fate, store):
                try:
                    drive(run_id, store=store, fleet=self.fleet, home=self.home, clock=self.clock)
                except Killed:
                    self.fleet = self.fleet.restart(FileSpool(self.home.spool))
                    drive(run_id, store=store, fleet=self.fleet, home=self.home, clock=self.clock)
            return Outcome(store, run_id, self.fleet)


def change(name: str, size: int, ask: Ask) -> Vector:
    drawn: Vector = np.random.default_rng([ord(name), ask.round]).standard_normal(size).astype(np.float32)
    return drawn


@contextlib.contextmanager
def deadly(fate: Fate, store: Store) -> Iterator[None]:
    """While it lasts, the process may die after each append, each commit and each fsync."""
    finish, record = Projection.finish, store.record

    def appended(projection: Projection) -> None:
        finish(projection)
        fate.here("append")

    def committed(run_id: str, events: Sequence[Event], measured: Sequence[MeasureRow] = ()) -> None:
        record(run_id, events, measured)
        fate.here("commit")

    with (
        patch.object(Projection, "finish", appended),
        patch.object(store, "record", committed),
        patch("os.fsync", lambda descriptor: fate.here("fsync")),
    ):
        yield


class Outcome:
    """What a run came to."""

    def __init__(self, store: Store, run_id: str, fleet: ScriptedFleet) -> None:
        assert_sums_agree(store, run_id)
        self.status = store.run(run_id).status
        self.events = [event for _, event in store.events(run_id)]
        self.past = Past()
        for event in self.events:
            self.past.apply(event)
        self.devices = list(fleet.devices)
        self.told = {update_id: v for device in fleet.devices.values() for update_id, v in device.told.items()}

    def of(self, *kinds: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kinds)]

    @property
    def verdicts(self) -> dict[UpdateId, Verdict]:
        return {verdict.update_id: verdict for name in self.devices for verdict in self.past.told.of(name, KEPT)}

    def same(self) -> dict[str, object]:
        """All that must not depend on where it was killed."""
        return {
            "status": self.status,
            "models": [(e.version, e.digest, e.state) for e in self.of(ModelStored)],
            "shadows": [(e.version, e.digest) for e in self.of(ShadowStored)],
            "asked": sorted([ask_id for e in self.of(RoundOpened) for ask_id in e.asks.values()]),
            "asked since": [e.ask_id for e in self.of(ClientAsked) if e.why],
            "accepted": [(e.round, e.update_id, e.staleness, e.discount) for e in self.of(UpdateAccepted)],
            "closed": [(e.round, e.reason, e.version, e.folded, sorted(e.dropped)) for e in self.of(RoundClosed)],
            "verdicts": self.verdicts,
        }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, list[str]]:
    fate = Fate()
    return World(tmp_path_factory.mktemp("undisturbed"), fate).live(), fate.places


def test_the_run_has_late_lost_repeated_and_replaced_clients_in_it(undisturbed: tuple[Outcome, list[str]]) -> None:
    made, places = undisturbed
    assert made.status == "done"
    assert [e.reason for e in made.of(RoundClosed)] == ["enough", "deadline", "all", "enough", "enough"]
    assert [e.round for e in made.of(UpdateAccepted) if e.late] == [3]
    assert Counter(e.kind for e in made.of(ClientFailed)) == {"left": 2, "task-error": 1}
    assert Counter(e.reason.split(":")[0] for e in made.of(UpdateDropped)) == {"duplicate": 1, "bad-payload": 1}
    assert [e.round for e in made.of(ClientAsked) if e.why] == [1, 3, 4, 5]
    assert len(made.of(ShadowStored)) == 5
    assert made.told.items() <= made.verdicts.items()
    assert {"append", "commit", "fsync"} == set(places)


@pytest.mark.parametrize("share", range(SHARES))
def test_a_crash_anywhere_changes_nothing(undisturbed: tuple[Outcome, list[str]], tmp_path: Path, share: int) -> None:
    made, places = undisturbed
    for at, place in list(enumerate(places, start=1))[share::SHARES]:
        again = World(tmp_path / str(at), Fate(at)).live()
        assert again.same() == made.same(), f"killed at place {at}: {place}"
        assert again.told.items() <= again.verdicts.items()
        shutil.rmtree(tmp_path / str(at))
