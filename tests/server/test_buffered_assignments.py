"""Whom a buffer assignments and waits for: nobody twice, nobody in vain, and no more than the plan allows."""

from __future__ import annotations

from tests.server.test_round import closed, update
from tests.support.buffered_stories import Idle, assigned, header, new_buffer, play
from thinwire.core.formatting import Reason
from thinwire.reports.reason_text import sentence
from thinwire.server.round_events import (
    AggregateUpdate,
    AggregationRejected,
    AssignmentFailed,
    DeferUpdate,
    DeviceConnected,
    DeviceDisconnected,
    DropUpdate,
    MarkLost,
    SelectReplacement,
    SlotLease,
    Tick,
)


def test_who_is_idle_is_selected_at_once_from_the_newest_version() -> None:
    b = new_buffer("ab", target_updates=3)
    assert b.on(Tick(), 101.0, Idle("c")) == [
        SelectReplacement(
            "c",
            "assignment-c",
            base_version=6,
            deadline_s=10.0,
            why=[Reason("idle", {}), Reason("at-work", {"at_work": 2})],
        )
    ]
    assert b.on(Tick(), 102.0, Idle("c")) == [], "it is at work now"


def test_who_stands_in_the_buffer_is_not_requested_it_again() -> None:
    b = new_buffer("ab", target_updates=3, earlier={"z": SlotLease("assignment-old", 110.0)})
    assert assigned(play(b, (1, header("z", "assignment-old", base=5)), (2, header("a")), idle="az")) == []


def more(device: str) -> str:
    return f"more-{device}"


def test_who_stands_in_the_buffer_trains_on_for_the_next_once() -> None:
    b = new_buffer("ab", target_updates=3, follow_up=more)
    why = [Reason("buffered", {}), Reason("at-work", {"at_work": 1})]
    assert SelectReplacement("a", "more-a", 6, 10.0, why) in play(b, (1, header("a")))
    assert play(b, (2, header("a", "more-a", sequence=2))) == [DeferUpdate(update("a", 2))]
    assert assigned(play(b, (3, Tick()))) == [], "its second update waits for the next buffer: a third would grow old"


def test_who_is_idle_comes_before_who_trains_on() -> None:
    b = new_buffer("ab", target_updates=9, max_concurrency=2, follow_up=more)
    assert assigned(play(b, (1, header("a")), idle="c")) == ["c"]
    (action,) = [a for a in play(b, (2, header("b"))) if isinstance(a, SelectReplacement)]
    assert (action.assignment_id, sentence(action.why)) == (
        "more-a",
        "the buffer has its update; devices at work: 1 of at most 2",
    )


def test_nobody_is_selected_on_when_the_buffer_closes() -> None:
    for target, reason in ((2, "buffer"), (5, "enough")):
        b = new_buffer("ab", target_updates=target, follow_up=more)
        assert assigned(play(b, (1, header("a")))) == ["a"]
        actions = play(b, (2, header("b")))
        assert (assigned(actions), closed(actions).reason) == ([], reason)


def test_who_trains_on_holds_no_buffer_open() -> None:
    b = new_buffer("ab", target_updates=5, follow_up=more)
    actions = play(b, (1, header("a")), (2, AssignmentFailed("b", "assignment-b", "task-error", "x")))
    assert (closed(actions).reason, closed(actions).outstanding) == ("enough", ())


def test_a_device_whose_first_answer_could_not_be_aggregated_fills_its_place_with_the_second() -> None:
    b = new_buffer("ab", target_updates=5, follow_up=more)
    b.on(header("a"), 101.0)
    assert b.on(AggregationRejected(update("a"), "bad-payload"), 101.0) == [DropUpdate(update("a"), "bad-payload")]
    assert b.on(header("a", "more-a", sequence=2), 102.0) == [AggregateUpdate(update("a", 2), 0, 1.0, late=False)]


def test_no_more_are_at_work_than_the_plan_allows() -> None:
    b = new_buffer("ab", target_updates=9, max_concurrency=3)
    assert assigned(b.on(Tick(), 101.0, Idle("cde"))) == ["c"]
    assert assigned(b.on(Tick(), 101.0, Idle("de"))) == []
    (action,) = [a for a in play(b, (2, header("a")), idle="de") if isinstance(a, SelectReplacement)]
    assert (action.device, sentence(action.why)) == ("d", "it was idle; devices at work: 2 of at most 3")


def test_nobody_is_selected_from_an_old_version_when_the_buffer_is_full() -> None:
    assert assigned(play(new_buffer("ab", target_updates=1, max_concurrency=2), (1, header("a")), idle="cd")) == []


def test_a_device_that_misses_its_deadline_is_not_waited_for_and_counts_when_it_comes() -> None:
    b = new_buffer("ab", target_updates=3)
    play(b, (1, header("a")))
    end = closed(b.on(Tick(), 110.0))
    assert (end.reason, end.aggregated, end.outstanding) == ("enough", (update("a"),), ("b",))
    b = new_buffer("ab", target_updates=3, earlier={"z": SlotLease("assignment-old", 90.0)})
    assert play(b, (1, header("z", "assignment-old", base=5)))[0].late is True  # type: ignore[union-attr]  # a Fold


def test_each_assignment_has_its_own_deadline() -> None:
    b = new_buffer("a", target_updates=3)
    assert assigned(b.on(Tick(), 105.0, Idle("b"))) == ["b"]
    assert b.deadline_at == 110.0
    assert b.on(Tick(), 110.0) == []
    assert b.deadline_at == 115.0
    assert closed(b.on(Tick(), 115.0)).outstanding == ("a", "b")


def test_who_failed_is_not_selected_again_by_the_same_buffer() -> None:
    b = new_buffer("ab", target_updates=3)
    assert b.on(AssignmentFailed("a", "assignment-a", "task-error", "x"), 101.0, Idle("a")) == [
        MarkLost("a", "assignment-a", "task-error", "x")
    ]
    assert b.outstanding == ("b",)


def test_a_device_whose_earlier_assignment_was_lost_is_selected_again() -> None:
    b = new_buffer("a", target_updates=3, earlier={"z": SlotLease("assignment-old", 110.0)})
    assert b.on(AssignmentFailed("z", "assignment-old", "task-error", "x"), 101.0, Idle("z"))[0] == SelectReplacement(
        "z", "assignment-z", 6, 10.0, [Reason("idle", {}), Reason("at-work", {"at_work": 1})]
    )


def test_a_device_that_left_and_came_back_is_waited_for_again() -> None:
    b = new_buffer("ab", target_updates=3)
    assert play(b, (1, DeviceDisconnected("a", "gone"))) == [MarkLost("a", "assignment-a", "offline", "gone")]
    play(b, (2, DeviceConnected("a")), (3, header("b")))
    assert not b.closed
    assert closed(play(b, (4, header("a")))).reason == "enough"


def test_it_does_not_wait_when_everybody_is_lost() -> None:
    end = closed(
        play(
            new_buffer("ab"),
            (1, DeviceDisconnected("a", "gone")),
            (1, AssignmentFailed("b", "assignment-b", "task-error", "x")),
        )
    )
    assert end.reason == "too-few"
