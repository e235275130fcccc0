"""The groups of simulated runs, and how much of each is made: they are files, and no rows of the store."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Group:
    """`done` of `runs` that were ever asked for are over; `at` is when the last of them was kept, on the wall clock."""

    name: str
    task: str
    done: int
    runs: int
    at: float


def groups(sweeps: Path) -> list[Group]:
    """All groups under a folder, the latest first. Cells are counted, not read: a group may have thousands."""
    found = [_group(folder) for folder in sweeps.iterdir() if folder.is_dir()] if sweeps.is_dir() else []
    return sorted((group for group in found if group.runs), key=lambda group: (-group.at, group.name))


def _group(folder: Path) -> Group:
    done = {path.stem: path for path in folder.glob("*.json")}
    asked = {digest for path in folder.glob("*.asked") for digest in path.read_text().split()}
    times = [path.stat().st_mtime for path in [*done.values(), *folder.glob("*.asked")]]
    return Group(folder.name, _task(done), len(done), len(asked | done.keys()), max(times, default=0.0))


def _task(done: dict[str, Path]) -> str:
    """The task's name as one of the cells says it; "" where none does."""
    for path in done.values():
        try:
            return str(json.loads(path.read_bytes())["made"]["plan"]["run"]["task"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return ""
