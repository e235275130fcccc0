"""One run in a queue of its own, its devices on a virtual clock, and a kill around any of its commits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from tests.support.crashes import Fate, Killed, Place, around_commits, each_death, unequal
from tests.support.faulty_fleet import AttentiveDevice, FaultyFleet
from tests.support.store_agreement import empty_database
from thinwire.aggregation import BufferMean
from thinwire.core import Layout, RunPlan, VirtualClock
from thinwire.core.events import Event, RoundClosed
from thinwire.core.fleet import SECURE_PARTS, Envelope, Hello, Spool, TaskReport
from thinwire.core.statedir import AggregatorHome
from thinwire.core.types import Assignment, Vector
from thinwire.server.context import RunCommands
from thinwire.server.run import drive
from thinwire.server.submit import FirstModel, submit
from thinwire.simulation import Behavior, InMemorySpool, Script, ScriptedDevice, SyntheticUpdates, Work
from thinwire.store import RunRow, Store

T = TypeVar("T", bound=Event)

LAYOUT = Layout.of({"w": (30, 20), "b": (20,)})
REPORT = TaskReport("toy", layout_digest=LAYOUT.digest)

SILENT = Behavior(lost="assignment")
FAILS = Behavior(compute_s=0.0, failure=("task-error", "ValueError in task.py:3"))


def every(seconds: float) -> Script:
    return lambda assignment: Behavior(compute_s=seconds)


def seed_of(name: str, assignment: Assignment) -> int:
    return int(hashlib.sha256(f"{name}/{assignment.round}".encode()).hexdigest()[:8], 16)


def change(name: str, assignment: Assignment) -> Vector:
    """It depends on the device's name and the round only."""
    drawn: Vector = np.random.default_rng(seed_of(name, assignment)).standard_normal(LAYOUT.size).astype(np.float32)
    return drawn


def work(name: str, kind: type[SyntheticUpdates] = SyntheticUpdates, **more: Any) -> SyntheticUpdates:
    """Five steps' worth of change; the loss that it measures is the model's version."""
    return kind(
        name, LAYOUT, partial(change, name), steps=5, loss=lambda assignment: float(assignment.base_version), **more
    )


def scripted(name: str, script: Script | float = 1.0, does: Work | None = None) -> ScriptedDevice:
    """One that does as the script says, or takes so many seconds for each assignment."""
    return AttentiveDevice(name, does or work(name), every(script) if isinstance(script, float) else script)


def three(script: Script | float = 1.0) -> list[ScriptedDevice]:
    return [scripted("a"), scripted("b"), scripted("c", script)]


class ToldFleet(FaultyFleet):
    """A scripted fleet that notes what was sent, over restarts of the aggregator."""

    def __init__(self, *given: Any) -> None:
        self.sent: list[Envelope] = []
        super().__init__(*given)

    def send(self, assignments: Sequence[Envelope]) -> None:
        self.sent += assignments
        super().send(assignments)

    def restart(self, spool: Spool | None = None) -> Self:
        again = super().restart(spool)
        again.sent = self.sent
        return again


class Bench:
    """A store, a clock and a queue with one run in it."""

    def __init__(
        self,
        folder: Path,
        devices: Sequence[ScriptedDevice],
        fleet: type[ToldFleet] = ToldFleet,
        layout: Layout = LAYOUT,
        **sections: Any,
    ) -> None:
        self.home, self.clock = AggregatorHome.under(folder, durable=False), VirtualClock()
        self.home.database.write_bytes(empty_database())
        self.store = Store.open(self.home.database, durable=False)
        report = TaskReport("toy", layout_digest=layout.digest)
        self.fleet = fleet(InMemorySpool(self.home.spool), self.clock, report, devices)
        sections["run"] = {"task": "toy", **sections.get("run", {})}
        sections["cohort"] = {"wait_for": len(devices), **sections.get("cohort", {})}
        plan = RunPlan.from_json({"local": {"lr": 1.0}, "uplink": {"codec": "topk(0.1) > int8"}, **sections})
        params, buffers = np.zeros(layout.size, np.float32), np.zeros(BufferMean(layout).layout.size, np.float32)
        self.run_id = submit(self.store, self.home, plan, FirstModel(layout, report, params, buffers))

    def drive(self, stop: Any = lambda: None, **more: Any) -> RunRow:
        return drive(
            self.run_id, store=self.store, fleet=self.fleet, home=self.home, clock=self.clock,
            commands=RunCommands(stop), **more,
        )  # fmt: skip

    def restart(self) -> None:
        """Another aggregator before the same devices: of the store it has what lies on the disk."""
        self.store.close()
        self.store = Store.open(self.home.database, durable=False)
        self.fleet = self.fleet.restart()

    def hears(self, name: str, **said: Any) -> None:
        """A device that is there says hello again, with something else in it."""
        device = self.fleet.devices[name]
        assert device.link is not None
        hello = Hello(name, f"{name}-{device.restarts}", (REPORT,), secure=SECURE_PARTS[:2])
        self.fleet.connect_link(device.link, replace(hello, **said))

    def events(self, kind: type[T]) -> list[T]:
        return [event for _, event in self.store.events(self.run_id) if isinstance(event, kind)]

    def reasons(self) -> list[str]:
        return [event.reason for event in self.events(RoundClosed)]

    def assignments(self, device: str, kind: str = "train") -> list[Assignment]:
        """What was sent to a device."""
        return [e.assignment for e in self.fleet.sent if e.device == device and e.assignment.kind == kind]


def killing(wanted: Callable[[Event], bool]) -> Callable[[Event], None]:
    """The process dies once such an event is journalled."""

    def on_event(event: Event) -> None:
        if wanted(event):
            raise Killed

    return on_event


AROUND = ("before a commit", "after a commit")


def drive_through(bench: Bench, fate: Fate | None = None) -> list[Place]:
    """Drive a run to its end with one death at most; gives the places at which it could die: around its commits."""
    fate = fate or Fate()
    around_commits(fate, bench.store)
    try:
        bench.drive()
    except Killed:
        bench.restart()
        bench.drive()
    return fate.places


def killed(
    begin: Callable[[Path], Bench], folder: Path, places: Sequence[Place], check: Callable[[Bench, str], object],
    which: slice = slice(None), kinds: Sequence[str] = ("after a commit",),
) -> int:  # fmt: skip
    """Check what the run comes to that is killed at one of the unequal places, for each; return the number of deaths.

    A process that dies before a commit leaves what it had left after the last one, and perhaps a reply in the spool
    that the journal does not name: `test_run.py` and `test_buffered_run.py` kill there, `AROUND` a commit.
    """

    def live(disk: Path, fate: Fate) -> Bench:
        bench = begin(disk)
        drive_through(bench, fate)
        return bench

    return each_death(folder, unequal(places, kinds)[which], live, check)


def outcome(bench: Bench) -> tuple[object, ...]:
    """What must not depend on where a run was killed."""
    rounds = [(e.round, e.reason, e.version, e.aggregated, e.dropped) for e in bench.events(RoundClosed)]
    return bench.store.run(bench.run_id).model_digest, rounds
