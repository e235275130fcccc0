"""`benchmarks.sampler` runs, and prints the document that others read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_runs_and_the_document_has_its_shape():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.sampler", "--preset", "tiny", "--json"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert (made["benchmark"], made["preset"]) == ("sampler", "tiny")
    assert len(made["rows"]) == 8
    assert set(made["figures"]) == {f"ns_per_draw_{name}" for name in ("16", "256", "4096", "skellam")}
    assert all(value > 0 for value in made["figures"].values())
