"""The example's accuracy: a hundredth of the bytes, and the metric stays."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from thinwire.core import RunPlan
from thinwire.core.plan_schema import UplinkSection
from thinwire.simulation import History, simulate

DEFAULT = UplinkSection()
LAST = 10  # rounds of 20 whose accuracies are averaged: that of the last one alone depends on the seed by a hundredth
EXAMPLE = Path(__file__).parents[2] / "examples" / "digits"
STEPS = {"local.steps": "20"}  # of the example's 50: its accuracy is reached by then, and training is what costs


def digits(codec: str, seed: int, **overrides: str) -> History:
    plan = RunPlan.load(EXAMPLE / "plan.toml", {"uplink.codec": f"'{codec}'", **overrides})
    return simulate(f"digits={EXAMPLE / 'task.py'}", plan, clients=8, split="dirichlet(0.3)", seed=seed)


def accuracy(history: History) -> float:
    assert [row.reason for row in history.rounds] == ["all"] * 20
    return mean(row.metrics["accuracy"] for row in history.rounds[-LAST:])


@pytest.fixture(scope="module")
def uncompressed() -> History:
    return digits("identity", 1, **STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "feedback", "times"), [("stc(0.04)", "classic", 100), (DEFAULT.codec, "none", 30)], ids=["stc", "default"]
)
def test_the_codec_of_the_example_and_the_default_keep_the_accuracy(
    codec: str, feedback: str, times: int, uncompressed: History
) -> None:
    small = digits(codec, 1, **STEPS, **{"uplink.feedback": f"'{feedback}'"})
    assert accuracy(small) >= 0.95
    assert abs(accuracy(small) - accuracy(uncompressed)) <= 0.01
    assert small.run.dense_up / small.run.payload_up >= times


@pytest.mark.slow
def test_the_secure_example_keeps_the_accuracy_of_the_same_rounds_in_the_clear(uncompressed: History) -> None:
    plan, clear = RunPlan.load(EXAMPLE / "secure.toml", STEPS), RunPlan.load(EXAMPLE / "plan.toml", STEPS)
    same = plan.local.model_copy(update={"buffers": clear.local.buffers})
    assert same == clear.local, "the model has no buffers"
    masked = simulate(f"digits={EXAMPLE / 'task.py'}", plan, clients=8, split="dirichlet(0.3)")
    assert [row.reason for row in masked.rounds] == ["all"] * 20
    assert abs(masked.metrics["accuracy"] - uncompressed.metrics["accuracy"]) <= 0.01


def test_the_same_seed_gives_the_same_bits() -> None:
    first, second = (digits("stc(0.04)", 5, **STEPS, **{"run.rounds": "2"}) for _ in range(2))
    assert first.run.model_digest == second.run.model_digest
    assert first.run.model_digest != digits("stc(0.04)", 6, **STEPS, **{"run.rounds": "2"}).run.model_digest
    assert [row.aggregated for row in first.rounds] == [row.aggregated for row in second.rounds]
