"""What a run without a fault is told to do, so that it takes in what a run with one took in."""

from __future__ import annotations

from dataclasses import replace

from tests.support.alike import alike
from tests.support.passing import Answer
from thinwire.core.events import Event, RoundClosed, RoundOpened, StateLost, UpdateAccepted, UpdateDropped

DEVICES = ("a", "b")


def opened(number: int, *devices: str) -> Event:
    assignments = {device: f"r.{number}.{device}" for device in devices}
    return RoundOpened(0.0, number, 0.0, number - 1, "", list(devices), assignments, "int8", 8.0, 2, 1)


def accepted(number: int, device: str, assigned: int = 0) -> UpdateAccepted:
    assigned = assigned or number
    return UpdateAccepted(
        0.0, number, assigned, device, f"r.{assigned}.{device}", f"r/{device}/{assigned}", number - assigned, 1.0,
        assigned < number, 1.0, {},
    )  # fmt: skip


def closed(number: int, reason: str = "all", *outstanding: str) -> Event:
    return RoundClosed(0.0, number, reason, number, [], [], list(outstanding), 1.0, 1.0, {})  # type: ignore[arg-type]  # a word is enough


def test_nothing_is_to_be_done_where_all_answered_in_their_round() -> None:
    found = alike([opened(1, "a", "b"), accepted(1, "a"), accepted(1, "b"), closed(1)], DEVICES)
    assert (found.absent, found.late, found.why_not) == ({}, {}, "")


def test_a_device_fails_the_assignments_of_which_no_answer_counted_and_of_those_that_it_was_not_selected() -> None:
    garbage = accepted(3, "b")
    events = [
        opened(1, "a", "b"), accepted(1, "a"), closed(1, "enough"), opened(2, "a"), accepted(2, "a"), closed(2),
        opened(3, "a", "b"), accepted(3, "a"), garbage,
        UpdateDropped(0.0, 3, 3, "b", "r.3.b", garbage.update_id, "bad-payload", 1.0, detail="damaged"),
        closed(3, "enough"),
    ]  # fmt: skip
    assert alike(events, DEVICES).absent == {"b": (1, 2, 3)}


def test_who_began_again_is_to_do_so_at_the_same_assignments() -> None:
    said = accepted(2, "b")
    events = [opened(1, "b"), accepted(1, "b"), closed(1), opened(2, "b"), said]
    found = alike([*events, StateLost(0.0, 2, "b", said.update_id, "missing"), closed(2)], ("b",))
    assert (found.restarted, found.of("b"), found.of("a")) == ({"b": (2,)}, '{"absent": [], "again": [2]}', "")


def test_a_second_answer_to_an_assignment_is_no_answer_less() -> None:
    second = UpdateDropped(0.0, 1, 1, "b", "r.1.b", "r/b/99", "duplicate", 1.0)
    assert alike([opened(1, "b"), accepted(1, "b"), second, closed(1)], ("b",)).absent == {}


def test_what_came_after_a_deadline_is_approved_when_the_round_is_open_that_took_it() -> None:
    late = accepted(2, "b", assigned=1)
    events = [opened(1, "a", "b"), accepted(1, "a"), closed(1, "deadline", "b"), opened(2, "a"), late, accepted(2, "a")]
    found = alike([*events, closed(2)], DEVICES)
    assert (found.late, found.absent, found.why_not) == ({Answer(1, "b"): 2}, {"b": (2,)}, "")
    assert found.key != replace(found, late={}).key


def test_what_came_after_its_round_was_closed_by_something_else_is_in_no_run_without_a_fault() -> None:
    late = accepted(2, "b", assigned=1)
    found = alike([opened(1, "a", "b"), accepted(1, "a"), closed(1, "enough"), opened(2, "a", "b"), late], DEVICES)
    assert found.why_not
