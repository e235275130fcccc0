"""The benchmark of what a codec could still gain: its gains are those of cases that have a known one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.update_structure import PRESETS, B, bounds, factored, gain_of, measure


def test_it_runs_and_no_model_of_energies_gains_less_than_none(tmp_path: Path) -> None:
    rows, figures = measure(PRESETS["tiny"], tmp_path)
    updates = [row for row in rows if row["what"] == "updates"]
    assert [(row["model"], row["quarter"], row["rounds"]) for row in updates] == [
        ("digits", n, 2) for n in (1, 2, 3, 4)
    ]
    for row in updates:
        assert 1 <= row["layer_gain"] <= row["factored_gain"]  # a finer model of the same energies, known exactly
        assert row["predicted_gain"] >= 1
        assert -1 <= row["cosine"] <= 1
    assert figures["factored_gain digits"] == max(row["factored_gain"] for row in updates)


def test_a_gain_is_the_one_of_square_root_allocation() -> None:
    """Half of the values are three times as large: mean(e) / mean(sqrt(e))^2 = 5 / 4."""
    rows = np.array([[1.0, 3.0, -1.0, -3.0]])
    assert gain_of(rows, rows[0] ** 2) == pytest.approx(5 / 4)
    assert gain_of(rows, np.ones(4)) == pytest.approx(1)
    assert gain_of(rows, np.array([9.0, 1.0, 9.0, 1.0])) < 1, "a wrong guess is a loss"


def test_energies_that_are_a_product_are_factored_exactly() -> None:
    energy = np.einsum("i,j,k->ijk", [1.0, 4.0], [1.0, 2.0, 3.0], [0.5, 5.0])
    assert factored(energy) == pytest.approx(energy.reshape(-1))


def test_no_rate_of_eden_is_better_than_the_bound() -> None:
    found = [*bounds()]
    assert [row["b"] for row in found] == [float(b) for b in B]
    assert all(1 < row["bound_ratio"] < 1.6 for row in found)
