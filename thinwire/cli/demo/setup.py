"""The example that the demo runs: in a checkout beside the package, else where the wheel put it."""

from __future__ import annotations

import os
import platform
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


# What this machine can carry: how many clients, on how many threads each, and whether there is a desktop.


GIB = 2**30
FEWEST, MOST = 4, 8


def client_count(free_bytes: float) -> int:
    """Half a GiB for each client, from four to eight of them.

    >>> client_count(1 * GIB), client_count(3.2 * GIB), client_count(64 * GIB)
    (4, 6, 8)
    """
    return max(FEWEST, min(MOST, int(2 * free_bytes / GIB)))


def thread_count(clients: int) -> int:
    """Threads of torch in each client: together no more than there are cores."""
    return max(1, cores() // clients)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_bytes() -> float:
    """Memory that new processes can have: the system's, or less where a container's limit is lower."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024.0
    except (OSError, KeyError, ValueError):
        return float(MOST * GIB)
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        free = min(free, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):  # no container, or no limit
        pass
    return free


def has_desktop() -> bool:
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def versions() -> dict[str, str]:
    """Of everything whose figures may depend on it."""
    from importlib.metadata import version

    found = {name: version(name) for name in ("thinwire", "flwr", "torch", "numpy")}
    return {**found, "python": platform.python_version(), "system": platform.platform()}
