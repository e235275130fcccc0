"""`thinwire sim` whose process is gone or is told to stop: no run is `running` for ever."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.test_run_notices import serves
from tests.support.cli_story import LAYOUT, PLAN
from tests.support.fork_server import Forked
from tests.support.processes import environment
from tests.support.server_bench import Bench, three
from thinwire.cli.runs import run_commands
from thinwire.core import RunPlan, statedir
from thinwire.core.fleet import TaskReport
from thinwire.core.statedir import AggregatorHome, holder, lock_file, own, private_folder
from thinwire.server.run_end import end_abandoned
from thinwire.store import Store
from thinwire.store.read_models import Source

TASK = """
import time
import torch

def model():
    return torch.nn.Linear(2, 1)

def data(client):
    x = torch.ones(4, 2)
    return torch.utils.data.TensorDataset(x, x[:, :1])

def loss(model, batch):
    time.sleep(0.05)
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
"""
PATIENCE_S = 90.0


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def begun(home: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A simulation that takes for ever and has closed a round."""
    (tmp_path / "slow.py").write_text(TASK)
    (tmp_path / "plan.toml").write_text('[run]\ntask = "slow"\nrounds = 100000\n[local]\nlr = 0.1\nsteps = 1\n')
    words = ["sim", "plan.toml", "--task", "slow=slow.py", "--clients", "2", "--home", str(home)]
    command = [sys.executable, "-m", "thinwire.cli", *words]
    with Forked(command, cwd=tmp_path, stderr=subprocess.DEVNULL, env=environment()) as it:
        place = AggregatorHome(home / "aggregator")
        until(lambda: (place.root / "runs").exists() or it.poll() is not None)
        with Store.open(place.database) as store:
            until(lambda: (rows := store.runs()) and rows[0].rounds_closed)
        try:
            yield it
        finally:
            it.kill()


def test_a_simulation_that_died_has_failed_and_says_why(thinwire, home, begun):
    listed = thinwire("runs", "list", "--json", "--home", home).document
    assert [row["status"] for row in listed] == ["running"]  # a living one is left alone
    begun.send_signal(signal.SIGKILL)
    begun.wait()
    listed = thinwire("runs", "list", "--json", "--home", home).document
    assert [row["status"] for row in listed] == ["failed"]
    said = thinwire("runs", "show", "latest", "--home", home).out
    assert f"process {begun.pid}, which simulated it, ended first" in said
    stopped = thinwire("runs", "stop", "slow-1", "--home", home)
    assert (stopped.code, "failed" in stopped.out) == (0, True)
    watched = thinwire("runs", "watch", "latest", "--home", home)
    assert watched.code == 1


def test_a_living_simulation_is_stopped(thinwire, home, begun):
    said = thinwire("runs", "stop", "slow-1", "--home", home)
    assert (said.code, "stopped by a person" in said.out) == (0, True)
    assert begun.wait(PATIENCE_S) == 10


def test_a_handover_that_died_has_failed_at_the_service(tmp_path: Path):
    """The service looks by itself, so the dashboard says it too; a command to stop such a run does not wait."""
    bench = Bench(tmp_path, three(), run={"rounds": 1})
    path = bench.home.owner(dead := left_behind(bench.store, "devices"))
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"pid": 7, "host": socket.gethostname()}))
    bench.store.commands.add("stop-run", dead)
    serves(bench, 60.0)
    row = bench.store.run(dead)
    assert (row.status, row.exit_code) == ("failed", 1)
    assert row.status_text == "process 7, which was handing it over, ended first: nobody goes on with it"
    assert not bench.store.commands.pending()
    assert bench.store.run(bench.run_id).status == "done"


def left_behind(store: Store, source: Source) -> str:
    """A run as a process leaves it that dies before the first model is stored."""
    return store.create_run("toy", RunPlan.parse(PLAN), LAYOUT, TaskReport("toy"), source=source)


@pytest.mark.parametrize("about", [{"pid": 7, "host": "another"}, None])
def test_a_simulation_of_which_nothing_is_known_is_ended_by_a_person_alone(
    thinwire, home: Path, store: Store, about: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
):
    """On another machine, whose locks may not be seen here, or begun this moment."""
    monkeypatch.setattr(run_commands, "WAIT_S", 0.1)
    path = AggregatorHome.under(home).owner(run_id := left_behind(store, "sim"))
    if about:
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(about))
    (row,) = thinwire("runs", "list", "--json", "--home", home).document
    assert row["status"] == "preparing"
    said = thinwire("runs", "stop", run_id, "--home", home)
    assert (said.code, "stopped by a person; the process" in said.out) == (0, True), said
    assert not store.commands.pending()


def test_a_simulation_that_died_in_another_container_of_this_machine_has_failed(
    home: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A container has a host of its own, and shares the locks of the machine's kernel."""
    place, run_id = AggregatorHome.under(home), left_behind(store, "sim")
    path, boot_id = place.owner(run_id), tmp_path / "boot_id"
    private_folder(path.parent)
    boot_id.write_text("b\n")
    monkeypatch.setattr(statedir, "BOOT_ID", boot_id)
    path.write_text(json.dumps({"pid": 7, "host": "another", "boot": "a"}))
    end_abandoned(store, place)
    assert store.run(run_id).status == "preparing", "that is another machine's"
    path.write_text(json.dumps({"pid": 7, "host": "another", "boot": f"b {path.parent.stat().st_dev}"}))
    with lock_file(path):
        end_abandoned(store, place)
    assert store.run(run_id).status == "preparing", "it lives"
    end_abandoned(store, place)
    assert store.run(run_id).status == "failed"


def test_a_living_simulation_that_is_busy_is_not_called_stopped(
    thinwire, home: Path, store: Store, monkeypatch: pytest.MonkeyPatch
):
    """It looks at commands between its clients only; the command stays until then."""
    monkeypatch.setattr(run_commands, "WAIT_S", 0.1)
    path = AggregatorHome.under(home).owner(run_id := left_behind(store, "sim"))
    private_folder(path.parent)
    with own(path):
        said = thinwire("runs", "stop", run_id, "--home", home)
    assert "stopped by a person" not in said.out
    assert store.run(run_id).status == "preparing"
    assert [command.kind for command in store.commands.pending()] == ["stop-run"]


def test_who_owns_a_run_is_seen_by_its_lock_and_not_by_a_process_number(home: Path, store: Store):
    path = AggregatorHome.under(home).owner("toy-1")
    private_folder(path.parent)
    with own(path):
        assert {"pid": os.getpid(), "host": socket.gethostname()}.items() <= (holder(path) or {}).items()
    assert not path.exists()
    with pytest.raises(RuntimeError), own(path):
        raise RuntimeError
    assert (path.exists(), holder(path)) == (True, None)  # of this very process, which lives


def test_nobody_goes_on_with_a_dead_run_while_its_end_is_recorded(
    home: Path, store: Store, monkeypatch: pytest.MonkeyPatch
):
    place, run_id = AggregatorHome.under(home), left_behind(store, "sim")
    path = place.owner(run_id)
    private_folder(path.parent)
    path.write_text(json.dumps({"pid": 7, "host": socket.gethostname()}))
    with lock_file(path):
        end_abandoned(store, place)
    assert store.run(run_id).status == "preparing", "another process holds it"
    record, seen = store.record, list[object]()

    def locked(*given: Any) -> None:
        seen.append(holder(path))
        record(*given)

    monkeypatch.setattr(store, "record", locked)
    end_abandoned(store, place)
    assert seen == [{"pid": 7, "host": socket.gethostname()}], "the lock was held"
    assert (store.run(run_id).status, holder(path)) == ("failed", None)
