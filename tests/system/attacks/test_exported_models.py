"""What a run has recorded of its model holds for the exported file, with real client processes, plain and over TLS."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.support.processes import Site, kill
from tests.system.mixed.plainly import accuracy
from thinwire.core.events import ClientFailed, RoundClosed

MIXED = Path(__file__).parents[1] / "mixed"
CHANGES = """
from tests.system.mixed import task

data = task.data

class Extra(task.Mixed):
    def get_extra_state(self):
        return 1
    def set_extra_state(self, state):
        pass

def model():
    return Extra()

def loss(model, batch):
    if model.training:
        model.mask.fill_(False)
    return task.loss(model, batch)
"""


def start(site: Site, secure: bool) -> None:
    """An aggregator and two clients of it."""
    site.start_aggregator(*(["--san", "localhost"] if secure else []))
    for part, name in enumerate(("pi-a", "pi-b")):
        if secure:
            (invited,) = json.loads(site.typed("devices", "invite", "--json").stdout)
            joined = site.call("client", "join", invited["url"], invited["invitation"], "--name", name)
            assert joined.returncode == 0, joined.stderr
            task = f"digits={site.example / 'task.py'}"
            site.start("client", "start", "--task", task, "--name", name, "--partition", f"{part}/2")
        else:
            site.start_client(name, part, 2)


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "TLS"])
def test_the_exported_model_scores_what_real_clients_measured_though_the_aggregator_died(
    site: Site, tmp_path: Path, secure: bool
) -> None:
    site.example = MIXED
    start(site, secure)
    run_id = site.begin("cohort.wait_for=2", *(["run.init=device"] if secure else []))
    site.until_event(run_id, RoundClosed, round=1)
    assert site.aggregator is not None
    kill(site.aggregator)
    site.start_aggregator(*(["--san", "localhost"] if secure else []))
    row = site.until_done(run_id)
    assert (row.status, row.version) == ("done", 3), site.said()
    out = tmp_path / "model.safetensors"
    assert site.typed("runs", "model", run_id, "--out", str(out)).returncode == 0
    assert row.metrics["accuracy"] > 0.5
    assert accuracy(out, 2) == pytest.approx(row.metrics["accuracy"], abs=1e-9)
    saved = tmp_path / "saved.tar"
    assert site.typed("aggregator", "backup", str(saved)).returncode == 0
    elsewhere = Site(tmp_path / "elsewhere")
    assert elsewhere.typed("aggregator", "restore", str(saved)).returncode == 0
    again = tmp_path / "again.safetensors"
    assert elsewhere.typed("runs", "model", run_id, "--out", str(again)).returncode == 0
    before, after = load_file(out), load_file(again)
    assert {name: found.tobytes() for name, found in after.items()} == {
        name: found.tobytes() for name, found in before.items()
    }


def test_a_task_that_changes_a_fixed_buffer_fails_and_the_run_says_which(site: Site, tmp_path: Path) -> None:
    site.example = tmp_path / "changes"
    site.example.mkdir()
    (site.example / "task.py").write_text(CHANGES)
    (site.example / "plan.toml").write_bytes((MIXED / "plan.toml").read_bytes())
    start(site, secure=False)
    run_id = site.begin("cohort.wait_for=2")
    row = site.until_done(run_id)
    assert row.status == "failed"
    said = {event.text for event in site.events(run_id) if isinstance(event, ClientFailed)}
    assert said == {"bool buffer mask was changed by training"}
    for client in site.processes[1:]:
        assert "warning: the task digits: get_extra_state() does not travel" in site.log_of(client)
