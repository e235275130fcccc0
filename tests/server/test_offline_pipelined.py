"""A device that is away while assignments go ahead costs what it costs without: one round, and the time until it is
back.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.server.test_crash_pipelined import ahead
from tests.support.crashes import Fate, Outcome, Whole, World, killed, undisturbed_once
from thinwire.core import RunPlan
from thinwire.core.events import RoundClosed, RoundOpened, RunStatusChanged, UpdateAccepted
from thinwire.core.types import Assignment
from thinwire.simulation import Behavior

FROM_S, UNTIL_S = 4.2, 64.2


def plan(cohort: str, rounds: int = 4, delay: int = 1) -> RunPlan:
    return RunPlan.parse(f"""
[run]
task = "toy"
rounds = {rounds}
[cohort]
deadline_s = 20
{cohort}
[local]
lr = 1.0
overlap = {{ max_delay = {delay} }}
""")


def behavior(name: str, assignment: Assignment) -> Behavior:
    seconds = {"a": 1.0, "b": 1.0, "c": 2.0}.get(name, 1.0)
    return Behavior(compute_s=seconds, upload_s=0.5) if assignment.kind == "train" else Behavior(compute_s=0.0)


def same(made: Outcome) -> dict[str, object]:
    """All that must not depend on where it was killed; by assignments, since what is assigned again to a device that
    died since may be answered twice, and is dropped the second time.
    """
    assignment_of = {e.update_id: e.assignment_id for e in made.of(UpdateAccepted)}
    return {
        **{key: made.same()[key] for key in ("status", "models", "selected")},
        "accepted": [(e.round, e.assignment_id, e.staleness, e.discount) for e in made.of(UpdateAccepted)],
        "closed": [
            (e.round, e.reason, e.version, [assignment_of[u] for u in e.aggregated]) for e in made.of(RoundClosed)
        ],
    }


ALL = plan("wait_for = 3\nmin_updates = 3\nretry_limit = 1")


def away_for_a_minute(folder: Path, fate: Fate, which: RunPlan = ALL) -> World:
    return ahead(folder, fate, which, behavior, away={"c": [(FROM_S, UNTIL_S)]})


undisturbed = undisturbed_once(away_for_a_minute)


def test_a_minute_without_a_device_costs_one_round_and_the_run_goes_on_where_it_was(
    undisturbed: Whole,
) -> None:
    made, _ = undisturbed
    assert made.status == "done"
    closed = made.of(RoundClosed)
    assert [(e.round, e.reason, len(e.aggregated)) for e in closed] == [
        (1, "all", 3), (2, "too-few", 0), (3, "all", 4), (4, "all", 3), (5, "all", 3),
    ]  # fmt: skip
    assert [e.round for e in made.of(UpdateAccepted) if e.late] == [3], "what it had not sent of round 2"
    assert made.of(RoundOpened)[2].elapsed_s < FROM_S, "round 3 was selected ahead, before the device left"
    assert closed[2].elapsed_s == pytest.approx(UNTIL_S + 2.5), "and answered by it when it was back"
    assert closed[2].seconds < 20, "its time did not run while everybody waited"
    assert not [e for e in made.of(RoundOpened) if FROM_S < e.elapsed_s < UNTIL_S]
    said = [(e.status, e.text) for e in made.of(RunStatusChanged)]
    assert ("waiting", "waiting: 2 of 3 devices") in said


def test_a_kill_after_any_commit_changes_nothing(undisturbed: Whole, tmp_path: Path) -> None:
    """The places between two commits are those of test_crash_pipelined.py: a device that is away writes no file."""
    made, places = undisturbed

    def check(again: Outcome, where: str) -> None:
        assert same(again) == same(made), where

    killed(away_for_a_minute, tmp_path, places, check, slice(None), kinds=["commit"])


def test_a_kill_while_it_waits_changes_nothing(undisturbed: Whole, tmp_path: Path) -> None:
    made, _ = undisturbed
    world = away_for_a_minute(tmp_path, Fate())
    world.dies_at = FROM_S + 20.0
    again = world.live()
    assert world.dies_at == math.inf and same(again) == same(made)


def test_wait_s_bounds_the_wait(tmp_path: Path) -> None:
    named = plan('wait_for = ["a", "b", "c"]\nmin_updates = 0.9\nwait_s = 30')
    made = away_for_a_minute(tmp_path, Fate(), named).live()
    assert made.status == "failed"
    assert "2 of 3 devices (missing c)" in made.of(RunStatusChanged)[-1].text
    assert [(e.round, e.reason) for e in made.of(RoundClosed)] == [(1, "all"), (2, "too-few"), (3, "stopped")]
    assert 30 <= made.of(RoundClosed)[-1].elapsed_s - made.of(RoundClosed)[-2].elapsed_s < 32


def test_rounds_that_were_selected_together_and_lack_the_same_device_fail_once(tmp_path: Path) -> None:
    """`wait_for` is met without it, so nobody is waited for; the rounds ahead had selected it, and were to have it."""
    most = plan("wait_for = 2\nmin_updates = 0.9\nretry_limit = 1", rounds=5, delay=3)
    made = ahead(tmp_path, Fate(), most, behavior, away={"c": [(FROM_S, 1e9)]}).live()
    assert made.status == "done"
    reasons = [e.reason for e in made.of(RoundClosed)]
    assert reasons.count("too-few") == 4 and reasons[-1] == "all"


def test_failing_rounds_still_end_a_run(tmp_path: Path) -> None:
    def failing(name: str, assignment: Assignment) -> Behavior:
        return Behavior(failure=("task-error", "x"))

    made = ahead(tmp_path, Fate(), plan("wait_for = 3\nretry_limit = 1"), failing).live()
    assert made.status == "failed"
    assert made.of(RunStatusChanged)[-1].text.startswith("2 rounds in a row made no step")


def test_who_answers_later_than_all_deadlines_is_selected_as_soon_as_it_has_answered(tmp_path: Path) -> None:
    def slow(name: str, assignment: Assignment) -> Behavior:
        return Behavior(compute_s=50.0) if assignment.kind == "train" else Behavior(compute_s=0.0)

    made = ahead(tmp_path, Fate(), plan("wait_for = 3\nmin_updates = 1", rounds=3), slow).live()
    assert made.status == "done"
    assert [round(e.elapsed_s) for e in made.of(RoundOpened)][:3] == [0, 0, 50]
