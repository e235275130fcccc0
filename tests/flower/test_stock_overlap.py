"""A plan with delayed averaging over stock nodes: they are selected one round at a time, and train as without it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.processes import EXAMPLE
from thinwire.core.plan import RunPlan
from thinwire.flower.stock_apps import Carried, StockRun, described, trained

PLAN = """
[run]
task = "digits"
rounds = 3
seed = 5
[local]
lr = 0.1
steps = 3
batch = 8
[uplink]
codec = "topk(0.1) > int8"
"""
NODES = 2


def parameters(folder: Path, plan: RunPlan, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Of the model after the run, made by nodes that work in this process."""

    class Grid:
        def get_node_ids(self) -> list[int]:
            return list(range(NODES))

    def node(number: int) -> Any:
        config = {"task": str(EXAMPLE / "task.py"), "partition": f"{number}/{NODES}", "home": str(folder / "nodes")}
        return SimpleNamespace(node_id=number, node_config=config)

    def exchange(kind: str, assignments: Mapping[int, Carried]) -> dict[int, Carried]:
        answer = described if kind == "query" else trained
        return {number: answer(assigned, node(number)) for number, assigned in assignments.items()}

    folder.mkdir()
    run = StockRun(cast(Any, Grid()), plan, "digits-1", folder)
    monkeypatch.setattr(run, "_exchange", exchange)
    run.make(NODES)
    return run.model.params.tobytes()


def test_stock_nodes_run_a_plan_with_overlap_as_they_run_it_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = RunPlan.parse(PLAN, overrides={"local.overlap.max_delay": "1"})
    assert ahead.local.delay == 1
    plain = parameters(tmp_path / "plain", RunPlan.parse(PLAN), monkeypatch)
    assert parameters(tmp_path / "ahead", ahead, monkeypatch) == plain
