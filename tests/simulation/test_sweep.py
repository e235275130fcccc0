"""Many simulated runs: each combination once, kept as it ends, and never made twice."""

from __future__ import annotations

import hashlib
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from thinwire.core import RunPlan
from thinwire.core.errors import NotWritten, PlanError, ThinwireError, UsageError
from thinwire.core.plan import canonical
from thinwire.reports.sweep_results import TrialStore
from thinwire.simulation import simulate
from thinwire.simulation import sweep as sweep_module
from thinwire.simulation.sweep import Progress, Sweep, grid, run_sweep

TASK = '''
"""A task small enough for a sweep in a test."""
import os
import signal
import torch
from torch import nn
from torch.utils.data import TensorDataset
from thinwire.client import Split

def model():
    return nn.Linear(4, 2)

def data(client):
    if client.seed == 98:
        os.kill(os.getpid(), signal.SIGKILL)  # as a system short of memory ends a process
    if client.seed == 99:
        raise KeyError("no such seed")
    draw = torch.Generator().manual_seed(client.partition)
    inputs = torch.randn(12, 4, generator=draw)
    whole = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    return Split(whole, whole)

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
'''


BESIDE = """import importlib.util
spec = importlib.util.spec_from_file_location("beside", {folder!r} + "/other/task.py")
beside = importlib.util.module_from_spec(spec)
spec.loader.exec_module(beside)
"""


@pytest.fixture
def task(tmp_path: Path) -> str:
    path = tmp_path / "tiny.py"
    path.write_text(TASK)
    return f"tiny={path}"


def plans(axes: dict[str, list[str]], seeds: int = 2, rounds: int = 2) -> list[RunPlan]:
    text = f'[run]\ntask="tiny"\nrounds={rounds}\n[local]\nlr=0.1\nsteps=1\n[cohort]\nretry_limit=1'
    return [RunPlan.parse(text, overrides=found) for found in grid(axes, range(seeds))]


AXES = {"uplink.codec": ["identity", "topk(0.5) > int8"]}


def test_every_combination_is_made_once_and_what_is_there_is_not_made_again(task: str, tmp_path: Path) -> None:
    cells, sweep, seen = TrialStore(tmp_path / "group"), Sweep.of(task, plans(AXES), 2, "iid"), list[tuple[int, int]]()
    made = run_sweep(sweep, cells, on_progress=lambda one: seen.append((one.done, one.missing)))
    assert seen == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    assert [cell.plan.uplink.codec for cell in made] == ["identity"] * 2 + ["topk(0.5) > int8"] * 2
    assert all(cell.status == "done" and len(cell.rounds) == 2 and cell.took_s > 0 for cell in made)
    wider = Sweep.of(task, plans({"uplink.codec": [*AXES["uplink.codec"], "fp16"]}), 2, "iid")
    assert len(wider.missing(cells)) == 2
    assert run_sweep(sweep, cells, on_progress=lambda _: pytest.fail("made twice")) == made


def test_a_sweep_that_is_cut_off_goes_on_where_it_was(task: str, tmp_path: Path) -> None:
    cells, sweep = TrialStore(tmp_path / "group"), Sweep.of(task, plans(AXES), 2, "iid")

    def interrupt(progress: Progress) -> None:
        if progress.done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sweep(sweep, cells, on_progress=interrupt)
    assert len(cells.all()) == 3
    assert len(sweep.missing(cells)) == 1


@pytest.fixture(scope="module")
def forking() -> Iterator[None]:
    """Workers are forked off one process that has imported torch, which takes longer than their runs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["thinwire.simulation.sweep"])
    begins = SimpleNamespace(active_children=multiprocessing.active_children, get_context=lambda kind: context)
    with patch.object(sweep_module, "multiprocessing", begins):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("forking")
def test_two_workers_make_the_same_figures_as_one(task: str, tmp_path: Path) -> None:
    sweep = Sweep.of(task, plans(AXES, seeds=1), 2, "iid")
    alone = run_sweep(sweep, TrialStore(tmp_path / "one"))
    beside = run_sweep(sweep, TrialStore(tmp_path / "two"), workers=2)
    assert [cell.metrics for cell in beside] == [cell.metrics for cell in alone]
    assert [cell.made for cell in beside] == [cell.made for cell in alone]


@pytest.mark.slow
@pytest.mark.usefixtures("forking")
def test_a_worker_that_is_killed_ends_the_sweep_with_what_to_do(task: str, tmp_path: Path) -> None:
    seeds = [RunPlan.from_json({**plan, "run": {**plan["run"], "seed": seed}}) for plan in [plans({})[0].to_json()]
             for seed in (98, 97)]  # fmt: skip
    with pytest.raises(ThinwireError, match="a worker ended") as caught:
        run_sweep(Sweep.of(task, seeds, 2, "iid"), TrialStore(tmp_path / "group"), workers=2)
    assert "--workers" in caught.value.hint


def test_the_first_finished_run_tells_how_long_the_others_take(task: str, tmp_path: Path) -> None:
    cells, seen = TrialStore(tmp_path / "group"), list[Progress]()
    run_sweep(Sweep.of(task, plans({}, seeds=2), 2, "iid"), cells, on_progress=seen.append)
    assert [one.left_s for one in seen[:1] + seen[2:]] == [None, 0.0]
    assert seen[1].trial is not None
    assert seen[2].trial is not None
    assert seen[1].left_s == pytest.approx(seen[1].trial.took_s)
    run_sweep(Sweep.of(task, plans({}, seeds=3), 2, "iid"), cells, on_progress=seen.append)
    assert seen[3].left_s == pytest.approx((seen[1].trial.took_s + seen[2].trial.took_s) / 2)  # before it begins


def test_a_run_that_fails_is_a_result_like_others(task: str, tmp_path: Path) -> None:
    plan = plans({})[0].to_json()
    bad = RunPlan.from_json({**plan, "run": {**plan["run"], "seed": 99}})
    (cell,) = run_sweep(Sweep.of(task, [bad], 2, "iid"), TrialStore(tmp_path / "group"))
    assert (cell.status, cell.exit_code) == ("failed", 6)
    assert "KeyError" in cell.failures[0], "with the error of the task"


@pytest.mark.parametrize("split", ["bogus", "dirichlet(-1)", "dirichlet(x)", "shards(0)"])
def test_a_split_that_cannot_be_is_refused_before_anything_begins(task: str, tmp_path: Path, split: str) -> None:
    plan = plans({})[0]
    with pytest.raises(UsageError, match="no split"):
        simulate(task, plan, clients=2, split=split)
    with pytest.raises(UsageError, match="no split"):
        Sweep.of(task, [plan], 2, split)


def test_a_plan_may_be_given_section_by_section(task: str) -> None:
    history = simulate(task, {"run": {"task": "tiny", "rounds": 1}, "local": {"lr": 0.1, "epochs": 1}}, clients=2)
    assert history.run.status == "done"
    with pytest.raises(PlanError, match="unknown key .local. rate"):
        simulate(task, {"run": {"task": "tiny"}, "local": {"lr": 0.1, "rate": 1}}, clients=2)


def test_a_first_model_from_elsewhere_is_refused_not_ignored(task: str) -> None:
    plan = RunPlan.parse('[run]\ntask="tiny"\ninit="run:latest"\n[local]\nlr=0.1')
    with pytest.raises(PlanError, match="init"):
        simulate(task, plan, clients=2)


def test_a_history_is_rows_and_a_frame_where_pandas_is(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    history = simulate(task, plans({})[0], clients=2)
    rows = history.records()
    assert [row["round"] for row in rows] == [1, 2]
    assert {"accuracy", "loss", "payload_up", "seconds", "codec"} <= set(rows[0])
    frame = history.frame()
    assert list(frame["round"]) == [1, 2]
    assert list(frame["accuracy"]) == [row["accuracy"] for row in rows]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ThinwireError, match="pandas") as caught:
        history.frame()
    assert "records()" in caught.value.hint


def test_a_run_that_failed_is_made_again_by_the_same_sweep(task: str, tmp_path: Path) -> None:
    plan = plans({})[0].to_json()
    bad = RunPlan.from_json({**plan, "run": {**plan["run"], "seed": 99}})
    sweep, group = Sweep.of(task, [bad], 2, "iid"), TrialStore(tmp_path / "group")
    run_sweep(sweep, group)
    assert sweep.missing(group) == list(sweep.specs)
    seen = list[Progress]()
    (cell,) = run_sweep(sweep, group, on_progress=seen.append)
    assert (cell.status, seen[-1].done) == ("failed", 1)


@pytest.mark.parametrize(
    ("imports", "file"),
    [
        ("from sweep_helper_a import RATE", "sweep_helper_a.py"),
        ("import sweep_package.inner", "sweep_package/inner.py"),
        (BESIDE, "other/task.py"),
    ],
    ids=["a constant", "a package", "another task's file"],
)
def test_a_run_is_made_again_when_a_module_of_its_task_has_changed(tmp_path: Path, imports: str, file: str) -> None:
    (tmp_path / "mine").mkdir()
    helper = tmp_path / ("" if file.startswith("other") else "mine") / file
    helper.parent.mkdir(exist_ok=True)
    helper.write_text("RATE = 1\n")
    (tmp_path / "mine" / "task.py").write_text(imports.format(folder=str(tmp_path)) + TASK)
    task = f"tiny={tmp_path / 'mine' / 'task.py'}"
    first, again = (Sweep.of(task, plans({}), 2, "iid").specs for _ in range(2))
    assert first == again
    helper.write_text("RATE = 2\n")
    assert {one.digest for one in Sweep.of(task, plans({}), 2, "iid").specs}.isdisjoint(one.digest for one in first)


def test_a_run_is_made_again_when_the_reduction_of_its_plan_has_changed(task: str, tmp_path: Path) -> None:
    rule = tmp_path / "rules" / "rule.py"
    rule.parent.mkdir()
    rule.write_text("from thinwire.aggregation.reductions import Median\n\n\nclass Mine(Median):\n    pass\n")
    both = plans({"server.reduce": ["mean", f"{rule}:Mine"]}, seeds=1)
    mean, mine = Sweep.of(task, both, 2, "iid").specs
    rule.write_text(rule.read_text() + "    fewest = 4\n")
    assert Sweep.of(task, both, 2, "iid").specs[0] == mean, "it names no code of others"
    assert Sweep.of(task, both, 2, "iid").specs[1].digest != mine.digest


def test_a_task_of_one_file_has_the_cells_that_it_had(task: str) -> None:
    (spec,) = Sweep.of(task, plans({}, seeds=1), 2, "iid").specs
    made = {"plan": spec.plan, "clients": 2, "split": "iid", "data": "", "task_digest": spec.task_digest}
    assert spec.digest == hashlib.sha256(canonical(made)).hexdigest()[:20]


def test_a_full_disk_is_no_result(task: str, tmp_path: Path) -> None:
    sweep, group = Sweep.of(task, plans({})[:1], 2, "iid"), TrialStore(tmp_path / "group")
    full = NotWritten("cannot write a model (No space left on device)", hint="free some space")
    with (
        patch("thinwire.server.model_store.Versions.write", side_effect=full),
        pytest.raises(NotWritten, match="No space"),
    ):
        run_sweep(sweep, group)
    (cell,) = run_sweep(sweep, group)
    assert cell.status == "done"
