"""The example of docs/how/own-aggregation.md against hostile clients, by its file and as an object of a notebook."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thinwire.aggregation import Combination, ServerOptimizer, UpdateRows, optimizers, reductions
from thinwire.aggregation.reductions import reduction_of
from thinwire.core import RunPlan
from thinwire.core.errors import CodecError, PlanError
from thinwire.core.registry import blamed
from thinwire.core.types import State, Vector
from thinwire.simulation import History, RunFailed, simulate

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_aggregation"
PLACE = f"{EXAMPLE / 'nearest_half.py'}:NearestHalf"
RAISES = (
    "from thinwire.aggregation import Reduction\nclass R(Reduction):\n    def reduce(self, updates):\n        1 / 0\n"
)


@dataclass(frozen=True)
class HalfStep(ServerOptimizer):
    lr: float = 1.0

    def step(self, params: Vector, change: Vector, state: State) -> tuple[Vector, State]:
        return params + np.float32(self.lr / 2) * change, {}


def run(rule: str, rounds: int = 4, **more: Any) -> History:
    plan = RunPlan.load(EXAMPLE / "plan.toml", {"server.reduce": f"'{rule}'", "run.rounds": str(rounds)})
    return simulate(f"hostile={EXAMPLE / 'task.py'}", plan, clients=8, **more)


@pytest.fixture(scope="module")
def by_file() -> History:
    return run(PLACE)


def test_two_hostile_clients_of_eight_ruin_the_mean_and_not_the_example(by_file: History) -> None:
    assert by_file.run.status == "done"
    assert by_file.metrics["accuracy"] > 0.8
    assert run("mean").metrics["accuracy"] < 0.5


def test_an_object_gives_the_same_bits_and_is_gone_afterwards(by_file: History) -> None:
    rule = reduction_of(PLACE)
    found = run("mean", reduce=rule)
    assert found.metrics == by_file.metrics
    assert found.run.plan["server"]["reduce"] == "object:NearestHalf"
    with pytest.raises(CodecError, match="no reduction at"):
        reduction_of("object:NearestHalf")


def test_a_class_is_a_server_optimizer_of_a_notebook() -> None:
    found = run("median", rounds=1, optimizer=HalfStep)
    assert found.run.status == "done"
    assert found.metrics != run("median", rounds=1).metrics
    assert f"{__name__}:HalfStep" not in optimizers
    assert optimizers.find(f"{__name__}:HalfStep") is HalfStep


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "raising_rule.py").write_text(RAISES)
    monkeypatch.syspath_prepend(tmp_path)
    yield "raising_rule:R"
    sys.modules.pop("raising_rule", None)


def test_what_a_rule_of_a_module_raises_is_said_to_be_of_that_module(module: str, tmp_path: Path) -> None:
    rule, rows = reduction_of(module), UpdateRows(tmp_path, 1)
    with pytest.raises(ZeroDivisionError) as raised:
        rule.reduce(rows)
    blame = blamed(raised.value, reductions)
    assert blame is not None
    assert (blame.kind, blame.package) == ("reduction", "raising_rule")


@pytest.mark.parametrize("place", ["no_such:Rule", "/no/such.py:Rule", f"{PLACE}s", "json:loads"])
def test_a_place_without_a_rule_is_refused_before_the_run(place: str) -> None:
    with pytest.raises((CodecError, PlanError)) as refused:
        run(place)
    assert place in str(refused.value)
    assert refused.value.hint


def test_a_change_that_no_model_can_take_ends_the_run_with_its_reason() -> None:
    class Wide(Combination):
        def weights(self, distances: Any) -> Any:
            return np.full(len(distances), np.inf)

    with pytest.raises(RunFailed, match="the change of the reduction 'object:Wide'"):
        run("mean", rounds=1, reduce=Wide())
