"""`benchmarks.secure_support` runs, and prints the document that others read. No accuracy is asserted."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from benchmarks.secure_support import ADAM, ALONE, ARMS, DENSE, MOMENTUM, PRESETS, RATES, SPARSE, figures, plan_of
from tests.support.benchmark_document import document_of
from thinwire.aggregation import codecs

ROOT = Path(__file__).parents[2]


def test_it_runs_and_the_document_has_its_shape() -> None:
    found = document_of("secure_support")
    assert [(row["task"], row["arm"]) for row in found["rows"]] == [("digits", arm) for arm in ARMS]
    dense, sparse, alone, *_ = found["rows"]
    assert sparse["payload_up"] == pytest.approx(alone["payload_up"], rel=1e-3), "a signature has 70 to 72 bytes"
    assert sparse["payload_up"] < dense["payload_up"] / 5, "a tenth of the coordinates travels, with keys and shares"
    assert all(0 < row[name] <= 1 for row in found["rows"] for name in ("accuracy", "last"))
    assert {"support_gap", "support_gap digits", "no_residual_gap"} <= found["figures"].keys()


def test_the_gaps_are_means_over_the_seeds_and_the_larger_task_counts() -> None:
    accuracy = {("digits", DENSE): 0.9, ("digits", SPARSE): 0.875, ("digits", ALONE): 0.5, ("code_lm", DENSE): 0.75,
                ("code_lm", SPARSE): 0.625, ("code_lm", ALONE): 0.5,
                ("digits", MOMENTUM): 0.75, ("code_lm", MOMENTUM): 0.5,
                ("digits", ADAM): 0.75, ("code_lm", ADAM): 0.5}  # fmt: skip
    rows = [
        {"task": task, "arm": arm, "seed": seed, "accuracy": value + seed / 8 * (arm == DENSE), "last": value}
        for ((task, arm), value), seed in product(accuracy.items(), (0, 1))
    ]
    found = figures(rows)
    assert found["support_gap digits"] == pytest.approx(0.025 + 1 / 16)
    assert found["support_gap_error digits"] == pytest.approx(1 / 16)
    assert found["support_gap"] == found["support_gap code_lm"] == pytest.approx(0.125 + 1 / 16)
    assert found["support_gap_last digits"] == pytest.approx(0.025)


@pytest.mark.parametrize(("task", "arm"), [*product(RATES, ARMS)])
def test_the_plans_are_valid_and_differ_in_what_the_arm_says(task: str, arm: str) -> None:
    made = plan_of(task, arm, PRESETS["full"].rounds[task], 1)
    assert not made.check(codecs)
    dense, found = plan_of(task, DENSE, PRESETS["full"].rounds[task], 1).to_json(), made.to_json()
    assert {name for name in found if found[name] != dense[name]} == set(ARMS[arm])


@pytest.mark.parametrize("task", RATES)
def test_rates_and_rounds_of_the_full_preset_are_those_of_the_committed_fp32_cells(task: str) -> None:
    decided = json.loads((ROOT / "docs/evidence/cells/second" / f"{task}.json").read_text())["decisions"]
    assert RATES[task] == decided["rates"]["decided"]["identity"]
    assert PRESETS["full"].rounds[task] == decided["rounds"]["decided"]["rounds"]
