"""The document that a benchmark prints, as its own test gets it: from the tiny preset, in a forked process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.support.fork_server import run_forked
from tests.support.processes import environment

ROOT = Path(__file__).parents[2]
PATIENCE_S = 600.0  # no benchmark takes that long: it only ends a test that would hang


def document_of(benchmark: str, *words: str) -> dict[str, Any]:
    """Run `python -m benchmarks.BENCHMARK --preset tiny --json` with these further words; return what it prints."""
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", "--preset", "tiny", *words, "--json"]
    done = run_forked(command, PATIENCE_S, cwd=ROOT, env=environment())
    assert done.returncode == 0, done.stderr
    made: dict[str, Any] = json.loads(done.stdout)
    assert (made["benchmark"], made["preset"]) == (benchmark, "tiny")
    return made
