"""A whole run against scripted devices: what it selects, why rounds close, and that a kill anywhere changes nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.crashes import Killed
from tests.support.faulty_fleet import FaultyBehavior
from tests.support.reasons import sentences
from tests.support.server_bench import (
    AROUND,
    FAILS,
    SILENT,
    Bench,
    drive_through,
    every,
    killed,
    killing,
    outcome,
    scripted,
    three,
    work,
)
from thinwire.core.events import (
    ClientFailed,
    Evaluated,
    RoundClosed,
    RoundOpened,
    RunStatusChanged,
    UpdateAccepted,
    UpdateAggregated,
    UpdateDropped,
)
from thinwire.core.fleet import Delivery
from thinwire.core.types import Assignment, ReplyHeader
from thinwire.simulation import Behavior, Script, ScriptedDevice, SyntheticUpdates
from thinwire.simulation.scripted_device import ReplyWithParts


def test_a_run_makes_its_rounds_and_measures_every_version(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three(), run={"rounds": 4})
    row = bench.drive()
    assert (row.status, row.version, row.exit_code) == ("done", 4, 0)
    assert bench.reasons() == ["all"] * 4
    assert [r.metrics["loss"] for r in bench.store.rounds(bench.run_id)] == [1.0, 2.0, 3.0, 4.0]
    assert bench.fleet.spool.headers() == [], "everything was acked"
    assert (bench.home.run(bench.run_id) / "v000004.model").exists()


def test_the_first_assignment_carries_the_model_and_later_ones_the_outcomes(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [scripted("a")], run={"rounds": 2})
    bench.drive()
    first, second, last, stop = (envelope.assignment for envelope in bench.fleet.sent)
    assert (first.kind, first.base_version, len(first.parts), first.outcomes) == ("train", 0, 1, ())
    assert [(str(v.update_id), v.outcome, v.version) for v in second.outcomes] == [
        (f"{bench.run_id}/a/1", "aggregated", 1)
    ]
    assert (last.kind, last.base_version) == ("evaluate", 2)
    assert (stop.kind, len(stop.outcomes)) == ("stop", 2)


def slow_once(assignment: Assignment) -> Behavior:
    return Behavior(compute_s=25.0 if assignment.round == 1 else 1.0)


def test_a_straggler_is_aggregated_into_the_next_round(tmp_path: Path) -> None:
    devices = [scripted("a", 20.0), *three(slow_once)[1:]]
    bench = Bench(tmp_path, devices, run={"rounds": 3}, cohort={"deadline_s": 22})
    bench.drive()
    assert bench.reasons()[0] == "deadline"
    late = [event for event in bench.events(UpdateAccepted) if event.late]
    assert [(e.device, e.assignment_round, e.round, e.staleness) for e in late] == [("c", 1, 2, 1)]
    assert late[0].discount == pytest.approx(2**-0.5)


def test_a_straggler_is_dropped_and_told_so_where_the_plan_says_drop(tmp_path: Path) -> None:
    devices = [scripted("a", 20.0), *three(slow_once)[1:]]
    bench = Bench(tmp_path, devices, run={"rounds": 3}, cohort={"deadline_s": 22, "late": "drop"})
    bench.drive()
    assert [(e.device, e.reason) for e in bench.events(UpdateDropped)] == [("c", "late")]
    told = [v for e in bench.fleet.sent if e.device == "c" for v in e.assignment.outcomes]
    assert {v.outcome for v in told if v.update_id.sequence == 1} == {"dropped"}


def test_a_silent_device_costs_one_deadline_and_is_then_passed_over(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three(lambda assignment: SILENT), run={"rounds": 4}, cohort={"deadline_s": 30})
    bench.drive()
    assert bench.reasons() == ["deadline", "all", "all", "all"]
    assert sentences(bench.events(RoundOpened)[1].reasons) == {"c": "busy with round 1"}


def test_a_silent_device_is_given_up_after_max_staleness_rounds_and_selected_again(tmp_path: Path) -> None:
    bench = Bench(
        tmp_path, three(lambda assignment: SILENT), run={"rounds": 6}, cohort={"deadline_s": 30, "max_staleness": 2}
    )
    bench.drive()
    assert bench.reasons() == ["deadline", "all", "all", "deadline", "all", "all"]
    assert [(e.device, e.kind) for e in bench.events(ClientFailed)] == [("c", "stale"), ("c", "over")]


def test_a_device_that_leaves_does_not_hold_up_the_round(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three(lambda assignment: SILENT), run={"rounds": 1}, cohort={"deadline_s": 1000})
    bench.fleet.crash("c", after_s=3.0)
    row = bench.drive()
    assert bench.reasons() == ["enough"]
    assert row.status == "done"
    assert bench.clock.now() < 20


def test_a_round_is_recorded_with_the_devices_that_came_and_went_since_the_last_one(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three(), run={"rounds": 4}, cohort={"clients": 2})
    bench.fleet.crash("c", after_s=1.5)
    bench.drive()
    opened = bench.events(RoundOpened)
    assert [e.added for e in opened] == [["a", "b", "c"], [], [], []], "a round that considers the same names nobody"
    assert [name for e in opened for name in e.removed] == ["c"]
    rows = bench.store.rounds(bench.run_id)
    assert (rows[0].considered, rows[0].not_sampled, rows[-1].considered, rows[-1].not_sampled) == (3, 1, 2, 0)


def test_a_failing_task_is_recorded_and_selected_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three(lambda assignment: FAILS), run={"rounds": 2})
    bench.drive()
    assert bench.reasons() == ["enough", "enough"]
    assert [(e.round, e.device, e.kind) for e in bench.events(ClientFailed)] == [
        (1, "c", "task-error"),
        (2, "c", "task-error"),
    ]


def test_a_device_with_another_model_is_not_selected_again(tmp_path: Path) -> None:
    other = Behavior(failure=("layout-mismatch", "w is 3x2"))
    bench = Bench(tmp_path, three(lambda assignment: other), run={"rounds": 2})
    bench.drive()
    assert bench.reasons() == ["enough", "all"]
    assert sentences(bench.events(RoundOpened)[1].reasons) == {"c": "layout-mismatch: w is 3x2"}


def test_too_few_replies_fail_the_run_after_the_retries(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [scripted("a", lambda assignment: FAILS)], run={"rounds": 5}, cohort={"retry_limit": 2})
    row = bench.drive()
    assert (row.status, row.exit_code, row.version) == ("failed", 6, 0)
    assert bench.reasons() == ["too-few"] * 3
    assert "3 rounds in a row made no step" in row.status_text


def test_a_target_ends_the_run(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three(), run={"rounds": 9, "target": {"metric": "loss", "value": 1.0}})
    row = bench.drive()
    assert (row.status, row.version) == ("done", 1)
    assert "loss reached 1 with version 0" in row.status_text


def test_a_target_stays_reached_where_the_last_model_is_worse_and_the_aggregator_dies(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three(), run={"rounds": 9, "target": {"metric": "loss", "value": 0.5}})
    with pytest.raises(Killed):
        bench.drive(on_event=killing(lambda event: isinstance(event, Evaluated) and event.version == 1))
    bench.restart()
    row = bench.drive()
    assert (row.status, row.version) == ("done", 1)
    assert "loss reached 0.5 with version 0" in row.status_text


class MeasuresTwo(SyntheticUpdates):
    """Version 2 reaches the target and no other does; by the run's own metric the first is the best."""

    def finish(self, delivery: Delivery, behavior: Behavior) -> ReplyWithParts:
        found, body = super().finish(delivery, behavior)
        assert isinstance(found, ReplyHeader)
        version = delivery.assignment.base_version
        measured = {"eval/loss": (1.0 + version, 1.0), "eval/accuracy": (0.95 if version == 2 else 0.1, 1.0)}
        return replace(found, metrics={**found.metrics, **measured}), body


@pytest.mark.parametrize("dies_at", [None, 1, 2, 3])
def test_a_run_stops_when_no_model_is_better_for_its_patience(tmp_path: Path, dies_at: int | None) -> None:
    devices = [ScriptedDevice(name, work(name, MeasuresTwo), every(1.0)) for name in "abc"]
    bench = Bench(tmp_path, devices, run={"rounds": 9, "patience": 2})
    if dies_at is not None:
        with pytest.raises(Killed):
            bench.drive(on_event=killing(lambda event: isinstance(event, Evaluated) and event.version == dies_at - 1))
        bench.restart()
    row = bench.drive()
    assert (row.status, row.version) == ("done", 3)
    assert "3 rounds of 9, because 2 evaluations brought no better loss, version 0 stays the best" in row.status_text


@pytest.mark.parametrize("ahead", [0, 2])
def test_the_version_that_reached_the_target_is_kept(tmp_path: Path, ahead: int) -> None:
    """Where rounds are opened ahead, two newer ones were made before it is measured."""
    devices = [ScriptedDevice(name, work(name, MeasuresTwo), every(1.0), overlaps=True) for name in "ab"]
    local = {"lr": 1.0, **({"overlap": {"max_delay": ahead}} if ahead else {})}
    target = {"metric": "accuracy", "value": 0.9}
    bench = Bench(tmp_path, devices, run={"rounds": 12, "target": target}, cohort={"deadline_s": 60}, local=local)
    row = bench.drive()
    assert row.status_text.endswith("reached 0.9 with version 2") and row.version == 3 + ahead
    assert (bench.home.run(bench.run_id) / "v000002.model").exists()
    assert not (bench.home.run(bench.run_id) / "v000001.model").exists()


@pytest.mark.parametrize(("keep", "kept"), [("last,best", [0, 4]), ("all", [0, 1, 2, 3, 4])])
def test_a_run_that_is_over_keeps_its_first_last_and_best_model_or_all(
    tmp_path: Path, keep: str, kept: list[int]
) -> None:
    bench = Bench(tmp_path, three(), run={"rounds": 4, "keep": keep})
    bench.drive()
    files = bench.home.run(bench.run_id).glob("*.model")
    assert sorted(path.name for path in files) == [f"v{version:06}.model" for version in kept]


def test_a_person_stops_a_run(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three(), run={"rounds": 9})
    row = bench.drive(stop=lambda: "run" if bench.clock.now() > 3.5 else None)
    assert (row.status, row.exit_code) == ("stopped", 10)
    assert bench.reasons()[-1] == "stopped"


def test_waiting_says_who_is_missing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three(), cohort={"wait_for": ["a", "d"], "wait_s": 5})
    row = bench.drive()
    assert (row.status, row.exit_code) == ("failed", 6)
    assert "waiting: 1 of 2 devices (missing d)" in row.status_text


@pytest.mark.parametrize("cohort", [{"wait_for": 9}, {"clients": 9}, {"wait_for": ["a", "d"]}])
def test_a_run_that_may_wait_for_ever_says_after_a_minute_what_can_be_done(
    tmp_path: Path, cohort: dict[str, Any]
) -> None:
    bench = Bench(tmp_path, three(), cohort=cohort)
    row = bench.drive(stop=lambda: "run" if bench.clock.now() > 90.0 else None)
    assert row.status == "stopped"
    began, *_, later = [said for said in bench.events(RunStatusChanged) if said.status == "waiting"]
    assert later.at - began.at >= 60.0
    assert later.text.startswith(f"{began.text}; start more clients, or end it: thinwire runs stop {bench.run_id}")
    assert "[cohort] wait_s" in later.text
    assert "runs stop" not in began.text


def test_a_run_whose_plan_ends_its_waiting_is_not_told_how_to(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three(), cohort={"wait_for": 9, "wait_s": 90})
    assert bench.drive().status == "failed"
    assert not [said for said in bench.events(RunStatusChanged) if "runs stop" in said.text]


def test_a_payload_that_is_not_readable_is_dropped_and_the_run_goes_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three(lambda assignment: FaultyBehavior(garbage=True)), run={"rounds": 2})
    row = bench.drive()
    assert row.status == "done"
    assert {(e.device, e.reason) for e in bench.events(UpdateDropped)} == {("c", "bad-payload")}


def steady(assignment: Assignment) -> Behavior:
    """Failures and answers of different speed, but nobody misses a deadline: only then is the order of all given."""
    return FAILS if assignment.round == 3 else Behavior(compute_s=float(assignment.round))


def straggling(assignment: Assignment) -> Behavior:
    """Late in one round, silent in another: a resumed round has open assignments, late answers and a deadline."""
    return {2: Behavior(compute_s=40.0), 4: SILENT}.get(assignment.round, Behavior())


def five_rounds(third: Script, folder: Path) -> Bench:
    devices = [scripted("a"), scripted("b", 2.0), scripted("c", third)]
    return Bench(folder, devices, run={"rounds": 5}, cohort={"deadline_s": 30})


def test_a_kill_at_any_commit_changes_nothing(tmp_path: Path) -> None:
    undisturbed = five_rounds(steady, tmp_path / "undisturbed")
    places = drive_through(undisturbed)
    assert undisturbed.store.run(undisturbed.run_id).status == "done"

    def check(bench: Bench, where: str) -> None:
        assert outcome(bench) == outcome(undisturbed), where

    killed(partial(five_rounds, steady), tmp_path, places, check)


def test_a_kill_at_any_commit_adds_nothing_twice_and_loses_nothing(tmp_path: Path) -> None:
    places = drive_through(five_rounds(straggling, tmp_path / "undisturbed"))

    def check(bench: Bench, where: str) -> None:
        assert bench.store.run(bench.run_id).status == "done"
        assert bench.store.run(bench.run_id).version == 5
        accepted = [e.update_id for e in bench.events(UpdateAccepted)]
        aggregated = [update_id for e in bench.events(RoundClosed) for update_id in e.aggregated]
        assert len(accepted) == len(set(accepted))
        assert sorted(aggregated) == sorted(accepted), where

    killed(partial(five_rounds, straggling), tmp_path, places, check, kinds=AROUND)


def test_additions_are_reported(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three(), run={"rounds": 1})
    bench.drive()
    assert len(bench.events(UpdateAggregated)) == 3
