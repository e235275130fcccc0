"""`benchmarks.stragglers` runs and prints the document that others read; how much sooner anyone was is not asserted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.curve import Curve, Point
from benchmarks.stragglers import CROWDED, POLICIES, SETTINGS, SLOW, compared, figures, speeds
from tests.support.benchmark_document import document_of

ROOT = Path(__file__).parents[2]
EVERY = (*POLICIES, CROWDED)


def test_it_runs_and_the_document_has_its_shape() -> None:
    made = document_of("stragglers")
    rows, found = made["rows"], made["figures"]
    assert {(row["policy"], row["dying"], row["exponent"]) for row in rows} == {
        (p, *s) for p in EVERY for s in SETTINGS
    }
    assert {"speedup", "speedup_all_alive", "accuracy_gap", "slow_client_gap"} <= found.keys()
    assert found["step_s"] > 0 and found["encode_s"] > 0 and found["exchange_s"] > 0


def test_speeds_are_a_seed_s_and_one_client_is_ten_times_slower() -> None:
    assert speeds(1) == speeds(1) != speeds(2)
    assert speeds(7)[SLOW] == 10.0


def in_all_settings(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"dying": dying, "exponent": exponent, "seed": 1, **row} for dying, exponent in SETTINGS for row in found]


def falling(*seconds: float) -> Curve:
    points = tuple(Point(s, 10 * (i + 1), ((i + 1.0, 4.0), (0.0, 4.0))) for i, s in enumerate(seconds))
    return Curve(points, ())


def test_a_policy_is_as_much_sooner_as_its_seconds_to_the_target_say() -> None:
    waiting, quick = falling(10, 20, 30, 40), falling(1, 2, 3, 5)
    rows = in_all_settings(compared({policy: waiting if policy == "waiting" else quick for policy in EVERY}))
    assert all(row["target"] == pytest.approx(0.98 * 0.5) for row in rows)
    found = figures(rows)
    assert (found["speedup"], found["speedup_all_alive"], found["accuracy_gap"]) == (8.0, 8.0, 0.0)


def test_who_never_gets_there_is_infinitely_later() -> None:
    waiting, never = falling(10, 20, 30, 40), falling(1)
    found = compared({policy: never if policy == "partial" else waiting for policy in EVERY})
    rows = in_all_settings(found)
    assert figures(rows)["speedup partial"] == 0.0 == figures(rows)["speedup"]


def test_what_no_limit_costs_stands_beside_the_figures_and_not_in_them() -> None:
    waiting, never = falling(10, 20, 30, 40), falling(1)
    found = figures(in_all_settings(compared({policy: never if policy == CROWDED else waiting for policy in EVERY})))
    assert (found["speedup"], found[f"speedup {CROWDED}"]) == (1.0, 0.0)
    assert found["speedup_all_alive"] == 1.0 and f"accuracy_gap {CROWDED}" in found
