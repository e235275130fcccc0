"""[run] init = "device" over real processes: an aggregator that dies after it selected a device goes on with the
same device.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.processes import Site, kill
from tests.system.test_real_nodes import aggregated_once
from thinwire.core.events import ModelStored, RoundClosed, RunNoted
from thinwire.core.run_events import FirstModelAssigned
from thinwire.reports.reason_text import sentence

HELD = """

import os, pathlib, time
_model = model
def model():
    while pathlib.Path({hold!r}).exists() and "TYPED" not in os.environ:
        time.sleep(0.05)
    return _model()
"""


def held_task(site: Site, hold: Path) -> None:
    """The example's task, whose model() on a device is not ready while the file is there."""
    site.example = shutil.copytree(site.example, hold.parent / "held")
    with (site.example / "task.py").open("a") as task:
        task.write(HELD.format(hold=str(hold)))


def test_the_aggregator_may_be_killed_during_the_assignment_and_the_device_after_its_reply(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_task(site, hold := tmp_path / "hold")
    aggregator = site.start_aggregator()
    clients = {name: site.start_client(name, part, 2) for part, name in enumerate(("pi-a", "pi-b"))}
    site.until(lambda: all("idle" in site.log_of(client) for client in clients.values()))
    hold.touch()
    with monkeypatch.context() as typed:
        typed.setenv("TYPED", "1")
        run_id = site.begin("run.rounds=4", "run.init=device", "cohort.wait_for=2", "local.steps=20")
    site.until_event(run_id, FirstModelAssigned)
    kill(aggregator)
    (assigned,) = [event for event in site.events(run_id) if isinstance(event, FirstModelAssigned)]
    assert site.run(run_id).version == 0 and not [e for e in site.events(run_id) if isinstance(e, ModelStored)]
    site.start_aggregator()
    hold.unlink()
    site.until_event(run_id, RoundClosed, round=1)
    kill(clients[assigned.device])
    state = json.loads((site.home / "clients" / assigned.device / "runs" / run_id / "state.json").read_bytes())
    assert [entry for entry in state["outbox"] if entry["first"]] == [], "it arrived, and is not sent again"
    site.start_client(assigned.device, sorted(clients).index(assigned.device), 2)
    row = site.until_done(run_id)
    assert (row.status, row.version) == ("done", 4), site.said()
    events = site.events(run_id)
    assert [event.device for event in events if isinstance(event, FirstModelAssigned)] == [assigned.device]
    assert [event.version for event in events if isinstance(event, ModelStored)] == [0, 1, 2, 3, 4]
    assert f"the first model is {assigned.device}'s" in [sentence(e.note) for e in events if isinstance(e, RunNoted)]
    aggregated_once(site, run_id)
