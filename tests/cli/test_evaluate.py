"""`thinwire aggregator evaluate`: a process with the task beside the service, which evaluates in a worker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.server_bench import Bench, scripted
from thinwire.cli.aggregator.evaluate import evaluated_until, required
from thinwire.core.errors import UsageError
from thinwire.core.events import Evaluated
from thinwire.core.layout import Layout
from thinwire.core.types import Assignment, Vector
from thinwire.server.command_queue import CommandQueue
from thinwire.server.holdout import EVALUATED, CommandedHoldout
from thinwire.simulation import SyntheticUpdates

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from thinwire.client import Split, histogram

def model():
    return nn.Linear(2, 1)

def data(client):
    assert client.name == "holdout", client
    inputs = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [0.0, 2.0]])
    found = TensorDataset(inputs, torch.tensor([1.0, 0.0, 1.0, 0.0]))
    return Split(found, found)

def loss(model, batch):
    return nn.functional.binary_cross_entropy_with_logits(model(batch[0])[:, 0], batch[1])

def evaluate(model, test):
    inputs, labels = test.tensors
    return {"sick": histogram(torch.sigmoid(model(inputs)[:, 0]), labels)}
"""
LAYOUT = Layout.of({"weight": (1, 2), "bias": (1,)})


@pytest.fixture
def task(tmp_path: Path) -> str:
    path = tmp_path / "task.py"
    path.write_text(TASK)
    return f"toy={path}"


def bench(folder: Path) -> Bench:
    def change(assignment: Assignment) -> Vector:
        return np.array([1.0, -1.0, 0.0], np.float32)

    return Bench(
        folder, [scripted(name, does=SyntheticUpdates(name, LAYOUT, change, steps=1)) for name in "ab"], layout=LAYOUT,
        run={"rounds": 1, "evaluate": "holdout", "evaluate_wait_s": 0}, uplink={"codec": "identity"},
    )  # fmt: skip


def test_it_leaves_the_evaluation_of_each_version_for_the_service(thinwire, tmp_path: Path, task: str) -> None:
    one = bench(tmp_path / "home")
    said = thinwire("aggregator", "evaluate", "--task", task, "--once", "--home", tmp_path / "home")
    assert (said.code, said.out.split(": ")[0]) == (0, f"{one.run_id} version 0"), said.err
    (command,) = one.store.commands.pending()
    assert (command.kind, command.run_id, command.args["version"]) == (EVALUATED, one.run_id, 0)
    assert evaluated_until(one.store, one.run_id) == 0, "what waits for the service is not evaluated twice"
    one.drive(holdout=CommandedHoldout(CommandQueue(one.store.commands)))
    (found,) = one.events(Evaluated)
    assert found.metrics == pytest.approx({"loss": 0.6931, "sick_auc": 0.5, "sick_f1": 2 / 3}, abs=1e-3), "of zeros"
    assert evaluated_until(one.store, one.run_id) == 0
    assert one.store.commands.pending() == []
    again = thinwire("aggregator", "evaluate", "--task", task, "--once", "--home", tmp_path / "home")
    assert (again.code, again.out, "no version of a run of toy is due" in again.err) == (0, "", True)


def test_a_run_that_wants_no_holdout_evaluation_or_has_another_task_is_refused(thinwire, tmp_path: Path) -> None:
    one = bench(tmp_path / "home")
    run = one.store.run(one.run_id)
    assert required(run, "toy") is run
    with pytest.raises(UsageError, match="trains the task toy"):
        required(run, "other")
    off = replace(run, plan={**run.plan, "run": {**run.plan["run"], "evaluate": "off"}})
    with pytest.raises(UsageError, match="evaluate = 'off'"):
        required(off, "toy")


def test_code_that_raises_is_told_and_the_next_version_is_tried(thinwire, tmp_path: Path) -> None:
    path = tmp_path / "task.py"
    path.write_text(TASK.replace("def evaluate(model, test):", "def evaluate(model, test):\n    1 / 0"))
    one = bench(tmp_path / "home")
    said = thinwire("aggregator", "evaluate", "--task", f"toy={path}", "--once", "--home", tmp_path / "home")
    assert (said.code, said.out) == (0, "")
    assert "version 0: task-error" in said.err and "ZeroDivisionError" in said.err
    assert one.store.commands.pending() == []
