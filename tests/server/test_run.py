"""A whole run against scripted devices: what it asks, why rounds close, and that a kill anywhere changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from tests.server.scripted import LAYOUT, REPORT, Device, Script, ScriptedFleet
from thinwire.core import RunPlan, VirtualClock
from thinwire.core.events import (
    ClientFailed,
    Event,
    RoundClosed,
    RoundOpened,
    UpdateAccepted,
    UpdateDropped,
    UpdateFolded,
)
from thinwire.core.home import AggregatorHome
from thinwire.core.types import Ask, Failure, ReplyHead
from thinwire.server.run import drive
from thinwire.server.submit import submit
from thinwire.store import MeasureRow, RunRow, Store

T = TypeVar("T", bound=Event)


class Bench:
    """A store, a clock and a queue with one run in it."""

    def __init__(self, folder: Path, devices: list[Device], **sections: Any) -> None:
        self.home = AggregatorHome.under(folder)
        self.store = Store.open(self.home.database)
        self.clock = VirtualClock()
        self.fleet = ScriptedFleet(self.clock, devices)
        sections["run"] = {"task": "toy", **sections.get("run", {})}
        sections["cohort"] = {"wait_for": len(devices), **sections.get("cohort", {})}
        plan = RunPlan.from_json({"local": {"lr": 1.0}, "uplink": {"codec": "topk(0.1) > int8"}, **sections})
        params = np.zeros(LAYOUT.size, np.float32)
        self.run_id = submit(self.store, self.home, plan, LAYOUT, params, np.zeros(0, np.float32), {}, REPORT)

    def drive(self, **more: object) -> RunRow:
        return drive(
            self.run_id, store=self.store, fleet=self.fleet, home=self.home, clock=self.clock, **more  # type: ignore[arg-type]
        )  # fmt: skip

    def events(self, kind: type[T]) -> list[T]:
        return [event for _, event in self.store.events(self.run_id) if isinstance(event, kind)]

    def reasons(self) -> list[str]:
        return [event.reason for event in self.events(RoundClosed)]


def three(script: Callable[[Ask], float | Failure | None] = lambda ask: 1.0) -> list[Device]:
    return [Device("a"), Device("b"), Device("c", script)]


def test_a_run_makes_its_rounds_and_measures_every_version(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three(), run={"rounds": 4})
    row = bench.drive()
    assert (row.status, row.version, row.exit_code) == ("done", 4, 0)
    assert bench.reasons() == ["all"] * 4
    assert [r.metrics["loss"] for r in bench.store.rounds(bench.run_id)] == [1.0, 2.0, 3.0, 4.0]
    assert bench.fleet.spooled == {}, "everything was acked"
    assert (bench.home.run(bench.run_id) / "v000004.model").exists()


def test_the_first_ask_carries_the_model_and_later_ones_the_verdicts(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [Device("a")], run={"rounds": 2})
    bench.drive()
    first, second, last, stop = (envelope.ask for envelope in bench.fleet.sent)
    assert (first.kind, first.base_version, len(first.parts), first.verdicts) == ("train", 0, 1, ())
    assert [(str(v.update_id), v.outcome, v.version) for v in second.verdicts] == [(f"{bench.run_id}/a/1", "folded", 1)]
    assert (last.kind, last.base_version) == ("evaluate", 2)
    assert (stop.kind, len(stop.verdicts)) == ("stop", 2)


def test_a_straggler_is_folded_into_the_next_round(tmp_path: Path) -> None:
    slow_once: Callable[[Ask], float] = lambda ask: 25.0 if ask.round == 1 else 1.0  # noqa: E731
    bench = Bench(
        tmp_path, [Device("a", lambda ask: 20.0), *three(slow_once)[1:]], run={"rounds": 3}, cohort={"deadline_s": 22}
    )
    bench.drive()
    assert bench.reasons()[0] == "deadline"
    late = [event for event in bench.events(UpdateAccepted) if event.late]
    assert [(e.device, e.asked_round, e.round, e.staleness) for e in late] == [("c", 1, 2, 1)]
    assert late[0].discount == pytest.approx(2**-0.5)


def test_a_straggler_is_dropped_and_told_so_where_the_plan_says_drop(tmp_path: Path) -> None:
    slow_once: Callable[[Ask], float] = lambda ask: 25.0 if ask.round == 1 else 1.0  # noqa: E731
    devices = [Device("a", lambda ask: 20.0), *three(slow_once)[1:]]
    bench = Bench(tmp_path, devices, run={"rounds": 3}, cohort={"deadline_s": 22, "late": "drop"})
    bench.drive()
    assert [(e.device, e.reason) for e in bench.events(UpdateDropped)] == [("c", "late")]
    told = [v for e in bench.fleet.sent if e.device == "c" for v in e.ask.verdicts]
    assert {v.outcome for v in told if v.update_id.sequence == 1} == {"dropped"}


def test_a_silent_device_costs_one_deadline_and_is_then_passed_over(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three(lambda ask: None), run={"rounds": 4}, cohort={"deadline_s": 30})
    bench.drive()
    assert bench.reasons() == ["deadline", "all", "all", "all"]
    assert bench.events(RoundOpened)[1].reasons == {"c": "busy with round 1"}


def test_a_silent_device_is_given_up_after_max_staleness_rounds_and_asked_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three(lambda ask: None), run={"rounds": 6}, cohort={"deadline_s": 30, "max_staleness": 2})
    bench.drive()
    assert bench.reasons() == ["deadline", "all", "all", "deadline", "all", "all"]
    assert [(e.device, e.kind) for e in bench.events(ClientFailed)] == [("c", "stale")]


def test_a_device_that_leaves_does_not_hold_up_the_round(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three(lambda ask: None), run={"rounds": 1}, cohort={"deadline_s": 1000})
    bench.fleet.lose("c", after_s=3.0)
    row = bench.drive()
    assert bench.reasons() == ["enough"]
    assert row.status == "done"
    assert bench.clock.now() < 20


def test_a_failing_task_is_recorded_and_asked_again(tmp_path: Path) -> None:
    fails: Callable[[Ask], float | Failure] = lambda ask: Failure("task-error", "ValueError in task.py:3", "")  # noqa: E731
    bench = Bench(tmp_path, three(fails), run={"rounds": 2})
    bench.drive()
    assert bench.reasons() == ["enough", "enough"]
    assert [(e.round, e.device, e.kind) for e in bench.events(ClientFailed)] == [
        (1, "c", "task-error"),
        (2, "c", "task-error"),
    ]


def test_a_device_with_another_model_is_not_asked_again(tmp_path: Path) -> None:
    other: Callable[[Ask], float | Failure] = lambda ask: Failure("layout-mismatch", "w is 3x2", "")  # noqa: E731
    bench = Bench(tmp_path, three(other), run={"rounds": 2})
    bench.drive()
    assert bench.reasons() == ["enough", "all"]
    assert bench.events(RoundOpened)[1].reasons == {"c": "layout-mismatch: w is 3x2"}


def test_too_few_replies_fail_the_run_after_the_retries(tmp_path: Path) -> None:
    nobody: Callable[[Ask], float | Failure] = lambda ask: Failure("task-error", "x", "")  # noqa: E731
    bench = Bench(tmp_path, [Device("a", nobody)], run={"rounds": 5}, cohort={"retry_limit": 2})
    row = bench.drive()
    assert (row.status, row.exit_code, row.version) == ("failed", 6, 0)
    assert bench.reasons() == ["too-few"] * 3


def test_a_target_ends_the_run(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three(), run={"rounds": 9, "target": {"metric": "accuracy", "value": 0.5}})
    row = bench.drive()
    assert (row.status, row.version) == ("done", 1)
    assert "accuracy reached 0.5" in row.status_text


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


def test_a_payload_that_cannot_be_read_is_dropped_and_the_run_goes_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three(), run={"rounds": 2})
    good = bench.fleet.devices[2].reply

    def broken(ask: Ask) -> tuple[ReplyHead, list[bytes]]:
        head, frames = good(ask)
        return head, [frame[:-3] for frame in frames]

    bench.fleet.devices[2].reply = broken  # type: ignore[method-assign]  # this device lies
    row = bench.drive()
    assert row.status == "done"
    assert {(e.device, e.reason.split(":")[0]) for e in bench.events(UpdateDropped)} == {("c", "bad-payload")}


class Killed(BaseException):
    """The process is gone: nothing after this line runs."""


def steady(ask: Ask) -> float | Failure:
    """Failures and answers of different speed, but nobody misses a deadline: only then is the order of all given."""
    return Failure("task-error", "x", "") if ask.round == 3 else float(ask.round)


def straggling(ask: Ask) -> float | None:
    """Late in one round, silent in another: a resumed round has open asks, late answers and a deadline."""
    return {2: 40.0, 4: None}.get(ask.round, 1.0)


def outcome(bench: Bench) -> tuple[object, ...]:
    rounds = [(e.round, e.reason, e.version, e.folded, e.dropped) for e in bench.events(RoundClosed)]
    return bench.store.run(bench.run_id).model_digest, rounds


def run_killed_at(folder: Path, at: int, before: bool, third: Script) -> tuple[Bench, int]:
    """A run whose process dies at its `at`-th commit, before or after it, and is started again."""
    devices = [Device("a"), Device("b", lambda ask: 2.0), Device("c", third)]
    bench = Bench(folder, devices, run={"rounds": 5}, cohort={"deadline_s": 30})
    return bench, drive_killed_at(bench, at, before)


def drive_killed_at(bench: Bench, at: int, before: bool) -> int:
    """Drive a run to its end with one kill around its `at`-th commit (0: none); gives how many commits there were."""
    commits, record = 0, bench.store.record

    def counted(run_id: str, events: Sequence[Event], measured: Sequence[MeasureRow] = ()) -> None:
        nonlocal commits
        commits += 1
        if commits == at and before:
            raise Killed
        record(run_id, events, measured)
        if commits == at:
            raise Killed

    bench.store.record = counted  # type: ignore[method-assign]  # the kill
    try:
        bench.drive()
    except Killed:
        bench.fleet = bench.fleet.restart()
        bench.drive()
    return commits


def test_a_kill_at_any_commit_changes_nothing(tmp_path: Path) -> None:
    undisturbed, commits = run_killed_at(tmp_path / "undisturbed", 0, False, steady)
    assert undisturbed.store.run(undisturbed.run_id).status == "done"
    for at in range(1, commits + 1):
        for before in (True, False):
            bench, _ = run_killed_at(tmp_path / f"{at}-{before}", at, before, steady)
            assert outcome(bench) == outcome(undisturbed), f"killed {'before' if before else 'after'} commit {at}"
            bench.store.close()


def test_a_kill_at_any_commit_folds_nothing_twice_and_loses_nothing(tmp_path: Path) -> None:
    _, commits = run_killed_at(tmp_path / "undisturbed", 0, False, straggling)
    for at in range(1, commits + 1):
        for before in (True, False):
            bench, _ = run_killed_at(tmp_path / f"{at}-{before}", at, before, straggling)
            assert bench.store.run(bench.run_id).status == "done"
            assert bench.store.run(bench.run_id).version == 5
            accepted = [e.update_id for e in bench.events(UpdateAccepted)]
            folded = [update_id for e in bench.events(RoundClosed) for update_id in e.folded]
            assert len(accepted) == len(set(accepted))
            assert sorted(folded) == sorted(accepted), f"killed {'before' if before else 'after'} commit {at}"
            bench.store.close()


def test_folds_are_reported(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three(), run={"rounds": 1})
    bench.drive()
    assert len(bench.events(UpdateFolded)) == 3
