"""`benchmarks.round_overhead` runs, and prints the document that others read. How fast it was is not asserted."""

from __future__ import annotations

from pathlib import Path

from tests.support.benchmark_document import document_of

ROOT = Path(__file__).parents[2]


def test_our_side_runs_and_the_document_has_its_shape():
    made = document_of("round_overhead")
    assert set(made) == {"benchmark", "preset", "commit", "at", "machine", "rows", "figures"}
    assert {"cpu", "cores", "memory_gb", "versions"} <= set(made["machine"])
    assert {(row["side"], row["kind"]) for row in made["rows"]} == {("ours", "noop"), ("ours", "big")}
    assert all(row["seconds"] > 0 and row["round"] >= 1 for row in made["rows"])
    figures = made["figures"]
    assert {"noop_ours_s", "big_round_s", "big_peak_models", "server_cpu_ms_per_client_round"} <= set(figures)
    assert figures["requests_per_client_round"] <= 4
    assert all(isinstance(value, (int, float)) for value in figures.values())
