"""A run that begins with a device's own model, over devices that train on a virtual clock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.small_task import plan_of, task_of
from thinwire.client import ClientInfo
from thinwire.client.task import initial_model, report
from thinwire.core import RunPlan, VirtualClock
from thinwire.core.events import Event, ModelStored, RunNoted
from thinwire.core.run_events import FirstModelAssigned
from thinwire.core.statedir import AggregatorHome
from thinwire.reports.reason_text import sentence
from thinwire.server.context import RunCommands, StopCommand
from thinwire.server.model_store import Versions
from thinwire.server.run import drive
from thinwire.server.submit import FirstModel, submit
from thinwire.simulation import Behavior, InMemorySpool, Script, ScriptedDevice, ScriptedFleet, Training
from thinwire.simulation.client_pool import ClientPopulation
from thinwire.store import Store

NAMES = ("sim-0", "sim-1", "sim-2")


def plan(**run: object) -> RunPlan:
    raw = plan_of("steps = 2", codec="int8", feedback="none").to_json()
    return RunPlan.from_json({**raw, "run": {**raw["run"], "rounds": 2, "init": "device", **run}})


REFUSES = ("task-error", "x")
NOT_NOW = ("declined", "hours: work begins at night (again in 7200 s)")


def fails(*reasons: tuple[str, str]) -> Script:
    """One that answers requests the first model so, one after the other, the last one for ever."""
    left = list(reasons)
    return lambda assignment: Behavior(failure=left.pop(0) if len(left) > 1 else left[0])


class Started:
    """One run over devices that train. `first`: what they do about the first model; `away` as for a device."""

    def __init__(
        self,
        folder: Path,
        first: Mapping[str, Script] | None = None,
        away: Mapping[str, Sequence[tuple[float, float]]] | None = None,
        names: Sequence[str] = NAMES,
        **sections: Mapping[str, object],
    ) -> None:
        self.home, task = AggregatorHome.under(folder), task_of()
        population = ClientPopulation(folder / "clients", ClientInfo(), len(names), debug=True)
        population.folder.mkdir()
        training = Training(task, population)

        def device(index: int, name: str) -> ScriptedDevice:
            own = (first or {}).get(name, lambda assignment: Behavior())
            work = training.client(index, lambda assignment: 1.0)
            gone = (away or {}).get(name, ())
            return ScriptedDevice(
                name, work, lambda assignment: own(assignment) if assignment.kind == "init" else Behavior(), gone
            )

        devices = [device(index, name) for index, name in enumerate(names)]
        self.fleet = ScriptedFleet(InMemorySpool(self.home.spool), VirtualClock(), report(task), devices)
        self.store = Store.open(self.home.database)
        made = initial_model(task, 99)  # another than the devices': of it only the layout counts
        self.layout, raw = made.layout, plan(keep="all").to_json()
        assigned = RunPlan.from_json({**raw, **{name: {**raw[name], **own} for name, own in sections.items()}})
        self.run_id = submit(
            self.store, self.home, assigned, FirstModel(made.layout, report(task), made.vector, made.buffers)
        )

    def drive(self, until: float = math.inf, ends: StopCommand = "service") -> None:
        """Until the run is over, or the aggregator, or a person the run, ends at a time on the clock."""
        clock = self.fleet.virtual
        drive(
            self.run_id, store=self.store, fleet=self.fleet, home=self.home, clock=clock,
            commands=RunCommands(lambda: ends if clock.now() >= until else None),
        )  # fmt: skip

    @property
    def events(self) -> list[Event]:
        return [event for _, event in self.store.events(self.run_id)]

    @property
    def first(self) -> np.ndarray:
        stored = next(event for event in self.events if isinstance(event, ModelStored))
        assert stored.version == 0
        return Versions(self.home.run(self.run_id), self.layout).read(stored)[0]

    def of(self, *kinds: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kinds)]

    def assigned(self) -> list[str]:
        return [event.device for event in self.of(FirstModelAssigned)]

    def giver(self) -> str:
        """Whose model it began with: one device's, said and stored once."""
        assert len([event for event in self.of(ModelStored) if event.version == 0]) == 1
        (said,) = [text for event in self.of(RunNoted) if "first model" in (text := sentence(event.note))]
        return str(said).removeprefix("the first model is ").removesuffix("'s")


def drawn(folder: Path, names: Sequence[str] = NAMES) -> list[str]:
    """The devices in the order that the seed draws them."""
    made = Started(folder / "drawn", dict.fromkeys(names, fails(("declined", "tasks: not this one"))), names=names)
    made.drive()
    return made.assigned()
