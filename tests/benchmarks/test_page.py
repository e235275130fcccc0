"""`benchmarks.page` runs, and prints the document that others read. How fast it was is not asserted."""

from __future__ import annotations

from tests.support.benchmark_document import document_of


def test_it_visits_the_page_of_a_run_and_the_document_has_its_figures():
    made = document_of("page")
    (row,) = made["rows"]
    assert row["run"] == "wide"
    assert set(made["figures"]) == {
        "cold_first_curve_ms", "first_load_kb", "frame_p95_ms", "live_core_share", "js_heap_mb", "query_p95_ms",
        "dashboard_rss_mb", "runs_show_why_s",
    }  # fmt: skip
    assert row["requests"] < 10, "page, script, styles, theme, icon, stream and one read"
    assert made["figures"]["first_load_kb"] < 150
