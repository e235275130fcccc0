"""`benchmarks.simulation` runs, and prints the document that others read. How fast it was is not asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.throwaway import NotInstallable, made

ROOT = Path(__file__).parents[2]


def test_it_runs_and_the_document_has_its_shape() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.simulation", "--preset", "tiny", "--json"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["benchmark"], found["preset"]) == ("simulation", "tiny")
    assert {row["case"] for row in found["rows"]} == {"few", "many", "mlp"}
    assert found["figures"]["client_rounds_per_s"] > 0
    assert found["figures"]["peak_mb"] > 1
    assert found["figures"]["load_before"] >= 0
    assert "sim_ratio" not in found["figures"], "nothing to compare with"


def test_what_cannot_be_installed_says_why(tmp_path: Path) -> None:
    with pytest.raises(NotInstallable):
        made(tmp_path / "env", str(tmp_path / "there-is-no-such-wheel.whl"))
