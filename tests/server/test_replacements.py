"""Who is selected in the place of a device that was lost: while there is time, and never twice."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.server.test_round import closed, header, new_round, play, update
from tests.support.server_bench import FAILS, SILENT, Bench, drive_through, killed, scripted
from thinwire.core.events import ClientFailed, ClientSelected, Event, RoundClosed, RoundOpened, UpdateAccepted
from thinwire.core.types import Assignment
from thinwire.reports.reason_text import sentence
from thinwire.server.policy.cohort import expected_s, in_time, replacement_candidates
from thinwire.server.round_events import (
    AggregateUpdate,
    AggregationDone,
    AggregationRejected,
    AssignmentFailed,
    DeviceConnected,
    DeviceDisconnected,
    Replacement,
    ReplacementSelected,
    SelectReplacement,
    Tick,
)
from thinwire.simulation import Behavior, ScriptedDevice


class Idle:
    """Devices that could be selected, and how long each needs."""

    def __init__(self, **needs_s: float) -> None:
        self.needs_s = needs_s

    def __call__(self, left_s: float) -> Iterable[Replacement]:
        return [Replacement(d, f"assignment-{d}") for d, needs_s in self.needs_s.items() if needs_s <= left_s]


def assigned(actions: Iterable[object]) -> list[str]:
    return [action.device for action in actions if isinstance(action, SelectReplacement)]


def test_another_is_requested_the_time_that_is_left() -> None:
    r = new_round("ab")
    found = r.on(DeviceDisconnected("a", "gone"), 104.0, Idle(c=3.0, d=3.0))[-1]
    assert isinstance(found, SelectReplacement)
    assert (found.device, found.assignment_id, found.base_version, found.deadline_s) == ("c", "assignment-c", 6, 6.0)
    assert (found.instead_of, sentence(found.why)) == ("a", "1 of 2 replies could still come, 6 s were left")
    assert r.outstanding == ("b", "c")
    assert closed(play(r, (5, header("b")), (6, header("c")))).aggregated == (update("b"), update("c"))


def test_who_cannot_answer_in_time_is_not_selected_and_not_waited_for() -> None:
    r = new_round("a")
    actions = r.on(DeviceDisconnected("a", "gone"), 104.0, Idle(c=7.0))
    assert closed(actions).reason == "too-few"


def test_nobody_is_selected_while_enough_can_still_come() -> None:
    r = new_round("abc", target_updates=2)
    assert assigned(r.on(DeviceDisconnected("a", "gone"), 101.0, Idle(d=1.0))) == []
    assert assigned(r.on(DeviceDisconnected("b", "gone"), 102.0, Idle(d=1.0))) == ["d"]


def test_a_payload_that_is_not_valid_is_a_lost_answer() -> None:
    r = new_round("a")
    r.on(header("a"), 101.0)
    actions = r.on(AggregationRejected(update("a"), "bad-payload"), 102.0, Idle(c=1.0))
    assert assigned(actions) == ["c"]
    assert closed(play(r, (3, header("c")))).reason == "all"


def test_who_joins_takes_a_place_that_nobody_could_take() -> None:
    r = new_round("ab")
    assert assigned(r.on(AssignmentFailed("a", "assignment-a", "task-error", "x"), 101.0)) == []
    assert assigned(r.on(DeviceConnected("c"), 102.0, Idle(c=1.0))) == ["c"]
    assert assigned(r.on(DeviceConnected("d"), 103.0, Idle(d=1.0))) == []


def test_a_replacement_that_is_lost_is_replaced_too() -> None:
    r = new_round("a")
    assert assigned(r.on(DeviceDisconnected("a", "gone"), 101.0, Idle(c=1.0, d=1.0))) == ["c"]
    again = r.on(DeviceDisconnected("c", "gone"), 102.0, Idle(c=1.0, d=1.0))
    assert assigned(again) == ["d"], "nobody is selected twice"
    assert (r.instead, assigned(r.on(DeviceDisconnected("d", "gone"), 103.0, Idle(c=1.0)))) == (
        {"c": "a", "d": "c"},
        [],
    )
    assert r.closed


def test_nobody_is_selected_once_the_deadline_has_passed() -> None:
    r = new_round("ab")
    r.on(header("a"), 101.0)
    assert r.on(DeviceDisconnected("b", "gone"), 110.0, Idle(c=0.0))[1:] == []
    assert closed(r.on(AggregationDone(update("a")), 111.0)).reason == "enough"


def test_what_was_decided_before_a_restart_is_not_decided_again() -> None:
    r = new_round("ab")
    for event in (
        ReplacementSelected("c", "assignment-c", "a"),
        AssignmentFailed("a", "assignment-a", "offline", "gone"),
    ):
        assert assigned(r.on(event, 100.0)) == []
    assert r.outstanding == ("b", "c")
    assert [type(action) for action in play(r, (1, header("c")))] == [AggregateUpdate]
    assert assigned(r.on(Tick(), 102.0, Idle(d=1.0))) == []


times = st.dictionaries(st.sampled_from("abcdefgh"), st.lists(st.floats(0.1, 50), min_size=1, max_size=3))


@given(st.sets(st.sampled_from("abcdefgh")), st.floats(0, 60), times, st.integers(0, 99))
def test_the_order_is_the_seeds_and_all_of_them_can_answer_in_time(
    idle: set[str], left_s: float, took: dict[str, list[float]], seed: int
) -> None:
    found = replacement_candidates(idle, left_s, took, 60.0, seed, 3)
    assert set(found) == {d for d in idle if expected_s(d, took, 60.0) <= left_s}
    everybody = replacement_candidates("abcdefgh", 1e9, took, 60.0, seed, 3)
    assert found == [d for d in everybody if d in found], "who else is there changes no order"


def test_each_device_is_first_about_as_often() -> None:
    first = [replacement_candidates("abcd", 60.0, {}, 60.0, seed, 1)[0] for seed in range(1000)]
    assert all(190 <= first.count(device) <= 310 for device in "abcd")  # 250 +- 4 sigma


# Over a whole run.


def fails(assignment: Assignment) -> Behavior:
    return FAILS if assignment.round == 2 else Behavior()


def bench(folder: Path, *devices: ScriptedDevice, **cohort: object) -> Bench:
    return Bench(folder, devices, run={"rounds": 3}, cohort={"clients": 2, "deadline_s": 20, **cohort})


def four(folder: Path) -> Bench:
    """Two of four are selected; all but one fail in the second round."""
    return bench(folder, *(scripted(name, fails) for name in "abc"), scripted("d", 2.0))


def since(made: Bench) -> list[ClientSelected]:
    return [event for event in made.events(ClientSelected) if event.why]


def test_a_failed_client_is_replaced_within_its_round(tmp_path: Path) -> None:
    made = four(tmp_path)
    assert made.drive().status == "done"
    assigned_since, failed = since(made), made.events(ClientFailed)
    assert {event.round for event in assigned_since} == {2}
    assert [event.instead_of for event in assigned_since] == [event.device for event in failed[: len(assigned_since)]]
    opened = made.events(RoundOpened)[1]
    assert {*opened.assignments, *(event.device for event in assigned_since)} == set("abcd")
    row = made.store.rounds(made.run_id)[1]
    assert row.selected == [*opened.assignments, *(event.device for event in assigned_since)]
    assert row.not_selected == {}
    assert row.failed == len(failed) == 3
    assert [len(event.aggregated) for event in made.events(RoundClosed)] == [2, 1, 2]


def test_the_assignment_says_how_long_is_left(tmp_path: Path) -> None:
    made = bench(tmp_path, *(scripted(name, 8.0) for name in "abc"))

    def lose(event: Event) -> None:
        if isinstance(event, RoundOpened) and event.round == 1:
            made.fleet.crash(next(iter(event.assignments)), 5.0)

    made.drive(on_event=lose)
    (event,) = since(made)
    assert event.instead_of == next(iter(made.events(RoundOpened)[0].assignments))
    assert [e.assignment.deadline_s for e in made.fleet.sent if e.assignment.assignment_id == event.assignment_id] == [
        event.deadline_s
    ]
    assert 14 < event.deadline_s <= 15


def test_a_device_that_joins_takes_the_place_of_one_that_was_lost(tmp_path: Path) -> None:
    made = bench(tmp_path, scripted("a", lambda assignment: SILENT), scripted("b", 9.0), clients="all")
    late = scripted("z")
    late.offline = [(0.0, 3.0)]
    made.fleet.crash("a", 0.5)
    made.fleet.add(late)
    made.drive()
    (first, *_) = since(made)
    assert (first.device, first.instead_of, first.round) == ("z", "a", 1)
    assert "z" in {event.device for event in made.events(UpdateAccepted) if event.round == 1}


def test_a_kill_at_any_commit_replaces_nobody_twice(tmp_path: Path) -> None:

    def check(made: Bench, where: str) -> None:
        assert made.store.run(made.run_id).status == "done"
        opened = [assignment_id for event in made.events(RoundOpened) for assignment_id in event.assignments.values()]
        assigned_now = opened + [event.assignment_id for event in since(made)]
        answered = [event.assignment_id for event in made.events(UpdateAccepted)]
        failed = [event.assignment_id for event in made.events(ClientFailed)]
        assert len(set(assigned_now)) == len(assigned_now), where
        assert sorted(answered + failed) == sorted(assigned_now)

    killed(four, tmp_path, drive_through(four(tmp_path / "undisturbed")), check)


def test_nobody_is_looked_at_beyond_those_who_are_selected() -> None:
    """One is selected whenever a place is free: to look at all each time would take a thousand devices a million
    looks.
    """
    devices = iter("abcdef")
    assert next(in_time(devices, 9.0, {"a": [10.0], "b": [8.0]}, 60.0)) == "b"
    assert list(devices) == list("cdef")
