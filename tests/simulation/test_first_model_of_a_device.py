"""[run] init = "device": the seed draws who is asked for the first model; neither kill nor refusal changes a bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.client.small import plan_of, task_of
from thinwire.client import Site
from thinwire.client.initial import initial_model
from thinwire.client.task import report
from thinwire.core import RunPlan, VirtualClock
from thinwire.core.events import Event, ModelStored, RunNoted, RunStatusChanged
from thinwire.core.home import AggregatorHome
from thinwire.core.types import Ask
from thinwire.server.run import drive
from thinwire.server.submit import submit
from thinwire.server.versions import Versions
from thinwire.simulation import HeldSpool, ScriptedDevice, ScriptedFleet, Training, Turn, simulate
from thinwire.simulation.sessions import Crowd
from thinwire.store import MeasureRow, Store

NAMES = ("sim-0", "sim-1", "sim-2")


def plan(**run: object) -> RunPlan:
    raw = plan_of("steps = 2", codec="int8", feedback="none").to_json()
    return RunPlan.from_json({**raw, "run": {**raw["run"], "rounds": 2, "init": "device", **run}})


class Killed(BaseException):
    """The process is gone."""


class Started:
    """One run over three devices that train; `refusing` are those that give no model."""

    def __init__(self, folder: Path, refusing: Sequence[str] = ()) -> None:
        self.home, task = AggregatorHome.under(folder), task_of()
        crowd = Crowd(folder / "clients", Site(), len(NAMES), debug=True)
        crowd.folder.mkdir()
        training = Training(task, crowd)

        def device(index: int, name: str) -> ScriptedDevice:
            def script(ask: Ask) -> Turn:
                return Turn(failure=("task-error", "x") if ask.kind == "init" and name in refusing else None)

            return ScriptedDevice(name, training.client(index, lambda ask: 1.0), script)

        devices = [device(index, name) for index, name in enumerate(NAMES)]
        self.fleet = ScriptedFleet(HeldSpool(self.home.spool), VirtualClock(), report(task), devices)
        self.store = Store.open(self.home.database)
        made = initial_model(task, 99)  # another than the devices': of it only the layout counts
        self.layout = made.layout
        self.run_id = submit(
            self.store, self.home, plan(keep="all"), made.layout, made.vector, made.buffers, {}, report(task)
        )

    def drive(self) -> None:
        drive(
            self.run_id, store=self.store, fleet=self.fleet, home=self.home, clock=self.fleet.virtual, simulated=True
        )  # fmt: skip

    @property
    def events(self) -> list[Event]:
        return [event for _, event in self.store.events(self.run_id)]

    @property
    def first(self) -> np.ndarray:
        stored = next(event for event in self.events if isinstance(event, ModelStored))
        assert stored.version == 0
        return Versions(self.home.run(self.run_id), self.layout).read(stored)[0]

    def asked(self) -> list[str]:
        said = [event.text for event in self.events if isinstance(event, RunStatusChanged)]
        return [text.split(",")[0].removeprefix("asking ") for text in said if "first model" in text]


def test_the_run_begins_with_what_the_device_s_task_makes_of_the_run_s_seed(tmp_path: Path) -> None:
    made = Started(tmp_path)
    made.drive()
    assert made.store.run(made.run_id).status == "done"
    assert (made.first == initial_model(task_of(), plan().run.seed).vector).all()
    (asked,) = made.asked()
    assert RunNoted in map(type, made.events)
    assert next(e.text for e in made.events if isinstance(e, RunNoted)) == f"the first model is {asked}'s"


def test_who_cannot_is_passed_over_and_if_nobody_can_the_run_says_what_each_said(tmp_path: Path) -> None:
    first = Started(tmp_path / "first")
    first.drive()
    (drawn,) = first.asked()
    made = Started(tmp_path / "refused", refusing=[drawn])
    made.drive()
    assert made.store.run(made.run_id).status == "done"
    assert len(made.asked()) == 2 and made.asked()[0] == drawn
    none = Started(tmp_path / "none", refusing=NAMES)
    none.drive()
    row = none.store.run(none.run_id)
    assert (row.status, row.exit_code) == ("failed", 6)
    assert all(f"{name}: task-error: x" in row.status_text for name in NAMES)


def kill(store: Store, at: int, before: bool) -> None:
    """Let the process die around its `at`-th commit, once."""
    record, commits = store.record, 0

    def counted(run_id: str, events: Sequence[Event], measured: Sequence[MeasureRow] = ()) -> None:
        nonlocal commits
        commits += 1
        if commits == at and before:
            raise Killed
        record(run_id, events, measured)
        if commits == at:
            raise Killed

    store.record = counted  # type: ignore[method-assign]  # the kill


@pytest.mark.parametrize("before", [True, False])
def test_a_kill_at_any_commit_before_the_first_round_changes_no_bit(tmp_path: Path, before: bool) -> None:
    for at in range(1, 5):
        made = Started(tmp_path / str(at))
        kill(made.store, at, before)
        with pytest.raises(Killed):
            made.drive()
        made.fleet = made.fleet.restart()
        made.drive()
        assert made.store.run(made.run_id).status == "done"
        assert (made.first == initial_model(task_of(), plan().run.seed).vector).all()
        assert sum(isinstance(e, ModelStored) and e.version == 0 for e in made.events) == 1


def test_a_simulation_asks_one_of_its_clients() -> None:
    own, device = (simulate(task_of(), plan(init=init), clients=3) for init in ("", "device"))
    assert own.run.model_digest == device.run.model_digest
