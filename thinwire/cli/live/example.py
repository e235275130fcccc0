"""The example that the demo runs: in a checkout beside the package, else where the wheel put it."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.core import RunPlan

SPLIT = "dirichlet(0.3)"


def digits() -> Path:
    """The folder of examples/digits."""
    import thinwire
    from thinwire.core.errors import NotFound

    checkout = Path(thinwire.__file__).parents[1] / "examples" / "digits"
    installed = Path(sys.prefix) / "share" / "thinwire" / "examples" / "digits"
    for folder in (checkout, installed):
        if (folder / "task.py").is_file():
            return folder
    raise NotFound("examples/digits is not here", why=f"neither {checkout} nor {installed}", hint="make demo")


def plan_of(rounds: int, seed: int, clients: int) -> RunPlan:
    """The example's plan with what the demo's options change; it waits for all clients."""
    from thinwire.core import RunPlan

    sets = {"run.rounds": rounds, "run.seed": seed, "cohort.wait_for": clients}
    return RunPlan.load(digits() / "plan.toml", {key: str(value) for key, value in sets.items()})


def uncompressed(plan: RunPlan, clients: int) -> Mapping[str, float]:
    """The same run with updates as they are, simulated; gives the last model's metrics."""
    from thinwire.core import RunPlan
    from thinwire.simulation import simulate

    raw: dict[str, Any] = plan.to_json()
    raw["uplink"] |= {"codec": "identity", "feedback": "none"}
    task = f"{plan.run.task}={digits() / 'task.py'}"
    return simulate(task, RunPlan.from_json(raw), clients=clients, split=SPLIT).metrics


def centralised(plan: RunPlan, clients: int) -> Mapping[str, float]:
    """The same model on everybody's data in one place: what the example's own script measures."""
    train: Callable[..., Mapping[str, float]] = runpy.run_path(str(digits() / "centralised.py"))["centralised"]
    return train(plan, clients, SPLIT)
