"""`benchmarks.several_runs` runs and prints the document that others read; how much sooner runs end is not asserted."""

from __future__ import annotations

from tests.support.benchmark_document import document_of


def test_it_runs_and_the_document_has_its_shape() -> None:
    made = document_of("several_runs")
    (row,) = made["rows"]
    assert {"seed", "alone_s", "together_s", "equal", "weighted"} == row.keys()
    assert made["figures"].keys() == {"speedup", "fairness"}
    assert row["together_s"] <= row["alone_s"], "on a virtual clock this is no measurement"
