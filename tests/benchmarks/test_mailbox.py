"""`benchmarks.mailbox` runs, and prints the document that others read."""

from __future__ import annotations

from pathlib import Path

from tests.support.benchmark_document import document_of

ROOT = Path(__file__).parents[2]


def test_it_runs_and_the_document_has_its_shape():
    made = document_of("mailbox")
    assert len(made["rows"]) == 2
    assert made["figures"]["mailbox_us"] > 0
