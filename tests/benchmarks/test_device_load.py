"""`benchmarks.device_load` runs, and prints the document that others read. How much it measured is not asserted."""

from __future__ import annotations

from pathlib import Path

from benchmarks.device_load import LARGE
from tests.support.benchmark_document import document_of

ROOT = Path(__file__).parents[2]


def test_it_runs_plain_and_over_tls_and_the_document_has_its_shape():
    made = document_of("device_load")
    assert set(made["figures"]) == {"flood_memory_mb", "honest_pull_ratio", "refused_signature_ms"}
    assert made["figures"]["honest_pull_ratio"] > 0
    assert [row["transport"] for row in made["rows"]] == ["plain", "tls"]
    for row in made["rows"]:
        assert sum(count for name, count in row.items() if name.startswith("flood large reply")) > 0


def test_a_large_reply_is_small_on_the_wire():
    assert 140_000 < len(LARGE) < 170_000
