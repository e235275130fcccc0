"""`benchmarks.device_footprint` runs, and prints the document that others read. How much it was is not asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_runs_and_the_document_has_its_shape():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.device_footprint", "--preset", "tiny", "--json"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert (made["benchmark"], made["preset"]) == ("device_footprint", "tiny")
    figures = made["figures"]
    assert 0 < figures["idle_rss_bare_mb"] < figures["idle_rss_mb"]
    assert figures["idle_cpu_percent"] >= 0
    assert figures["start_s"] > 0
    packages = {row["name"]: row["mb"] for row in made["rows"] if row["what"] == "package"}
    assert {"thinwire", "numpy", "cryptography"} <= set(packages)
    assert "torch" not in packages, "its build is the device's choice"
    assert figures["distributions"] == len(packages) - 1, "all but numpy"
    assert all(size > 0 for size in packages.values())
    assert [row["torch"] for row in made["rows"] if row["what"] != "package"] == [False, True]
