"""The example's accuracy: a hundredth of the bytes, and the metric stays."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from thinwire.core import RunPlan
from thinwire.core.plan_schema import UplinkSection
from thinwire.simulation import History, simulate

DEFAULT = UplinkSection()
SEEDS = (1, 2)
EXAMPLE = Path(__file__).parents[2] / "examples" / "digits"


def digits(codec: str, seed: int, **overrides: str) -> History:
    plan = RunPlan.load(EXAMPLE / "plan.toml", {"uplink.codec": f"'{codec}'", **overrides})
    return simulate(f"digits={EXAMPLE / 'task.py'}", plan, clients=8, split="dirichlet(0.3)", seed=seed)


@pytest.fixture(scope="module")
def dense() -> list[History]:
    return [digits("identity", seed) for seed in SEEDS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "feedback", "times"), [("stc(0.04)", "classic", 100), (DEFAULT.codec, "none", 30)], ids=["stc", "default"]
)
def test_the_codec_of_the_example_and_the_default_keep_the_accuracy(
    codec: str, feedback: str, times: int, dense: list[History]
) -> None:
    small = [digits(codec, seed, **{"uplink.feedback": f"'{feedback}'"}) for seed in SEEDS]
    assert all(row.reason == "all" for history in (*small, *dense) for row in history.rounds)
    accuracy, uncompressed = (mean(history.metrics["accuracy"] for history in runs) for runs in (small, dense))
    assert accuracy >= 0.95
    assert abs(accuracy - uncompressed) <= 0.01
    assert all(history.run.dense_up / history.payload_up >= times for history in small)


def test_the_same_seed_gives_the_same_bits() -> None:
    first, second = (digits("stc(0.04)", 5, **{"run.rounds": "2"}) for _ in range(2))
    assert first.run.model_digest == second.run.model_digest
    assert first.run.model_digest != digits("stc(0.04)", 6, **{"run.rounds": "2"}).run.model_digest
    assert [row.aggregated for row in first.rounds] == [row.aggregated for row in second.rounds]
