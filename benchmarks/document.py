"""The one document that a benchmark prints: what was measured, on which machine, and the figures that others quote."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

QUOTED = ("thinwire", "flwr", "numpy", "torch")
HERE = Path(__file__).parent


def document(
    benchmark: str, preset: str, rows: Sequence[Mapping[str, Any]], figures: Mapping[str, float]
) -> dict[str, Any]:
    """{benchmark, preset, commit, at, machine, rows, figures}: `rows` are single measurements, `figures` what they come
    to, all in six significant figures.
    """
    return {
        "benchmark": benchmark,
        "preset": preset,
        "commit": commit(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "rows": [{name: _short(value) for name, value in row.items()} for row in rows],
        "figures": {name: _short(value) for name, value in figures.items()},
    }


def show(made: Mapping[str, Any], as_json: bool) -> None:
    """Print it, as JSON or for a person's eyes."""
    if as_json:
        print(json.dumps(made))
        return
    about = made["machine"]
    print(f"{made['benchmark']} ({made['preset']}) on {about['cores']} x {about['cpu']}, {about['memory_gb']:.0f} GB")
    for name, value in made["figures"].items():
        print(f"  {name:34} {'not there' if value is None else format(value, ',.4g')}")


def note(text: str) -> None:
    """Progress, beside the data."""
    print(text, file=sys.stderr, flush=True)


def commit() -> str:
    """Return the commit of the code that runs, with a plus if files differ from it; "" outside a repository."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=HERE, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def machine() -> dict[str, Any]:
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(int((_field("/proc/meminfo", "MemTotal") or "0").split()[0]) / 1e6, 1),
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": {name: found for name in QUOTED if (found := _version(name))},
    }


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
