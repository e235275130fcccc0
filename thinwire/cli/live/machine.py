"""What this machine can carry: how many clients, on how many threads each, and whether there is a desktop."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

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
