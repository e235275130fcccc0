"""The demo's example and its size: examples/digits, and the number of clients and threads that this machine can carry.

The example lies in the checkout beside the package, or where the wheel installed it.
"""

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
    """Return the folder of examples/digits; `NotFound` if neither the checkout nor the installation has it."""
    import thinwire
    from thinwire.core.errors import NotFound

    checkout = Path(thinwire.__file__).parents[1] / "examples" / "digits"
    installed = Path(sys.prefix) / "share" / "thinwire" / "examples" / "digits"
    for folder in (checkout, installed):
        if (folder / "task.py").is_file():
            return folder
    raise NotFound("examples/digits is not here", why=f"neither {checkout} nor {installed}", hint="make demo")


def plan_of(rounds: int, seed: int, clients: int) -> RunPlan:
    """Return the example's plan with the demo's options; each round waits for all clients."""
    from thinwire.core import RunPlan

    sets = {"run.rounds": rounds, "run.seed": seed, "cohort.wait_for": clients}
    return RunPlan.load(digits() / "plan.toml", {key: str(value) for key, value in sets.items()})


def uncompressed(plan: RunPlan, clients: int) -> Mapping[str, float]:
    """Simulate the same run with dense updates and return the last model's metrics."""
    from thinwire.core import RunPlan
    from thinwire.simulation import simulate

    raw: dict[str, Any] = plan.to_json()
    raw["uplink"] |= {"codec": "identity", "feedback": "none"}
    task = f"{plan.run.task}={digits() / 'task.py'}"
    return simulate(task, RunPlan.from_json(raw), clients=clients, split=SPLIT).metrics


def centralised(plan: RunPlan, clients: int) -> Mapping[str, float]:
    """Train the same model on the data of all clients in one place and return its metrics."""
    train: Callable[..., Mapping[str, float]] = runpy.run_path(str(digits() / "centralised.py"))["centralised"]
    return train(plan, clients, SPLIT)


GIB = 2**30
FEWEST, MOST = 4, 8


def client_count(free_bytes: float) -> int:
    """Return the number of clients for this memory: one for each half GiB, from four to eight.

    >>> client_count(1 * GIB), client_count(3.2 * GIB), client_count(64 * GIB)
    (4, 6, 8)
    """
    return max(FEWEST, min(MOST, int(2 * free_bytes / GIB)))


def thread_count(clients: int) -> int:
    """Return the number of torch threads of each client; together they are at most the number of cores."""
    return max(1, cores() // clients)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_bytes() -> float:
    """Return the memory for new processes in bytes: the system's, or less if a container's limit is lower."""
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
    """Return True if this machine can open a browser."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def versions() -> dict[str, str]:
    """Return the versions of everything that figures may depend on."""
    from importlib.metadata import version

    found = {name: version(name) for name in ("thinwire", "flwr", "torch", "numpy")}
    return {**found, "python": platform.python_version(), "system": platform.platform()}
