"""`benchmarks.drift`, which a page is drawn from; who drifts less is not asserted."""

from __future__ import annotations

import pytest

from benchmarks.drift import CODECS, FEDAVG, SETS, figures, measure_one, plan_of
from thinwire.aggregation import codecs


def test_scaffold_sends_twice_the_bytes() -> None:
    plain, corrected = (measure_one(name, "stc(0.04)", 2, 1) for name in (FEDAVG, "scaffold"))
    assert 0.0 < plain["accuracy"] < 1.0
    assert corrected["payload_up"] / plain["payload_up"] == pytest.approx(2.0, abs=0.05)


def test_a_gain_is_in_points_over_fedavg_of_the_same_seed() -> None:
    rows = [
        {
            "algorithm": name,
            "uplink": codec,
            "seed": seed,
            "loss": 1.0,
            "payload_up": 1,
            "accuracy": accuracy + 0.1 * seed,
        }
        for codec in CODECS
        for seed in (1, 2)
        for name, accuracy in ((FEDAVG, 0.5), *((other, 0.5 + 0.01 * seed) for other in SETS if other != FEDAVG))
    ]
    found = figures(rows)
    assert found["gain scaffold identity"] == pytest.approx(1.5)
    assert found["gain_error scaffold identity"] == pytest.approx(0.5)
    assert f"gain {FEDAVG} identity" not in found


def test_the_plans_are_ones_that_a_user_may_run() -> None:
    for name in SETS:
        assert not plan_of(name, "stc(0.04)", 30, 1).check(codecs)
