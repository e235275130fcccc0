"""A run over stock nodes: the model that it writes is the whole one, which plain torch loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.system.mixed.plainly import accuracy
from thinwire.core.plan import RunPlan
from thinwire.flower.stock_apps import Carried, StockRun, described, trained

MIXED = Path(__file__).parents[1] / "system" / "mixed"
NODES = 2


def test_the_model_of_stock_nodes_loads_whole_and_scores_what_they_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Grid:
        def get_node_ids(self) -> list[int]:
            return list(range(NODES))

    def node(number: int) -> Any:
        config = {"task": str(MIXED / "task.py"), "partition": f"{number}/{NODES}", "home": str(tmp_path / "nodes")}
        return SimpleNamespace(node_id=number, node_config=config)

    def exchange(kind: str, assignments: Mapping[int, Carried]) -> dict[int, Carried]:
        answer = described if kind == "query" else trained
        return {number: answer(assigned, node(number)) for number, assigned in assignments.items()}

    plan = RunPlan.load(MIXED / "plan.toml")
    run = StockRun(cast(Any, Grid()), plan, "digits-1", tmp_path)
    monkeypatch.setattr(run, "_exchange", exchange)
    run.make(NODES)
    out = tmp_path / "model.safetensors"
    run.export(out)
    after = accuracy(out, NODES)
    versions_measured_before = run.metrics["accuracy"]  # the last round's are of the version before it
    assert after > 0.9
    assert after >= versions_measured_before - 0.02
