"""Clients in several processes: the same bits as in one, whoever is killed meanwhile, and nobody is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.fork_server import Forked
from tests.support.processes import environment
from tests.support.small_task import plan_of, task_of
from thinwire.client import ClientInfo
from thinwire.core.errors import UsageError
from thinwire.core.fleet import Delivery
from thinwire.core.types import Assignment, Failure
from thinwire.simulation import RunFailed, simulate
from thinwire.simulation.client_pool import ClientPopulation
from thinwire.simulation.process_pool import ProcessExecutor

TASK = """
import os, signal, time
from pathlib import Path
import torch
from tests.support.small_task import cross_entropy, examples, linear
from thinwire.client import Split

HERE = Path(__file__).parent

def model():
    return linear()

def data(client):
    return Split(examples(seed=client.partition), examples(6, 4))

def loss(model, batch):
    {extra}
    return cross_entropy(model, batch)
"""
ONCE = """mark = HERE / "killed"
    if os.environ.get("KILL") and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)"""
ALWAYS = """os.kill(os.getpid(), signal.SIGKILL)"""
LONG = """(HERE / f"pid-{os.getpid()}").touch()
    time.sleep(600)"""
PLAN = plan_of("steps = 2", "topk(0.3) > int8", "classic", run="rounds = 3")


def task(folder: Path, extra: str) -> str:
    file = folder / "task.py"
    file.write_text(TASK.replace("{extra}", extra))
    return f"small={file}"


def test_two_processes_give_the_bits_of_one_even_when_a_worker_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = task(tmp_path, ONCE)
    one = simulate(spec, PLAN, clients=4)
    monkeypatch.setenv("KILL", "1")
    (tmp_path / "thinwire").mkdir()  # a checkout of that name, in the folder that a person is in
    monkeypatch.chdir(tmp_path)
    two = simulate(spec, PLAN, clients=4, processes=2)
    assert (tmp_path / "killed").exists()
    assert two.run.model_digest == one.run.model_digest
    assert two.metrics == one.metrics
    assert [row.aggregated for row in two.rounds] == [row.aggregated for row in one.rounds]


def test_a_worker_that_was_started_since_needs_no_plan(tmp_path: Path) -> None:
    assignment = Assignment("small-1.1.sim-0", "small-1", "small", "train", PLAN.to_json())
    workers = ProcessExecutor(task(tmp_path, ""), ClientPopulation(tmp_path / "clients", ClientInfo(), 1), 1)
    try:
        first = workers.result(0, Delivery(assignment, None)).reply
        workers._workers[0].process.kill()
        second = workers.result(
            0, Delivery(replace(assignment, assignment_id="small-1.2.sim-0", plan=PLAN.digest), None)
        ).reply
    finally:
        workers.close()
    assert isinstance(first, Failure) and isinstance(second, Failure)
    assert first.kind == second.kind == "layout-mismatch"


def test_work_that_ends_its_process_twice_ends_the_run_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="sim-0 ended its process twice") as failed:
        simulate(task(tmp_path, ALWAYS), PLAN, clients=1, processes=2)
    assert "signal 9" in failed.value.history.run.status_text


def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text('[run]\ntask = "small"\n[local]\nlr = 0.1\nsteps = 2\n')
    spec = task(tmp_path, LONG)
    command = [sys.executable, "-m", "thinwire.cli", "sim", "plan.toml", "--task", spec, "--processes", "2"]
    sim = Forked([*command, "--home", "home"], cwd=tmp_path, stderr=subprocess.DEVNULL, env=environment())
    while len(pids := [int(path.name[4:]) for path in tmp_path.glob("pid-*")]) < 2:
        assert sim.poll() is None
        time.sleep(0.05)
    sim.send_signal(signal.SIGINT)
    assert sim.wait() == 130
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("count", [0, -1])
def test_no_process_is_refused(tmp_path: Path, count: int) -> None:
    with pytest.raises(UsageError, match=f"processes = {count} is not valid"):
        simulate(task(tmp_path, ""), PLAN, clients=2, processes=count)


def test_an_object_of_this_process_is_refused_before_anything_begins() -> None:
    with pytest.raises(UsageError, match="does not run in 2 processes"):
        simulate(task_of(), PLAN, clients=2, processes=2)
