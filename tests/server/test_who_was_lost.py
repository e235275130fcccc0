"""A device that brings a round nothing is named by what is said of the round's time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.server_bench import Bench, scripted
from thinwire.core.events import RoundClosed, UpdateAggregated
from thinwire.core.types import ReplyHeader
from thinwire.server.aggregator import RoundAggregator
from thinwire.simulation import Behavior, ScriptedDevice
from thinwire.store.round_explanation import RoundExplanation, explain_round


def told_of(bench: Bench) -> RoundExplanation:
    (found,) = bench.store.rounds(bench.run_id)
    return explain_round(found, bench.store.updates(bench.run_id, 1))


def run_of(folder: Path, *devices: ScriptedDevice) -> Bench:
    bench = Bench(folder, devices, run={"rounds": 1}, cohort={"deadline_s": 600, "min_updates": 1})
    bench.drive()
    return bench


def test_a_device_that_died_at_work_is_named_with_the_wait_for_it(tmp_path: Path) -> None:
    dying = scripted("b", 500.0)
    dying.offline = [(40.0, 10_000.0)]
    said = told_of(run_of(tmp_path, scripted("a", 2.0), dying))
    assert said.waited_for == ("b",)
    assert said.stages["waiting"] == pytest.approx(38.0, abs=0.5)
    assert said.sentence.endswith("waited 38 s for b, which was lost.")


def test_a_device_whose_task_failed_after_all_had_answered_is_named(tmp_path: Path) -> None:
    failing = scripted(
        "b", lambda assignment: Behavior(compute_s=30.0, failure=("task-error", "ValueError in task.py:3"))
    )
    said = told_of(run_of(tmp_path, scripted("a", 2.0), failing))
    assert said.waited_for == ("b",)
    assert said.sentence.endswith("waited 28 s for b, which failed (task-error).")
    assert said.stages["waiting"] == pytest.approx(28.0, abs=0.5)


def test_a_device_that_failed_before_the_others_answered_held_nobody_up(tmp_path: Path) -> None:
    failing = scripted(
        "b", lambda assignment: Behavior(compute_s=1.0, failure=("task-error", "ValueError in task.py:3"))
    )
    said = told_of(run_of(tmp_path, scripted("a", 20.0), failing))
    assert (said.waited_for, said.device) == ((), "a")
    assert "waited 20 s for a, which" in said.sentence


def test_the_aggregation_of_earlier_replies_is_no_part_of_the_wait_for_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The aggregator adds them while devices still work: their seconds are in the stages of the last device already."""
    add = RoundAggregator.add

    def slow(aggregator: RoundAggregator, header: ReplyHeader, *more: Any) -> None:
        time.sleep(0.2 if header.update_id.device == "a" else 0.0)
        add(aggregator, header, *more)

    monkeypatch.setattr(RoundAggregator, "add", slow)
    bench = run_of(tmp_path, scripted("a", 2.0), scripted("b", 20.0))
    (first, last) = bench.events(UpdateAggregated)
    (closed,) = bench.events(RoundClosed)
    assert first.aggregate_s >= 0.2 > closed.spent["aggregate_s"] >= last.aggregate_s
