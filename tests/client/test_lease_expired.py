"""A device that still trains for one run when its lease expires: another run gets it, and measures its wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet_words import PATIENCE_S, until
from tests.support.small_task import cross_entropy, plan_of, task_of
from thinwire.client.admission import AdmissionController
from thinwire.client.agent import Device, serve
from thinwire.client.task import initial_model, report
from thinwire.client.train.protocol import ClientInfo
from thinwire.core import RunPlan
from thinwire.core.events import ENDED, ClientFailed, Event, RoundOpened, RunStatusChanged
from thinwire.core.statedir import AggregatorHome, private_folder
from thinwire.server import service
from thinwire.server.submit import FirstModel, submit
from thinwire.simulation.local_fleet import LocalFleet, LocalLink
from thinwire.store import FileSpool, Store

DEVICE, DEADLINE_S, WAITED_S = "pi-01", 1.0, 1.0


class Site:
    """An aggregator in this thread, and one device as a service in another one.

    Its first training ends `WAITED_S` after an assignment of the second run has reached the device.
    """

    def __init__(self, folder: Path, store: Store) -> None:
        self.store, self.home = store, AggregatorHome.under(folder / "aggregator")
        self.fleet, self.ending = LocalFleet(FileSpool(self.home.spool)), threading.Event()
        self.task, self.began = task_of(loss=self._loss), list[float]()
        self.device = Device(ClientInfo(DEVICE), private_folder(folder / DEVICE), AdmissionController())
        self.link = LocalLink(self.fleet, DEVICE, downloads=private_folder(folder / "downloads"))
        self.stop, self.thread = threading.Event(), threading.Thread(target=self._work)
        self.thread.start()

    def _work(self) -> None:
        serve(self.link, [self.task], self.device, self.stop, say=lambda line: None)

    def _loss(self, model: Any, batch: Any) -> Any:
        if not self.began:
            self.began.append(time.time())
            until(lambda: any(one.startswith("small-2.") for one in tuple(self.link.in_flight)))
            time.sleep(WAITED_S)
        return cross_entropy(model, batch)

    def submit(self, seed: int, **cohort: Any) -> str:
        raw = plan_of(run='evaluate = "off"').to_json()
        run, rest = {**raw["run"], "rounds": 1, "seed": seed}, {**raw["cohort"], **cohort}
        first = initial_model(self.task, 0, ())
        model = FirstModel(first.layout, report(self.task), first.vector, first.buffers, first.counters)
        return submit(self.store, self.home, RunPlan.from_json({**raw, "run": run, "cohort": rest}), model)

    def serve_until_over(self, run_id: str) -> None:
        def heard(of: str, event: Event) -> None:
            if of == run_id and isinstance(event, RunStatusChanged) and event.status in ENDED:
                self.ending.set()

        guard = threading.Timer(2 * PATIENCE_S, self.ending.set)
        guard.start()
        service.serve(self.fleet, self.store, self.home, ending=self.ending, on_event=heard)
        guard.cancel()

    def times(self, run_id: str, kind: type[Event]) -> list[float]:
        return [event.at for _, event in self.store.events(run_id) if isinstance(event, kind)]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Store.open(AggregatorHome.under(tmp_path / "aggregator").database) as store:
        made = Site(tmp_path, store)
        yield made
        made.stop.set()
        made.thread.join(PATIENCE_S)


def test_what_a_device_still_trains_after_its_lease_is_the_queue_of_the_next_run(site: Site) -> None:
    slow, other = site.submit(0, deadline_s=DEADLINE_S), site.submit(1, deadline_s=60.0)
    site.serve_until_over(other)
    assert site.store.run(other).status == "done", site.store.run(other).status_text
    (row,) = site.store.updates(other)
    (began_at,), (took_over_at,) = site.times(slow, RoundOpened), site.times(other, RoundOpened)
    assert took_over_at >= began_at + DEADLINE_S, "the device was leased to the other run until then"
    assert not [at for at in site.times(slow, ClientFailed) if at <= took_over_at], "the lease alone had ended"
    delivered_at, waited_s, ended_at = row.pulled_at or 0.0, row.queue_s or 0.0, row.arrived_at or 0.0
    assert waited_s >= 0.9 * WAITED_S, "the assignment waited on the device"
    assert delivered_at + waited_s + (row.train_s or 0.0) <= ended_at, "it waited no longer than it was there"
    (why,) = site.store.explanations(other)
    assert "did other work first for" in why.sentence
