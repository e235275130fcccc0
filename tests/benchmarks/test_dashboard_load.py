"""`benchmarks.dashboard_load` runs and prints the document that others read; no time is asserted."""

from __future__ import annotations

from tests.support.benchmark_document import document_of


def test_it_runs_and_the_document_has_its_shape() -> None:
    made = document_of("dashboard_load")
    quiet, loaded = made["rows"]
    assert (quiet["loaded"], loaded["loaded"]) == (False, True)
    assert loaded["events"] > 0
    assert loaded["requests"] > 0
    assert made["figures"].keys() == {
        "request_p95_ms", "event_delay_p95_ms", "training_slowdown_percent", "lost_readers",
    }  # fmt: skip
    assert made["figures"]["lost_readers"] == 0
