"""Who still works when a run ends has an outcome too, and it is nobody's failure."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.crashes import Killed
from tests.support.outcomes import every_assignment_has_one_outcome
from tests.support.server_bench import FAILS, SILENT, Bench, drive_through, every, killed, killing, scripted, three
from thinwire.core.errors import DataLost
from thinwire.core.events import OVER, ClientFailed, RoundClosed, RunStatusChanged
from thinwire.core.fleet import Arrival
from thinwire.core.types import Assignment
from thinwire.server.context import RunContext
from thinwire.server.service import serve
from thinwire.simulation import Behavior
from thinwire.store.round_explanation import explain_round


def untaken(bench: Bench) -> list[tuple[int, str]]:
    return [(e.round, e.device) for e in bench.events(ClientFailed) if e.kind == OVER]


def settled(bench: Bench) -> None:
    """Every assignment has its outcome, and they were recorded before the end."""
    every_assignment_has_one_outcome(bench.store, bench.run_id)
    end = bench.store.events(bench.run_id)[-1][1]
    assert isinstance(end, RunStatusChanged) and end.status in ("done", "failed", "stopped")


def slow(folder: Path, **sections: Any) -> Bench:
    """`c` works on what round 1 requested longer than the run goes on."""
    cohort = {"deadline_s": 30, **sections.pop("cohort", {})}
    return Bench(folder, three(lambda assignment: SILENT), run={"rounds": 3}, cohort=cohort, **sections)


def test_who_is_slower_than_the_run_has_an_outcome_that_is_no_failure(tmp_path: Path) -> None:
    bench = slow(tmp_path)
    assert bench.drive().failed == 0
    settled(bench)
    assert untaken(bench) == [(1, "c")]
    (row,) = [row for row in bench.store.updates(bench.run_id, 1) if row.device == "c"]
    assert (row.outcome, row.reason) == ("over", "no answer was taken before the run's end")
    assert {one.device: one.failed for one in bench.store.clients(bench.run_id)} == {"a": 0, "b": 0, "c": 0}
    first = bench.store.rounds(bench.run_id)[0]
    told = explain_round(first, bench.store.updates(bench.run_id, 1))
    assert first.failed == 0 and "1 of 3 had not replied" in told.sentence and told.waited_for == ("c",)


def test_it_is_told_that_nobody_waits(tmp_path: Path) -> None:
    bench = slow(tmp_path)
    cancelled = list[str]()
    cancel = bench.fleet.cancel

    def noted(assignment_ids: Sequence[str]) -> None:
        cancelled.extend(assignment_ids)
        cancel(assignment_ids)

    bench.fleet.cancel = noted  # type: ignore[method-assign]  # a spy
    bench.drive()
    assert cancelled[-1:] == [f"{bench.run_id}.1.c"]


SECTIONS: dict[str, dict[str, Any]] = {
    "sync": {},
    "overlap": {"local": {"lr": 1.0, "overlap": {"max_delay": 1}}},
    "buffered": {"cohort": {"mode": "buffered", "buffer": 2}},
}


@pytest.mark.parametrize("kind", SECTIONS)
def test_a_kill_at_any_commit_leaves_no_assignment_without_an_outcome_and_none_with_two(
    tmp_path: Path, kind: str
) -> None:
    def begin(folder: Path) -> Bench:
        return slow(folder, **{name: dict(keys) for name, keys in SECTIONS[kind].items()})

    whole = begin(tmp_path / "whole")
    places = drive_through(whole)
    settled(whole)
    assert untaken(whole)

    def check(again: Bench, where: str) -> None:
        settled(again)
        assert untaken(again) == untaken(whole), where

    killed(begin, tmp_path, places, check)


@pytest.mark.parametrize("kind", SECTIONS)
def test_so_have_all_who_work_when_a_person_stops_the_run(tmp_path: Path, kind: str) -> None:
    bench = slow(tmp_path, **{name: dict(keys) for name, keys in SECTIONS[kind].items()})
    assert bench.drive(stop=lambda: "run" if bench.clock.now() >= 0.5 else None).status == "stopped"
    settled(bench)
    assert {(1, name) for name in "abc"} <= set(untaken(bench))


def test_and_when_a_run_fails(tmp_path: Path) -> None:
    def fails_or_works(assignment: Assignment) -> Behavior:
        return FAILS

    devices = [scripted("a", fails_or_works), scripted("b", fails_or_works), scripted("c", every(500.0))]
    cohort = {"deadline_s": 30, "min_updates": 2, "retry_limit": 1}
    bench = Bench(tmp_path, devices, run={"rounds": 3}, cohort=cohort)
    row = bench.drive()
    settled(bench)
    assert (row.status, row.failed, untaken(bench)) == ("failed", 4, [(1, "c")])


@pytest.mark.parametrize("why_not", [DataLost("model version 1 is damaged"), RuntimeError("a defect")], ids=repr)
def test_and_when_it_cannot_go_on_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why_not: Exception
) -> None:
    bench, ending = slow(tmp_path), threading.Event()
    with pytest.raises(Killed):
        bench.drive(on_event=killing(lambda event: isinstance(event, RoundClosed)))
    bench.restart()

    def damaged(running: RunContext) -> None:
        raise why_not

    def nothing_left_to_do(wait_s: float) -> list[Arrival]:
        ending.set()
        return []

    monkeypatch.setattr(RunContext, "begin", damaged)
    monkeypatch.setattr(bench.fleet, "poll", nothing_left_to_do)
    serve(bench.fleet, bench.store, bench.home, clock=bench.clock, ending=ending)
    assert bench.store.run(bench.run_id).status == "failed"
    settled(bench)
    assert untaken(bench) == [(1, "c")]


def test_a_device_cannot_say_that_the_run_is_over(tmp_path: Path) -> None:
    bench = Bench(tmp_path, three(lambda assignment: Behavior(failure=(OVER, "so it says"))), run={"rounds": 1})
    assert bench.drive().failed == 1
    settled(bench)
    assert [(e.device, e.kind) for e in bench.events(ClientFailed)] == [("c", "protocol")]
