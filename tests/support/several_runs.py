"""Several runs of one service before the same devices, on a virtual clock, and a death of the service at any place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.crashes import Fate, Killed, deadly
from tests.support.faulty_fleet import AttentiveDevice
from tests.support.outcomes import every_assignment_has_one_outcome
from tests.support.server_bench import LAYOUT, REPORT, ToldFleet, work
from tests.support.store_agreement import assert_sums_agree, empty_database
from thinwire.core import RunPlan, VirtualClock
from thinwire.core.events import (
    ENDED,
    ClientSelected,
    Event,
    RoundClosed,
    RoundOpened,
    RunStatusChanged,
    UpdateAccepted,
)
from thinwire.core.owner_file import AggregatorFile
from thinwire.core.statedir import AggregatorHome
from thinwire.core.types import Assignment, UpdateId
from thinwire.server.service import serve
from thinwire.server.submit import FirstModel, submit
from thinwire.simulation import Behavior, ScriptedDevice
from thinwire.store import FileSpool, Store


def steady(speeds: Mapping[str, float]) -> list[ScriptedDevice]:
    """Devices that take so many seconds for each assignment."""

    def script(seconds: float) -> Callable[[Assignment], Behavior]:
        return lambda assignment: Behavior(compute_s=seconds)

    return [AttentiveDevice(name, work(name), script(seconds)) for name, seconds in speeds.items()]


def devices(update_ids: Sequence[str]) -> list[str]:
    """Return whose updates these are: a device that evaluates a last model again gives its next update a new number."""
    return [UpdateId.parse(text).device for text in update_ids]


class Site:
    """A service with several runs, and all that outlives its process."""

    def __init__(self, folder: Path, devices: Sequence[ScriptedDevice], fate: Fate | None = None) -> None:
        self.home, self.clock = AggregatorHome.under(folder, durable=False), VirtualClock()
        self.home.database.write_bytes(empty_database())
        self.store = Store.open(self.home.database, durable=False, clock=self.clock)
        self.fleet = ToldFleet(FileSpool(self.home.spool), self.clock, REPORT, devices)
        self.fate = fate or Fate()
        self.runs: list[str] = []
        self.served = False
        self.on_event: Callable[[str, Event], None] = lambda run_id, event: None

    def submit(self, **sections: Any) -> str:
        """Put a run into the queue, and return its id."""
        sections["run"] = {"task": "toy", "rounds": 3, **sections.get("run", {})}
        sections["cohort"] = {"wait_for": len(self.fleet.devices), "deadline_s": 60, **sections.get("cohort", {})}
        plan = RunPlan.from_json({"local": {"lr": 1.0}, "uplink": {"codec": "topk(0.1) > int8"}, **sections})
        nothing, first = np.zeros(0, np.float32), np.zeros(LAYOUT.size, np.float32)
        run_id = submit(self.store, self.home, plan, FirstModel(LAYOUT, REPORT, first, nothing))
        self.runs.append(run_id)
        return run_id

    def serve(self, seconds: float = 10_000.0, max_runs: int = 4, **limits: Any) -> None:
        """Serve until all runs are over, or for so many seconds; a death begins another life once. A second call is a
        restart.
        """
        if self.served:
            self.restart()
        self.served = True
        with deadly(self.fate, self.store):
            try:
                self._life(seconds, max_runs, **limits)
            except Killed:
                self.restart()
                self._life(seconds, max_runs, **limits)

    def restart(self) -> None:
        """Another service before the same devices: of the store it has what lies on the disk."""
        self.store.close()
        self.store = Store.open(self.home.database, durable=False, clock=self.clock)
        self.fleet = self.fleet.restart(FileSpool(self.home.spool))

    def events(self, run_id: str, *kinds: type[Event]) -> list[Any]:
        return [event for _, event in self.store.events(run_id) if isinstance(event, kinds)]

    def result(self, run_id: str) -> tuple[object, ...]:
        """What a death must not change: the model, who was in each round, whose updates are in each sum."""
        events = self.events(run_id, Event)
        assert_sums_agree(self.store, run_id, events)
        every_assignment_has_one_outcome(self.store, run_id, events)
        opened = [(e.round, sorted(e.assignments)) for e in events if isinstance(e, RoundOpened)]
        closed = [(e.round, e.reason, e.version, devices(e.aggregated)) for e in events if isinstance(e, RoundClosed)]
        row = self.store.run(run_id)
        return row.status, row.model_digest, opened, closed

    def work_of(self, run_id: str, device: str) -> list[tuple[float, float]]:
        """Return when the device was selected and when its update was accepted, for each of its updates in a run."""
        begins = dict[str, float]()
        for event in self.events(run_id, RoundOpened, ClientSelected):
            ids = event.assignments.values() if isinstance(event, RoundOpened) else [event.assignment_id]
            begins |= dict.fromkeys(ids, event.at)
        came = self.events(run_id, UpdateAccepted)
        return [(begins[event.assignment_id], event.at) for event in came if event.device == device]

    def _life(self, seconds: float, max_runs: int, keep_days: int | None = None, **limits: Any) -> None:
        ending, until, poll = threading.Event(), self.clock.now() + seconds, self.fleet.poll
        going = {run_id for run_id in self.runs if self.store.run(run_id).status not in ENDED}

        def heard(run_id: str, event: Event) -> None:
            if isinstance(event, RunStatusChanged) and event.status in ENDED:
                going.discard(run_id)
            self.on_event(run_id, event)

        def polled(wait_s: float) -> object:
            if self.clock.now() >= until or not going:
                ending.set()
            return poll(wait_s)

        self.fleet.poll = polled  # type: ignore[method-assign, assignment]  # ends the service
        serve(
            self.fleet, self.store, self.home, clock=self.clock, ending=ending,
            settings=AggregatorFile(max_runs=max_runs, keep_days=keep_days), on_event=heard, **limits,
        )  # fmt: skip
        self.fleet.poll = poll  # type: ignore[method-assign]
