"""A run over scripted devices that train, as the metric of its versions by the virtual clock and by aggregated
updates.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from thinwire.client import ClientInfo
from thinwire.client.task import LoadedTask, initial_model
from thinwire.client.train.evaluate import evaluate
from thinwire.core import RunPlan, VirtualClock
from thinwire.core.events import Event, ModelStored, RoundClosed
from thinwire.core.statedir import AggregatorHome
from thinwire.server.model_store import Versions
from thinwire.simulation import InMemorySpool, ScriptedDevice, ScriptedFleet, Training, run_scripted, task_report
from thinwire.simulation.client_pool import ClientPopulation
from thinwire.store import Store

LAST = 0.25  # share of the last updates whose versions' metrics are averaged: one version alone is too noisy

Devices = Callable[[Training], Sequence[ScriptedDevice]]


@dataclass(frozen=True)
class Point:
    """A version: when it was there, of how many updates it was made, and each client's (correct, examples) with it."""

    seconds: float
    updates: int
    counts: tuple[tuple[float, float], ...]

    def accuracy(self, client: int | None = None) -> float:
        """Return the accuracy on all clients' test splits together, or of one's."""
        counted = self.counts if client is None else self.counts[client : client + 1]
        return sum(correct for correct, _ in counted) / sum(examples for _, examples in counted)


@dataclass(frozen=True)
class Curve:
    """The versions of a run in their order, and its journal."""

    points: tuple[Point, ...]
    events: tuple[Event, ...]

    @property
    def updates(self) -> int:
        return self.points[-1].updates

    def late_accuracy(self, updates: int, client: int | None = None) -> float:
        """The mean over the versions of the last quarter of so many updates."""
        counted = [point for point in self.points if updates * (1 - LAST) < point.updates <= updates]
        return fmean(point.accuracy(client) for point in counted or self.points[-1:])

    def seconds_to(self, accuracy: float) -> float | None:
        """Return the seconds until a version first had this accuracy; None if none had."""
        return next((point.seconds for point in self.points if point.accuracy() >= accuracy), None)


def curve(plan: RunPlan, task: LoadedTask, split: str, clients: int, devices: Devices, grace_s: float = 0.0) -> Curve:
    """Make the run (`[run] keep = "all"`, evaluate = "off") and measure each version on every client's test split.

    Nobody's absence changes what a version is worth here, and measuring takes no virtual time.
    """
    client = ClientInfo(split=split, seed=plan.run.seed)
    with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as name:
        home = AggregatorHome.under(Path(name), durable=False)
        population = ClientPopulation(Path(name) / "clients", client, clients, debug=True)
        population.folder.mkdir()
        training, first = Training(task, population), initial_model(task, plan.run.seed)
        report = task_report(plan, first.layout)
        fleet = ScriptedFleet(InMemorySpool(home.spool), VirtualClock(), report, devices(training), grace_s)
        with Store.open(home.database, durable=False) as store:
            run_id = run_scripted(plan, first.layout, fleet, store=store, home=home, params=first.vector)
            row, events = store.run(run_id), tuple(event for _, event in store.events(run_id))
        if row.status != "done":
            raise RuntimeError(f"a run of {plan.run.task} is {row.status}: {row.status_text}")
        versions = Versions(home.run(run_id), first.layout, durable=False)
        return Curve(points_of(events, versions, training), events)


def points_of(events: Sequence[Event], versions: Versions, training: Training) -> tuple[Point, ...]:
    """Each version of a journal on the test splits of a population's clients."""
    stored = {event.version: event for event in events if isinstance(event, ModelStored)}
    found, updates = list[Point](), 0
    for event in events:
        if isinstance(event, RoundClosed) and event.aggregated:
            updates += len(event.aggregated)
            found.append(Point(event.elapsed_s, updates, _measured(versions, stored[event.version], training)))
    return tuple(found)


def _measured(versions: Versions, stored: ModelStored, training: Training) -> tuple[tuple[float, float], ...]:
    executor = training.executor.inner
    module = executor.set_up(*versions.read(stored), stored.counters)
    population, task = training.population, training.executor.task
    found: list[Mapping[str, tuple[float, float]]] = [
        evaluate(module, task, executor.split(population.client_info(index)).test) for index in range(population.count)
    ]
    return tuple(sums["accuracy"] for sums in found)
