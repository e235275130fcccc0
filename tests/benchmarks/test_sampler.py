"""`benchmarks.sampler` runs, and prints the document that others read."""

from __future__ import annotations

from pathlib import Path

from tests.support.benchmark_document import document_of

ROOT = Path(__file__).parents[2]


def test_it_runs_and_the_document_has_its_shape():
    made = document_of("sampler")
    assert len(made["rows"]) == 8
    assert set(made["figures"]) == {f"ns_per_draw_{name}" for name in ("16", "256", "4096", "skellam")}
    assert all(value > 0 for value in made["figures"].values())
