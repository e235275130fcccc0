"""Whole buffered runs against scripted devices: who is selected when, what a step is, and that a kill changes
nothing.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.crashes import Killed
from tests.support.explained import whys
from tests.support.faulty_fleet import FaultyBehavior
from tests.support.server_bench import (
    AROUND,
    FAILS,
    LAYOUT,
    SILENT,
    Bench,
    change,
    drive_through,
    killed,
    killing,
    outcome,
    scripted,
    work,
)
from thinwire.compression import parse
from thinwire.core.events import (
    ClientFailed,
    ClientSelected,
    Evaluated,
    ModelStored,
    RoundClosed,
    RoundOpened,
    RunNoted,
    UpdateAccepted,
    UpdateDropped,
)
from thinwire.core.types import Assignment, Vector
from thinwire.reports.reason_text import sentence
from thinwire.server.model_store import Versions
from thinwire.simulation import Behavior, ScriptedDevice, SyntheticUpdates
from thinwire.store.round_timing import turns


def bench(folder: Path, *devices: ScriptedDevice, rounds: int = 6, **cohort: Any) -> Bench:
    given = {"mode": "buffered", "buffer": 2, "deadline_s": 30, "max_staleness": 20, **cohort}
    return Bench(folder, devices, run={"rounds": rounds}, cohort=given)


SPEEDS = (1.0, 1.7, 3.1, 9.3)


def unequal(folder: Path, **cohort: Any) -> Bench:
    """Times that never fall together, so that the order of answers is given."""
    return bench(folder, *(scripted(n, s) for n, s in zip("abcd", SPEEDS, strict=True)), **cohort)


def assignments_of(made: Bench) -> dict[str, list[tuple[float, str]]]:
    """device -> (when, assignment_id) of its assignments."""
    opened = {event.round: event.elapsed_s for event in made.events(RoundOpened)}
    found = defaultdict(list)
    for event in made.events(ClientSelected):
        found[event.device].append((event.elapsed_s if event.why else opened[event.round], event.assignment_id))
    return found


def test_what_is_shown_of_a_buffer_is_of_the_answers_that_it_took(tmp_path: Path) -> None:
    made = unequal(tmp_path, rounds=12)
    made.drive()
    rounds, assignments = made.store.rounds(made.run_id), made.store.updates(made.run_id)
    came = defaultdict[int, int](int)
    for event in made.events(UpdateAccepted):
        came[event.round] += sum(part["length"] for part in event.header["parts"])
    assert {row.round: row.payload_up for row in rounds} == came
    told = whys(made.store.run(made.run_id), rounds, assignments, turns(rounds))
    assert [row.slowest for row in rounds] == [one.device for one in told]
    assert all(one.device for one in told)


def test_every_device_is_at_work_but_while_two_of_its_updates_wait(tmp_path: Path) -> None:
    made = unequal(tmp_path, rounds=12)
    assert made.drive().status == "done"
    closed = {event.round: event.elapsed_s for event in made.events(RoundClosed)}
    stood = {event.assignment_id: closed[event.round] for event in made.events(UpdateAccepted)}
    for takes_s, assignments in zip(SPEEDS, (assignments_of(made)[device] for device in "abcd"), strict=True):
        for (_, one), (before, _), (at, _) in zip(assignments, assignments[1:], assignments[2:], strict=False):
            assert at == pytest.approx(max(before + takes_s, stood[one])), "it is selected the moment it can be"
        assert assignments[1][0] == takes_s
    assert set(made.reasons()) == {"buffer"}
    assert len({event.assignment_id for event in made.events(UpdateAccepted)}) == 12 * 2
    assert {event.device for event in made.events(UpdateAccepted)} == set("abcd")
    assert made.events(RoundClosed)[-1].elapsed_s < 2 * 9.3, "a round of all would take 9.3 s"


def test_a_device_that_stands_in_the_buffer_trains_on_for_the_next_and_no_further(tmp_path: Path) -> None:
    made = bench(tmp_path, scripted("a"), scripted("b", 10.0), rounds=3)
    assert made.drive().status == "done"
    assert [at for at, _ in assignments_of(made)["a"]] == [0.0, 1.0, 10.0], (
        "after the last step there is no use for one"
    )
    second = next(event for event in made.events(UpdateAccepted) if event.assignment_id == "toy-1.1+.a")
    assert (second.round, second.staleness, second.late) == (2, 1, False)
    assert [(event.reason, len(event.aggregated)) for event in made.events(RoundClosed)] == [("buffer", 2)] * 3
    assert not [event for event in made.events(ClientFailed) if event.device == "a"]


@dataclass
class Noting(SyntheticUpdates):
    """Keeps what it sent, by assignment."""

    frames: dict[str, bytes] = field(default_factory=dict)

    def encoded(self, assignment: Assignment, segment: int, change: Vector) -> bytes:
        self.frames[assignment.assignment_id] = super().encoded(assignment, segment, change)
        return self.frames[assignment.assignment_id]


def test_a_step_is_the_mean_of_whole_changes_each_discounted_by_its_staleness(tmp_path: Path) -> None:
    made, frames = unequal(tmp_path, rounds=5), dict[str, bytes]()
    for device, examples in zip(made.fleet.devices.values(), (10, 20, 30, 40), strict=True):
        device.work = work(device.name, Noting, frames=frames, examples=examples)
    made.drive()
    codec, versions = parse("topk(0.1) > int8").bind(LAYOUT), Versions(made.home.run(made.run_id), LAYOUT)
    stored = made.events(ModelStored)[-1]
    expected, staleness = np.zeros(LAYOUT.size), set()
    for closed in made.events(RoundClosed):
        for event in (e for e in made.events(UpdateAccepted) if e.round == closed.round):
            staleness.add(event.staleness)
            expected += 5.0 * (1.0 + event.staleness) ** -0.5 * codec.decode(frames[event.assignment_id]) / 2
    params, _ = versions.read(stored)
    np.testing.assert_allclose(params, expected, rtol=1e-5, atol=1e-6)
    assert len(staleness) > 1


def test_a_buffer_that_is_larger_than_the_fleet_closes_with_all_of_it_and_is_warned_of(tmp_path: Path) -> None:
    made = bench(tmp_path, scripted("a"), scripted("b"), rounds=3, buffer=5)
    made.drive()
    assert made.reasons() == ["enough"] * 3
    assert [len(event.aggregated) for event in made.events(RoundClosed)] == [2, 2, 2]
    assert [sentence(event.note) for event in made.events(RunNoted)] == [
        "[cohort] buffer = 5 is more than the 2 devices online: each buffer closes with the updates of all of them"
    ]


@pytest.mark.parametrize(("names", "limit", "warned"), [("abcd", 0, True), ("abcd", 2, False), ("abcde", 0, False)])
def test_a_small_fleet_that_is_always_at_work_is_warned_of_twice_the_same_version(
    tmp_path: Path, names: str, limit: int, warned: bool
) -> None:
    made = bench(tmp_path, *map(scripted, names), rounds=1, max_concurrency=limit)
    made.drive()
    said = [sentence(event.note) for event in made.events(RunNoted)]
    assert [text.partition(":")[0] for text in said] == warned * ["all 4 devices work at once and [cohort] buffer = 2"]
    assert all(text.endswith("with max_concurrency = 2 they take turns") for text in said)


def test_most_answers_too_far_behind_are_warned_of(tmp_path: Path) -> None:
    made = bench(tmp_path, *(scripted(name) for name in "abcdef"), rounds=1, buffer=1, max_staleness=2)
    made.drive()
    (note,) = made.events(RunNoted)
    assert "about 6 versions behind" in sentence(note.note) and sentence(note.note).endswith("max_concurrency = 2")


def test_no_more_devices_are_at_work_than_the_plan_allows_and_all_have_their_turn(tmp_path: Path) -> None:
    made = unequal(tmp_path, rounds=12, max_concurrency=2)
    made.drive()
    at_work, most = set[str](), 0
    for _, event in made.store.events(made.run_id):
        if isinstance(event, UpdateAccepted):
            at_work.discard(event.assignment_id)
        elif isinstance(event, ClientSelected):
            at_work.add(event.assignment_id)
            most = max(most, len(at_work))
    assert most <= 3, "an assignment stands in the journal before the answer that made its place free"
    assert {event.device for event in made.events(UpdateAccepted)} == set("abcd")


def test_a_silent_device_blocks_nothing_and_is_selected_again_after_its_staleness(tmp_path: Path) -> None:
    silent = scripted("c", lambda assignment: SILENT if assignment.round < 4 else Behavior())
    made = bench(tmp_path, scripted("a"), scripted("b"), silent, rounds=8, max_staleness=3)
    made.drive()
    assert made.reasons() == ["buffer"] * 8
    assert made.events(RoundClosed)[-1].elapsed_s < 20, "no deadline of 30 s was waited for"
    (failed,) = (event for event in made.events(ClientFailed) if event.kind != "over")
    assert (failed.device, failed.kind) == ("c", "stale")
    assert "c" in {event.device for event in made.events(UpdateAccepted)}


def test_what_came_too_soon_fills_the_place_of_what_is_not_valid(tmp_path: Path) -> None:
    spoils = scripted("a", lambda assignment: FaultyBehavior(compute_s=1.0, garbage=assignment.round == 1))
    made = bench(tmp_path, spoils, scripted("b"), scripted("c"), rounds=2, min_updates=2)
    made.drive()
    assert (made.reasons(), [event.seconds for event in made.events(RoundClosed)]) == (["buffer"] * 2, [1.0] * 2)
    assert not any(event.late for event in made.events(UpdateAccepted)), "it waited, but came in its time"


def test_what_came_after_its_own_time_is_late_in_the_buffer_that_takes_it(tmp_path: Path) -> None:
    dawdles = scripted("a", lambda assignment: Behavior(compute_s=35.0 if assignment.is_follow_up else 1.0))
    made = bench(tmp_path, dawdles, scripted("b", 29.0), rounds=2)
    made.fleet.crash("b")
    made.fleet.connect("b", 20.0)
    made.drive()
    assert [event.elapsed_s for event in made.events(RoundClosed)] == [49.0, 78.0]
    late = {event.assignment_id: event.late for event in made.events(UpdateAccepted)}
    assert late == {"toy-1.1.a": False, "toy-1.1.b": False, "toy-1.1+.a": True, "toy-1.2.b": False}


def test_a_buffer_that_only_silent_devices_could_fill_closes_at_their_deadline(tmp_path: Path) -> None:
    silent = scripted("b", lambda assignment: SILENT)
    made = bench(tmp_path, scripted("a"), silent, rounds=2)
    made.drive()
    first, second = made.events(RoundClosed)
    assert (first.reason, first.seconds, first.outstanding) == ("enough", 30.0, ["b"])
    assert (second.reason, second.seconds) == ("enough", 0.0), "it is not waited for again, and a trained on"


def test_a_device_that_fails_is_selected_once_in_a_buffer(tmp_path: Path) -> None:
    broken = scripted("c", lambda assignment: FAILS)
    made = bench(tmp_path, scripted("a"), scripted("b"), broken, rounds=4)
    made.drive()
    assert [event.round for event in made.events(ClientFailed)] == [1, 2, 3, 4]


def test_what_is_too_old_is_dropped_and_given_back_and_its_sender_goes_on(tmp_path: Path) -> None:
    made = unequal(tmp_path, rounds=6, max_staleness=1)
    made.drive()
    given_up = {event.device for event in made.events(ClientFailed) if event.kind == "stale"}
    dropped = {event.device for event in made.events(UpdateDropped) if event.reason == "stale"}
    assert "d" in given_up | dropped
    assert max(event.staleness for event in made.events(UpdateAccepted)) <= 1


def test_every_version_is_measured_in_its_order_by_those_who_trained_from_it(tmp_path: Path) -> None:
    made = unequal(tmp_path, rounds=8)
    made.drive()
    found = made.events(Evaluated)
    assigned = defaultdict(set)
    for event in made.events(UpdateAccepted):
        assigned[event.header["base_version"]].add(event.device)
    assert [event.version for event in found] == [*sorted(assigned), 8], "from the 7th nobody was ready before the end"
    for measured in found[:-1]:
        assert measured.clients == len(assigned[measured.version])
        assert measured.metrics["loss"] == measured.version
    assert found[-1].clients == 4, "the last one is measured by all"


def test_versions_are_measured_though_all_train_on_all_the_time(tmp_path: Path) -> None:
    made = unequal(tmp_path, rounds=12, buffer=3)
    made.drive()
    measured = {event.version: event.clients for event in made.events(Evaluated)}
    assert measured.keys() >= set(range(11)) and sum(measured.values()) > 24


@pytest.mark.parametrize("limit", [0, 2])
def test_a_kill_at_any_commit_changes_nothing(tmp_path: Path, limit: int) -> None:
    begin = partial(unequal, rounds=3, max_concurrency=limit)
    undisturbed = begin(tmp_path / "undisturbed")
    places = drive_through(undisturbed)
    assert undisturbed.store.run(undisturbed.run_id).status == "done"

    def check(made: Bench, where: str) -> None:
        assert outcome(made) == outcome(undisturbed), where

    killed(begin, tmp_path, places, check)


def test_after_a_restart_what_was_dropped_before_it_stands_in_no_buffer(tmp_path: Path) -> None:
    """b's first answer comes to the second buffer and is dropped; its next one stands there, and it trains on."""
    spoils, good = FaultyBehavior(compute_s=12.0, garbage=True), Behavior(compute_s=0.4)

    def begin(folder: Path) -> Bench:
        others = (scripted(name, seconds) for name, seconds in {"a": 1.1, "c": 2.0, "d": 9.3, "e": 11.0}.items())
        b = scripted("b", lambda assignment: good if assignment.round > 1 else spoils)
        return bench(folder, b, *others, rounds=3, buffer=4)

    undisturbed, made = begin(tmp_path / "undisturbed"), begin(tmp_path / "killed")
    undisturbed.drive()
    assert [event.update_id for event in undisturbed.events(UpdateDropped)] == ["toy-1/b/1"]
    with pytest.raises(Killed):
        made.drive(on_event=killing(lambda e: isinstance(e, UpdateAccepted) and e.assignment_id == "toy-1.2.b"))
    made.restart()
    made.drive()
    assert "toy-1.2+.b" in {assignment_id for _, assignment_id in assignments_of(made)["b"]}
    assert outcome(made) == outcome(undisturbed)


def test_a_kill_at_any_commit_adds_nothing_twice_and_loses_nothing(tmp_path: Path) -> None:
    def troubled(assignment: Assignment) -> Behavior:
        return {1: Behavior(compute_s=40.0), 2: FAILS, 3: SILENT}.get(assignment.round, Behavior())

    def begin(folder: Path) -> Bench:
        spoiled = scripted("d", lambda assignment: FaultyBehavior(compute_s=0.9, garbage=True))
        devices = scripted("a", 1.0), scripted("b", 1.7), scripted("c", troubled), spoiled
        return bench(folder, *devices, rounds=3, buffer=2)

    def check(made: Bench, where: str) -> None:
        assert made.store.run(made.run_id).status == "done"
        accepted = [event.update_id for event in made.events(UpdateAccepted)]
        aggregated = [update_id for event in made.events(RoundClosed) for update_id in event.aggregated]
        assert len(accepted) == len(set(accepted))
        spoiled = [event.update_id for event in made.events(UpdateDropped)]
        assert sorted(aggregated + spoiled) == sorted(accepted), where
        assert all(len(event.aggregated) <= 2 for event in made.events(RoundClosed))
        assigned = [event.assignment_id for event in made.events(ClientSelected)]
        assert len(assigned) == len(set(assigned))

    killed(begin, tmp_path, drive_through(begin(tmp_path / "undisturbed")), check, kinds=AROUND)


def test_after_a_restart_assignments_of_earlier_buffers_go_out_again_as_they_were(tmp_path: Path) -> None:
    made = unequal(tmp_path)
    with pytest.raises(Killed):
        made.drive(on_event=killing(lambda e: isinstance(e, RoundOpened) and e.round == 4))
    first = {e.assignment.assignment_id: e.assignment for e in made.fleet.sent}
    made.restart()
    made.fleet.sent = []
    made.drive()
    again = {e.assignment.assignment_id: e.assignment for e in made.fleet.sent if e.assignment.assignment_id in first}
    assert any(assignment.round < 4 for assignment in again.values())
    for assignment_id, assignment in again.items():
        before = first[assignment_id]
        for name in ("round", "base_version", "base_digest", "codec", "work", "deadline_s", "kind"):
            assert getattr(assignment, name) == getattr(before, name)


@pytest.mark.parametrize("back", [True, False], ids=["comes back", "stays away"])
def test_after_a_restart_an_overdue_assignment_of_the_open_buffer_goes_out_again(tmp_path: Path, back: bool) -> None:
    """c lets its time pass, then e is selected; c dies with the aggregator, and has lost its assignment."""
    devices = scripted("c", lambda assignment: SILENT), scripted("d", 15.0), scripted("e", 35.0)
    made = bench(tmp_path, *devices, rounds=1, buffer=3, wait_for=1, deadline_s=40)
    for name, at_s in (("d", 35.0), ("e", 45.0)):
        made.fleet.crash(name)
        made.fleet.connect(name, at_s)

    def dies() -> None:
        if made.clock.now() >= 46.0:
            raise Killed

    with pytest.raises(Killed):
        made.drive(stop=dies)
    assert [event.device for event in made.events(ClientSelected)] == ["c", "d", "e"]
    made.fleet.crash("c")
    if back:
        made.fleet.connect("c")
    made.restart()
    made.fleet.sent = []
    assert made.drive().status == "done"
    assert [assignment.assignment_id for assignment in made.assignments("c")][:1] == ["toy-1.1.c"]
    (closed,) = made.events(RoundClosed)
    left = [(event.device, event.kind) for event in made.events(ClientFailed)]
    assert (len(closed.aggregated), left) == ((3, []) if back else (2, [("c", "offline")]))


def test_a_version_that_hardly_anybody_measured_is_no_best_and_meets_no_target(tmp_path: Path) -> None:
    """Each version is better than the one before it, and of the fifth only a late comer says anything."""
    devices = [
        scripted(
            name,
            seconds,
            SyntheticUpdates(
                name, LAYOUT, partial(change, name), loss=lambda assignment: -float(assignment.base_version)
            ),
        )
        for name, seconds in zip("abcde", (2.0, 2.0, 2.0, 2.0, 0.1), strict=True)
    ]
    target = {"metric": "loss", "value": -5.0}
    cohort = {"mode": "buffered", "buffer": 4, "deadline_s": 30, "max_concurrency": 4}
    made = Bench(tmp_path, devices, run={"rounds": 6, "target": target}, cohort=cohort)
    made.fleet.crash("e")
    made.fleet.connect("e", 10.5)
    assert made.drive().status_text == "6 rounds, loss reached -5 with version 6"
    found = {event.version: (event.clients, event.few, event.best) for event in made.events(Evaluated)}
    assert (found[4], found[5], found[6]) == ((3, False, True), (1, True, False), (5, False, True))
