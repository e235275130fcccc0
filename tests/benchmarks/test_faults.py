"""`benchmarks.faults` runs, and prints the document that others read: nothing lost, nothing doubled, the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_it_runs_and_the_document_has_its_shape() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.faults", "--preset", "tiny", "--only", "aggregator killed", "--json"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=230, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["benchmark"], found["preset"]) == ("faults", "tiny")
    assert [(row["fault"], row["struck"]) for row in found["rows"]] == [("aggregator killed", 1)]
    figures = found["figures"]
    assert (figures["lost_updates"], figures["double_folds"], figures["identical_share"]) == (0, 0, 1.0)
    assert figures["aggregator_max_recovery_s"] == figures["max_recovery_s"] > 0
