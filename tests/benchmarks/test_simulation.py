"""`benchmarks.simulation` runs, and prints the document that others read. How fast it was is not asserted."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.throwaway import NotInstallable, made
from tests.support.benchmark_document import document_of

ROOT = Path(__file__).parents[2]


def test_it_runs_and_the_document_has_its_shape() -> None:
    found = document_of("simulation")
    assert {row["case"] for row in found["rows"]} == {"few", "many", "mlp"}
    assert found["figures"]["client_rounds_per_s"] > 0
    assert found["figures"]["peak_mb"] > 1
    assert found["figures"]["load_before"] >= 0
    assert "sim_ratio" not in found["figures"], "nothing to compare with"


def test_what_cannot_be_installed_says_why(tmp_path: Path) -> None:
    with pytest.raises(NotInstallable):
        made(tmp_path / "env", str(tmp_path / "there-is-no-such-wheel.whl"))
