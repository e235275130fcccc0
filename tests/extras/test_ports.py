"""The ports of Flower's quickstarts for transformers and Lightning train, the latter by its older import name."""

from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.core import RunPlan
from thinwire.simulation import simulate

PORTS = Path(__file__).parents[2] / "examples" / "ports"
pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages


@pytest.mark.parametrize("name", ["flower_transformers", "flower_lightning"])
def test_a_port_trains(name: str) -> None:
    made = simulate(f"{name}={PORTS / name}.py", RunPlan.load(PORTS / f"{name}.toml"), clients=4)
    assert made.run.status == "done", made.failures
    assert made.metrics["loss"] < 0.95 * made.run.metrics0["loss"]
    assert all("train/loss" in row for row in made.records())
