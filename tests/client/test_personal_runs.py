"""Personal layers from one run into the next, over an aggregator and two devices as services: extend, clone, run:ID."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fleet_words import until
from tests.support.small_task import normed, plan_of, task_of
from thinwire.client.admission import AdmissionController
from thinwire.client.agent import Device, serve
from thinwire.client.personal_files import kept_runs, values_of, whole_model
from thinwire.client.task import initial_model, report
from thinwire.client.train.protocol import ClientInfo
from thinwire.core import RunPlan
from thinwire.core.clock import RealClock
from thinwire.core.events import Evaluated, StateLost
from thinwire.core.statedir import AggregatorHome, private_folder
from thinwire.reports.stored_models import stored_model
from thinwire.server.policy.eligibility import ConnectedDevices
from thinwire.server.run import drive
from thinwire.server.run_extension import extend_run
from thinwire.server.submit import FirstModel, submit
from thinwire.simulation.local_fleet import LocalFleet, LocalLink
from thinwire.store import FileSpool, Store
from thinwire.store.read_models import CommandRow

NAMES = ("pi-01", "pi-02")


class Site:
    """An aggregator in this thread, and a service in a thread of its own for each device."""

    def __init__(self, folder: Path, store: Store) -> None:
        self.folder, self.store, self.task = folder, store, task_of(normed)
        self.home = AggregatorHome.under(folder / "aggregator")
        self.fleet, self.online = LocalFleet(FileSpool(folder / "spool")), ConnectedDevices()
        self.stop, self.said = threading.Event(), list[str]()
        self.threads = [threading.Thread(target=self._serve, args=(name,)) for name in NAMES]
        for thread in self.threads:
            thread.start()

    def device(self, name: str) -> Path:
        return private_folder(self.folder / name)

    def _serve(self, name: str) -> None:
        link = LocalLink(self.fleet, name, downloads=private_folder(self.folder / f"{name}-downloads"))
        device = Device(ClientInfo(name), self.device(name), AdmissionController(folder=self.device(name)))
        serve(link, [self.task], device, self.stop, say=self.said.append)

    def plan(self, **run: object) -> RunPlan:
        raw = plan_of('steps = 2\npersonal_layers = ["3.*"]').to_json()
        cohort = {**raw["cohort"], "wait_for": len(NAMES)}
        return RunPlan.from_json({**raw, "run": {**raw["run"], "rounds": 2, **run}, "cohort": cohort})

    def run(self, plan: RunPlan) -> str:
        """Begin with the task's model, or with that of the run that the plan names."""
        first = initial_model(self.task, plan.run.seed, plan.local.personal_layers)
        params = first.vector
        if plan.run.init:
            params = stored_model(self.store, self.home, "small-1", "last").params
        run_id = submit(
            self.store,
            self.home,
            plan,
            FirstModel(first.layout, report(self.task), params, first.buffers, first.counters),
        )
        return self.drive(run_id)

    def drive(self, run_id: str) -> str:
        row = drive(run_id, store=self.store, fleet=self.fleet, home=self.home, clock=RealClock(), online=self.online)
        assert row.status == "done", row.status_text
        return run_id

    def personal(self, run_id: str) -> list[float]:
        """The share of test examples that saw trained personal layers, by evaluation."""
        found = [event for _, event in self.store.events(run_id) if isinstance(event, Evaluated)]
        return [event.metrics["personal"] for event in found]

    def end(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join(60)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Store.open(AggregatorHome.under(tmp_path / "aggregator").database) as store:
        made = Site(tmp_path, store)
        yield made
        made.end()


def test_values_go_on_after_an_extension_and_into_a_run_that_begins_with_the_model(site: Site) -> None:
    first = site.run(site.plan())
    assert site.personal(first)[0] == 0.0, "those of model()"
    extend_run(site.store, site.home, CommandRow(1, "extend-run", first, {"rounds": 1}, "ann", 0.0))
    site.drive(first)
    later = site.run(site.plan(init=f"run:{first}"))
    fresh = site.run(site.plan(seed=1))
    until(lambda: site.said.count(f"{fresh} is over") == len(NAMES))
    site.end()
    assert set(site.personal(first)[1:]) == {1.0}, "also in the round after the extension"
    assert set(site.personal(later)) == {1.0}
    assert site.personal(fresh)[0] == 0.0
    assert not [
        event for run in (first, later, fresh) for _, event in site.store.events(run) if isinstance(event, StateLost)
    ]
    for name in NAMES:
        kept = {one.run: one.is_open for one in kept_runs(site.device(name))}
        assert kept == dict.fromkeys((first, later, fresh), False), site.said
        values, whole = values_of(site.device(name), later), whole_model(site.device(name), later)
        assert values is not None
        assert whole.tensors["3.bias"].tolist() == values.arrays["3.bias"].tolist()
        assert int(whole.version) == 2, "the last model was evaluated here"
