"""What `benchmarks.overlap` makes of two runs, and that it runs. How fast they were is not asserted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import processes
from benchmarks.overlap import seeds
from benchmarks.overlap.__main__ import PRESETS, figures, here, plan_of
from benchmarks.overlap.site import Took
from tests.support.benchmark_document import document_of
from tests.support.fork_server import forking
from tests.support.shaped import why_not
from thinwire.aggregation import codecs
from thinwire.core import RunPlan

ROOT = Path(__file__).parents[2]
FULL = PRESETS["full"]
PLAIN = Took(
    rounds=[30.0, 20.0, *[10.0] * 10], compute=[9.0] * 4 + [5.0] * 20, transfer=[1.0] * 4 + [4.5] * 20,
    up_bytes=1000, down_bytes=4000, busy=0.5, accuracy=0.93,
)  # fmt: skip
OVERLAPPED = replace(PLAIN, rounds=[30.0, 15.0, *[5.5] * 10], busy=0.97, accuracy=0.928)


def test_figures_are_medians_after_the_warm_up_and_the_ideal_is_of_the_run_without() -> None:
    found = figures(PLAIN, OVERLAPPED, FULL, bytes_per_s=1e6, steps=40)
    assert found["speedup"] == pytest.approx(10.0 / 5.5)
    assert found["ideal"] == pytest.approx(9.5 / 5.0)
    assert found["share_of_ideal"] == pytest.approx(10.0 / 5.5 / 1.9)
    assert (found["cpu_bound"], found["decides"]) == (True, True)
    assert found["accuracy_gap_on_lines"] == pytest.approx(0.002)


def test_short_rounds_decide_nothing() -> None:
    short = replace(PLAIN, transfer=[1.0] * 24)
    assert not figures(short, OVERLAPPED, FULL, bytes_per_s=1e6, steps=40)["decides"]


@pytest.mark.parametrize("overlap", [False, True])
def test_both_plans_can_run_and_differ_in_nothing_else(overlap: bool) -> None:
    plan = plan_of(12, 40, overlap)
    assert RunPlan.from_json(plan).check(codecs) == []
    assert plan["local"].pop("overlap", None) == ({"max_delay": 1} if overlap else None)
    assert plan == plan_of(12, 40, overlap=False)


def test_what_the_delay_costs_is_a_mean_over_seeds_of_the_same_two_plans() -> None:
    rows = [
        {"seed": seed, "uplink": codec, "delay": delay, "accuracy": 0.9 - delay * 0.001 * seed}
        for seed in (1, 2, 3)
        for codec in seeds.CODECS
        for delay in seeds.DELAYS
    ]
    found = seeds.gaps(rows)
    assert found["accuracy_gap"] == found["accuracy_gap_sparse"] == pytest.approx(0.002)
    assert found["accuracy_gap_error"] == pytest.approx(0.001 / 3**0.5)
    assert "accuracy_gap_error" not in seeds.gaps(rows[:4])


def test_with_a_delay_a_simulated_run_measures_other_models_of_the_same_plan() -> None:
    rows = [seeds.measure_one(1, "int8", delay, 3) for delay in seeds.DELAYS]
    assert rows[0]["accuracy"] != rows[1]["accuracy"]
    assert all(0.2 < row["accuracy"] < 1.0 for row in rows), rows


@pytest.mark.slow
def test_it_runs_on_machines_of_their_own_where_these_are_allowed_and_says_where_not() -> None:
    found = document_of("overlap")["figures"]
    reason = why_not()
    assert (found["shaped_by"], found.get("why_proxy", "")) == ("proxy" if reason else "netns", reason)
    assert found["speedup"] > 0


@pytest.mark.slow
def test_without_machines_of_their_own_devices_go_through_a_proxy(tmp_path: Path) -> None:
    """The aggregator counts them as there through it; nothing else is there to be selected."""
    with forking(processes), here(tmp_path / "proxied", "proxy", 1e6) as devices:
        assert (tmp_path / "proxied" / "line-device-1.log").is_file()
        assert sum(info.online for info in devices.store.devices()) == 2
