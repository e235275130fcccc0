"""`benchmarks.device_api` runs, and prints the document that others read. How fast it was is not asserted; bytes
are.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.benchmark_document import document_of

ROOT = Path(__file__).parents[2]


def test_it_runs_and_keeps_to_the_bytes_that_are_promised():
    made = document_of("device_api")
    figures = made["figures"]
    assert all(figures[name] > 0 for name in ("handshakes_per_s", "requests_per_s", "reconnect_20_s"))
    assert figures["cpu_ms_per_client_round"] >= 0
    assert 0 < figures["wire_bytes_per_client_round"] <= 2048
    assert 0 < figures["idle_bytes_per_day"] <= 1_000_000
    assert {row["what"] for row in made["rows"]} >= {"handshakes", "requests", "round", "quiet poll"}
