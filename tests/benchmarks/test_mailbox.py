"""`benchmarks.mailbox` runs, and prints the document that others read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_runs_and_the_document_has_its_shape():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.mailbox", "--preset", "tiny", "--json"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert (made["benchmark"], made["preset"]) == ("mailbox", "tiny")
    assert len(made["rows"]) == 2
    assert made["figures"]["mailbox_us"] > 0
