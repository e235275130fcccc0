"""`benchmarks.drift` runs and prints the document that a page is drawn from; who drifts less is not asserted."""

from __future__ import annotations

import pytest

from benchmarks.drift import CODECS, FEDAVG, PRESETS, SETS, figures, measure, plan_of
from thinwire.aggregation import codecs


def test_every_algorithm_runs_with_every_codec_and_scaffold_sends_twice_the_bytes() -> None:
    rows = measure(PRESETS["tiny"], 1)
    assert {(row["algorithm"], row["uplink"]) for row in rows} == {(name, codec) for name in SETS for codec in CODECS}
    found = figures(rows)
    for codec in CODECS:
        ratio = found[f"payload_up scaffold {codec}"] / found[f"payload_up {FEDAVG} {codec}"]
        assert ratio == pytest.approx(2.0, abs=0.05)


def test_a_gain_is_in_points_over_fedavg_of_the_same_seed() -> None:
    rows = [
        {"algorithm": name, "uplink": codec, "seed": seed, "loss": 1.0, "payload_up": 1, "accuracy": accuracy + 0.1 * seed}
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
