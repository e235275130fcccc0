"""`benchmarks.endurance` runs, and prints the document that others read. How fast it was is not asserted."""

from __future__ import annotations

from pathlib import Path

from tests.support.benchmark_document import document_of

ROOT = Path(__file__).parents[2]
FIGURES = {
    "server_cpu_ms_per_client_round", "restart_s", "restart_mb", "store_bytes", "rss_bytes", "unaccounted_share",
    "run_to_first_round_s", "cli_list_s", "sim_overhead_ms", "sim_cpu_ms", "aggregator_ready_s",
}  # fmt: skip


def test_it_runs_and_the_document_has_its_shape() -> None:
    found = document_of("endurance")
    assert {row["part"] for row in found["rows"]} == {"live", "long", "real", "sim"}
    assert found["figures"].keys() >= FIGURES
    assert all(isinstance(value, int | float) for value in found["figures"].values())
    assert found["figures"]["client_rounds"] == 12, "every reply of every repeated round was recorded"
