"""Devices that lie: what one of them says moves nobody else's update, and no run ends by it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.crashes import Killed
from tests.support.faulty_fleet import told_of
from tests.support.server_bench import (
    LAYOUT,
    SILENT,
    Bench,
    ToldFleet,
    drive_through,
    killed,
    killing,
    outcome,
    scripted,
    work,
)
from thinwire.core.equipment import Equipment
from thinwire.core.errors import TooFewClients
from thinwire.core.events import (
    ClientFailed,
    DeviceOffline,
    DeviceOnline,
    Event,
    RoundClosed,
    RoundOpened,
    StateLost,
    UpdateAccepted,
    UpdateDropped,
)
from thinwire.core.fleet import ClientConnected, ClientDisconnected, Delivery, Hello
from thinwire.core.types import Assignment, Part, Reply, ReplyHeader, UpdateId
from thinwire.server.command_queue import CommandQueue
from thinwire.server.recording_fleet import RecordingFleet
from thinwire.server.state.assignment_ledger import MAX_KEPT
from thinwire.server.state.run_state import RunState
from thinwire.simulation import Behavior, LocalLink, ScriptedDevice, SyntheticUpdates

Lie = Callable[[Assignment, ReplyHeader], ReplyHeader]


@dataclass
class Liar(SyntheticUpdates):
    """Says what `lie` makes of its honest head, with the honest frames."""

    lie: Lie = lambda assignment, header: header

    def finish(self, delivery: Delivery, behavior: Behavior) -> tuple[Reply, bytes]:
        header, body = super().finish(delivery, behavior)
        assert isinstance(header, ReplyHeader)
        return (self.lie(delivery.assignment, header) if delivery.assignment.kind == "train" else header), body


def liar(name: str, lie: Lie) -> ScriptedDevice:
    return scripted(name, does=work(name, Liar, lie=lie))


def test_an_answer_to_anothers_assignment_does_not_stand_for_it(tmp_path: Path) -> None:
    steal = liar("a", lambda assignment, header: replace(header, assignment_id=header.assignment_id[:-1] + "b"))
    bench = Bench(tmp_path, [steal, scripted("b", 5.0)], run={"rounds": 2}, cohort={"deadline_s": 9})
    assert bench.drive().status == "done"
    assert {e.device for e in bench.events(UpdateAccepted)} == {"b"}
    assert bench.events(UpdateDropped) == []
    assert bench.fleet.spool.headers() == []


def test_answers_to_assignments_that_nobody_made_are_not_aggregated(tmp_path: Path) -> None:
    made_up = iter(("digits-1.1.a", "x", "", "toy-1.99.a", "a.b.c.d", "toy-1.-1.a"))
    invent = liar("a", lambda assignment, header: replace(header, assignment_id=next(made_up, "toy-1.7e3.a")))
    bench = Bench(tmp_path, [invent, scripted("b")], run={"rounds": 3}, cohort={"deadline_s": 9})
    assert bench.drive().status == "done"
    assert {e.device for e in bench.events(UpdateAccepted)} == {"b"}


def test_one_assignment_is_answered_once_also_in_later_rounds_and_fills_no_journal(tmp_path: Path) -> None:
    said = list[tuple[ReplyHeader, bytes]]()

    class Flooding(SyntheticUpdates):
        def finish(self, delivery: Delivery, behavior: Behavior) -> tuple[Reply, bytes]:
            header, body = super().finish(delivery, behavior)
            if isinstance(header, ReplyHeader) and delivery.assignment.kind == "train":
                said.append((header, body))
            return header, body

    flood = work("a", Flooding)

    class Flooded(ToldFleet):
        def ack(self, update_ids: Sequence[UpdateId]) -> None:
            super().ack(update_ids)
            for header, body in said * 20 if flood.sequence < 400 else ():
                flood.sequence += 1
                again = replace(header, update_id=UpdateId(header.update_id.run, "a", flood.sequence))
                self.receive(cast(LocalLink, self.devices["a"].link), again, body)

    devices = [scripted("a", does=flood), scripted("b", 2.0)]
    bench = Bench(tmp_path, devices, Flooded, run={"rounds": 4})
    assert bench.drive().status == "done"
    aggregated = [e.assignment_id for e in bench.events(UpdateAccepted) if e.device == "a"]
    assert len(aggregated) == len(set(aggregated)) == 4
    assert len(bench.events(UpdateDropped)) <= 4 * 4
    assert bench.fleet.spool.headers() == []


def test_a_device_that_says_it_began_again_is_recorded_with_the_update_that_says_so(tmp_path: Path) -> None:
    forgot = liar("a", lambda assignment, header: replace(header, lost="older" if assignment.round == 2 else ""))
    bench = Bench(tmp_path, [forgot, scripted("b")], run={"rounds": 3})
    assert bench.drive().status == "done"
    (lost,) = bench.events(StateLost)
    (told,) = [e for e in bench.events(UpdateAccepted) if e.update_id == lost.update_id]
    assert (lost.round, lost.device, lost.why, told.assignment_round) == (2, "a", "older", 2)


def test_a_model_that_does_not_exist_yet_is_no_base(tmp_path: Path) -> None:
    ahead = liar("a", lambda assignment, header: replace(header, base_version=10**6))
    bench = Bench(tmp_path, [ahead, scripted("b", 2.0)], run={"rounds": 2})
    assert bench.drive().status == "done"
    assert {(e.device, e.kind) for e in bench.events(ClientFailed)} == {("a", "base-mismatch")}
    assert bench.reasons() == ["enough", "enough"], "nobody waits for its deadline"


def test_an_answer_without_frames_is_a_failure_and_not_waited_for(tmp_path: Path) -> None:
    empty = liar("a", lambda assignment, header: replace(header, parts=()))
    bench = Bench(tmp_path, [empty, scripted("b", 2.0)], run={"rounds": 3})
    assert bench.drive().status == "done"
    assert [(e.round, e.device, e.kind) for e in bench.events(ClientFailed)] == [(1, "a", "protocol")]
    assert all(e.seconds < 3 for e in bench.events(RoundClosed))


def test_frames_that_are_not_there_cost_only_their_own_update(tmp_path: Path) -> None:
    names = iter(("../../../etc", "buffers", "frame/1", "frame/0/../1"))
    odd = liar(
        "a",
        lambda assignment, header: replace(
            header, parts=tuple(Part(next(names), p.length, p.sha256) for p in header.parts)
        ),
    )
    bench = Bench(tmp_path, [odd, scripted("b")], run={"rounds": 4})
    assert bench.drive().status == "done"
    assert [e.reason for e in bench.events(UpdateDropped)] == ["bad-payload"] * 4


def test_a_resume_survives_the_loss_of_a_device_that_answers_an_earlier_round(tmp_path: Path) -> None:
    """The device is busy with round 1 and leaves in round 2, in which it was not selected; then the aggregator dies."""
    devices = [
        scripted("a", 4.0),
        scripted("b", 4.0),
        scripted("c", lambda assignment: SILENT if assignment.round == 1 else Behavior()),
    ]
    bench = Bench(tmp_path, devices, run={"rounds": 3}, cohort={"deadline_s": 6})
    bench.fleet.crash("c", 7.0)
    with contextlib.suppress(Killed):
        bench.drive(on_event=killing(lambda e: isinstance(e, ClientFailed) and e.device == "c"))
    assert bench.store.run(bench.run_id).status == "running"
    bench.restart()
    assert bench.drive().status == "done"


def test_what_was_in_time_is_in_time_when_it_is_added_again(tmp_path: Path) -> None:
    """The journal notes an answer a moment after it was judged; that moment may lie beyond the deadline."""
    silent = scripted("b", lambda assignment: SILENT)
    bench = Bench(tmp_path, [scripted("a"), silent], run={"rounds": 1}, cohort={"deadline_s": 6})
    record = bench.store.record

    def slow(run_id: str, events: Sequence[Event], *more: Any, **named: Any) -> None:
        late = [replace(e, elapsed_s=99.0) if isinstance(e, UpdateAccepted) else e for e in events]
        record(run_id, late, *more, **named)

    bench.store.record = slow  # type: ignore[method-assign]  # a disk that stood still
    with contextlib.suppress(Killed):
        bench.drive(on_event=killing(lambda e: isinstance(e, UpdateAccepted)))
    bench.store.record = record  # type: ignore[method-assign]  # quick again
    bench.restart()
    bench.drive()
    (closed,) = bench.events(RoundClosed)
    assert (len(closed.aggregated), closed.outstanding) == (1, ["b"])
    assert len(bench.events(UpdateAccepted)) == 1


def test_devices_that_hang_all_at_once_end_the_run_with_a_reason(tmp_path: Path) -> None:
    """They stay connected and never answer, so nothing but time tells that they never will."""
    bench = Bench(tmp_path, [scripted("a", lambda assignment: SILENT)], run={"rounds": 3}, cohort={"deadline_s": 5})
    row = bench.drive()
    assert (row.status, row.exit_code) == ("failed", TooFewClients.exit_code)
    assert bench.reasons() == ["too-few"] * 4
    assert {e.kind for e in bench.events(ClientFailed)} == {"stale", "over"}
    assert bench.clock.now() < 4 * 5 * 8


def test_a_lone_device_that_needs_several_deadlines_is_waited_for(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [scripted("a", 17.0)], run={"rounds": 2}, cohort={"deadline_s": 5})
    assert bench.drive().status == "done"
    assert all(e.late for e in bench.events(UpdateAccepted))


def giant(name: str) -> ScriptedDevice:
    """Every number of its change is finite, and its weight makes the sum infinite."""
    return scripted(name, does=SyntheticUpdates(name, LAYOUT, 3e36, examples=1000, steps=5))


def test_an_update_that_makes_the_sum_infinite_is_dropped_and_the_others_count(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "giant", [giant("a"), scripted("b")], run={"rounds": 3}, cohort={"min_updates": 0.5})
    assert bench.drive().status == "done"
    assert [(e.device, e.reason, e.detail) for e in bench.events(UpdateDropped)] == [
        ("a", "bad-payload", "numbers too large to be added")
    ] * 3
    assert [len(e.aggregated) for e in bench.events(RoundClosed)] == [1, 1, 1]
    alone = Bench(tmp_path / "alone", [scripted("b")], run={"rounds": 3})
    assert bench.store.run(bench.run_id).model_digest == alone.drive().model_digest
    assert {outcome.outcome for outcome in told_of([bench.fleet.devices["a"]]).values()} == {"dropped"}


def test_a_kill_at_any_commit_changes_nothing_where_a_sum_is_infinite(tmp_path: Path) -> None:
    """The first two of three are enough, and one of them is dropped when its round ends."""

    def begin(folder: Path) -> Bench:
        devices = giant("a"), scripted("b", 1.3), scripted("c", 4.0)
        return Bench(folder, devices, run={"rounds": 2}, cohort={"clients": 2, "over_select": 0.5, "min_updates": 1})

    undisturbed = begin(tmp_path / "undisturbed")
    places = drive_through(undisturbed)
    assert {e.device for e in undisturbed.events(UpdateDropped)} == {"a"}

    def check(made: Bench, where: str) -> None:
        assert outcome(made) == outcome(undisturbed), where

    killed(begin, tmp_path, places, check)


def test_where_too_few_are_left_no_step_is_made(tmp_path: Path) -> None:
    bench = Bench(tmp_path, [giant("a"), scripted("b")], run={"rounds": 3}, cohort={"min_updates": 2, "retry_limit": 1})
    assert bench.drive().exit_code == TooFewClients.exit_code
    assert bench.reasons() == ["too-few", "too-few"]


def test_what_is_remembered_of_a_run_does_not_grow_with_its_rounds() -> None:
    past = RunState()
    for number in range(1, 3 * MAX_KEPT):
        assignment_id = f"toy-1.{number}.a"
        past.apply(RoundOpened(0.0, number, 0.0, 0, "", ["a"], {"a": assignment_id}, "identity", 60.0, 1, 1))
        update = f"toy-1/a/{number}"
        past.apply(UpdateAccepted(0.0, number, number, "a", assignment_id, update, 0, 1.0, False, 0.0, {}))
        past.apply(RoundClosed(0.0, number, "all", number, [update], [], [], 0.0, 0.0, {}))
    ledger, newest = past.ledger, f"toy-1.{number}.a"
    assert len(ledger.rounds) == len(ledger.outcomes.of("a", most=3 * MAX_KEPT)) == MAX_KEPT
    assert (found := ledger.find(newest, "a")) is not None and found.round == number
    assert ledger.find("toy-1.1.a") is ledger.find(newest, "b") is None
    assert ledger.is_forgotten("toy-1.1.a") and not ledger.is_forgotten(newest)
    assert ledger.is_decided(UpdateId.parse("toy-1/a/1")) and ledger.is_decided(UpdateId.parse(update))
    assert not ledger.is_decided(UpdateId.parse(f"toy-1/a/{number + 1}"))
    assert ledger.outcomes.of("a", most=7)[-1].update_id.sequence == number


def test_of_the_rounds_whose_replies_no_longer_count_only_those_that_are_open_are_kept() -> None:
    past = RunState(kept=3)
    for number in range(1, 100):
        assignments = {device: f"toy-1.{number}.{device}" for device in ("a", "b")}
        past.apply(RoundOpened(0.0, number, 0.0, number - 1, "", ["a", "b"], assignments, "identity", 60.0, 1, 1))
        update = f"toy-1/a/{number}"
        past.apply(UpdateAccepted(0.0, number, number, "a", assignments["a"], update, 0, 1.0, False, 0.0, {}))
        if number != 50:
            past.apply(ClientFailed(0.0, number, "b", assignments["b"], "stale", "", 0.0))
        past.apply(RoundClosed(0.0, number, "all", number, [update], [], [], 0.0, 0.0, {}))
        assert len(past.ledger.rounds) <= (5 if number <= 50 else number - 45), number
    assert [assigned.assignment_id for assigned in past.ledger.unresolved] == ["toy-1.50.b"]
    past.apply(ClientFailed(0.0, 99, "b", "toy-1.50.b", "stale", "", 0.0))
    past.apply(RoundOpened(0.0, 100, 0.0, 99, "", ["a"], {}, "identity", 60.0, 1, 1))
    assert len(past.ledger.rounds) <= 5


def test_a_device_whose_equipment_changes_with_each_hello_comes_online_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each such hello reaches the runs; as a row of the journal it would let a device fill the disk."""
    bench = Bench(tmp_path, [scripted("a")])
    fleet = RecordingFleet(bench.fleet, bench.store, bench.clock, CommandQueue(bench.store.commands))
    hellos = [ClientConnected("a", Hello("a", "p1", (), {}, has=Equipment(cores=n))) for n in range(1, 6)]
    back = [ClientDisconnected("a", "its connection is closed"), hellos[0]]
    for arrivals in (hellos[:2], hellos[2:], back, hellos):
        monkeypatch.setattr(bench.fleet, "poll", lambda wait_s, found=arrivals: found)
        assert fleet.poll(0.0) == arrivals
    kinds = [type(event) for _, event in bench.store.events(None)]
    assert kinds == [DeviceOnline, DeviceOffline, DeviceOnline]
