"""`benchmarks.fold` runs, and prints the document that others read. How fast it was is not asserted; memory is."""

from __future__ import annotations

from pathlib import Path

from benchmarks.fold import PRESETS
from tests.support.benchmark_document import document_of

ROOT = Path(__file__).parents[2]


def test_it_runs_and_the_document_has_its_shape():
    made = document_of("fold")
    names = {"fp16_bandwidth_share", "int8_bandwidth_share", "topk_updates_per_s", "check_ms", "peak_models"}
    assert set(made["figures"]) == names
    assert all(value > 0 for value in made["figures"].values())
    assert [row["codec"] for row in made["rows"]] == ["fp16", "int8", "topk(0.01) > int8 > rice"]
    for row in made["rows"]:
        moved = (row["payload_bytes"] + 8 * row["params"]) / row["add_ms"] / (8 * row["params"] / row["memcpy_ms"])
        assert abs(row["bandwidth_share"] / moved - 1) < 1e-4  # each has six figures


def test_a_hundred_updates_of_a_resnet_50_are_what_the_full_preset_folds():
    assert (PRESETS["full"].updates, PRESETS["full"].params) == (100, 25_557_032)
    assert PRESETS["small"].params == 25_557_032
