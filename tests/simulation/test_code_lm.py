"""The language model on Python's own source: it is the size it says, cut by package, and a few steps teach it."""

from __future__ import annotations

import runpy
import sys
from math import log
from pathlib import Path

import pytest
import torch

from thinwire.client import ClientInfo
from thinwire.client.task import LoadedTask, load_task
from thinwire.core import RunPlan
from thinwire.simulation import simulate

EXAMPLE = Path(__file__).parents[2] / "examples" / "code_lm"
FEW = {"run.rounds": "2", "local.steps": "3", "local.batch": "8", "cohort.clients": "2"}


@pytest.fixture(scope="module")
def task() -> LoadedTask:
    return load_task(f"code_lm={EXAMPLE / 'task.py'}")


def test_it_has_about_a_million_parameters(task: LoadedTask) -> None:
    assert 990_000 < sum(parameter.numel() for parameter in task.module.model().parameters()) < 1_010_000


def test_each_of_sixty_four_clients_has_one_module_or_package(task: LoadedTask) -> None:
    windows, names = task.module.library()
    assert len(set(names)) == task.module.PACKAGES == 64
    assert set(names) <= sys.stdlib_module_names
    assert windows.shape[1] == 65
    assert int(windows.max()) < 96
    splits = [task.module.data(ClientInfo(partition=i, partitions=64, split="by(package)")) for i in range(64)]
    assert sum(len(split.train) + len(split.test) for split in splits) == len(windows)
    assert all(1 <= len(split.test) <= 64 for split in splits)


def test_windows_follow_each_other_without_a_gap(task: LoadedTask) -> None:
    windows, names = task.module.library()
    assert names[0] == names[1]
    assert int(windows[0, -1]) == int(windows[1, 0])


def test_the_last_symbol_of_a_context_sees_the_first_one_and_no_symbol_sees_a_later_one(task: LoadedTask) -> None:
    module = task.module.model().eval()
    given = torch.zeros(1, task.module.CONTEXT, dtype=torch.long)

    def moved(changed: int) -> list[bool]:
        other = given.clone()
        other[0, changed] = 1
        found: list[bool] = (module(other) != module(given)).any(2)[0].tolist()
        return found

    assert moved(0)[-1]
    assert moved(40)[:41] == [False] * 40 + [True]


def test_what_is_no_symbol_becomes_one(task: LoadedTask) -> None:
    assert task.module.encoded("~ \té\n\x00").tolist() == [94, 0, 0, 0, 0, 0, 31, 95]


def test_a_few_steps_of_a_few_clients_teach_it_something() -> None:
    plan = RunPlan.load(EXAMPLE / "plan.toml", {**FEW, "local.lr": "0.5", "uplink.codec": "fp16"})  # 2.0 takes longer
    history = simulate(f"code_lm={EXAMPLE / 'task.py'}", plan, clients=8, split="by(package)")
    assert history.run.status == "done"
    assert history.metrics["loss"] < log(96)
    assert history.metrics["accuracy"] > 1 / 96


@pytest.mark.parametrize("split", ["iid", "shards(2)"])
def test_it_is_cut_in_other_ways_too(task: LoadedTask, split: str) -> None:
    split_ = task.module.data(ClientInfo(partition=3, partitions=40, split=split))
    assert len(split_.train) > 100


def test_its_baseline_is_measured_on_everybodys_text() -> None:
    measured = runpy.run_path(str(EXAMPLE / "centralised.py"))["centralised"]
    plan = RunPlan.load(EXAMPLE / "plan.toml", {**FEW, "run.rounds": "1"})
    assert set(measured(plan, 8, "dirichlet(100)")) == {"loss", "accuracy"}
