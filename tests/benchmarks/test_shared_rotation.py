"""The benchmark of shared rotations: what it says of errors holds already in its smallest preset."""

from __future__ import annotations

from pathlib import Path

from benchmarks.shared_rotation import PRESETS, measure


def test_clients_with_equal_data_err_alike_under_a_shared_rotation(tmp_path: Path) -> None:
    rows, figures = measure(PRESETS["tiny"], tmp_path)
    assert {(row["split"], row["clients"], row["bits"]) for row in rows} == {
        (split, 4, bits) for split in ("iid", "dirichlet(0.3)") for bits in (0.5, 0.1)
    }
    assert figures["error_ratio_4"] > 1
    assert set(figures) == {"error_ratio_4", "time_ratio"}
