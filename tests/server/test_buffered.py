"""A buffer against lists of events: one update a device, and one reason to close."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.server.test_round import closed, update
from tests.support.buffered_stories import Idle, assigned, header, new_buffer, play
from thinwire.core.types import UpdateId
from thinwire.server.round_events import (
    AggregateUpdate,
    AggregationDone,
    AggregationRejected,
    AssignmentFailed,
    DeferUpdate,
    DeviceConnected,
    DeviceDisconnected,
    DropUpdate,
    Input,
    ReplacementSelected,
    RoundResult,
    SelectReplacement,
    SlotLease,
    Stop,
    Tick,
    UpdateArrived,
)


def test_it_closes_when_it_is_full_though_others_are_at_work() -> None:
    end = closed(play(new_buffer("abc"), (1, header("a")), (2, header("c"))))
    assert end == RoundResult("buffer", (update("a"), update("c")), (), ())


def test_it_closes_with_enough_when_every_device_stands_in_it() -> None:
    end = closed(play(new_buffer("ab", target_updates=5), (1, header("a")), (2, header("b"))))
    assert (end.reason, end.aggregated) == ("enough", (update("a"), update("b")))


def test_it_is_never_more_than_full() -> None:
    b = new_buffer("abc")
    b.on(header("a"), 101.0)
    b.on(header("b"), 102.0)
    assert b.on(header("c"), 103.0) == [DeferUpdate(update("c"))]
    b.on(AggregationDone(update("a")), 104.0)
    assert closed(b.on(AggregationDone(update("b")), 105.0)).aggregated == (update("a"), update("b"))


def test_what_is_not_valid_leaves_room_for_another() -> None:
    b = new_buffer("abc")
    b.on(header("a"), 101.0)
    b.on(header("b"), 102.0)
    assert b.on(AggregationRejected(update("a"), "bad-payload"), 103.0) == [DropUpdate(update("a"), "bad-payload")]
    end = closed(play(b, (4, AggregationDone(update("b"))), (5, header("c"))))
    assert (end.reason, end.aggregated) == ("buffer", (update("b"), update("c")))


def test_an_update_counts_less_for_each_version_that_it_is_behind() -> None:
    b = new_buffer("a", earlier={"z": SlotLease("assignment-old", 110.0)})
    assert b.on(header("z", "assignment-old", base=3), 101.0) == [
        AggregateUpdate(update("z"), staleness=3, discount=0.5, late=False)
    ]


def test_an_update_that_is_too_far_behind_is_dropped_and_its_sender_selected_at_once() -> None:
    b = new_buffer("a", max_staleness=2, earlier={"z": SlotLease("assignment-old", 110.0)})
    actions = play(b, (1, header("z", "assignment-old", base=3)), idle="z")
    assert actions[0] == DropUpdate(update("z"), "stale")
    assert assigned(actions) == ["z"]


def test_a_second_update_of_a_device_is_kept_for_the_next_buffer() -> None:
    b = new_buffer("ab", target_updates=3, earlier={})
    actions = play(b, (1, header("a", "assignment-old", base=5)), (2, header("a", sequence=2)))
    assert actions[-1] == DeferUpdate(update("a", 2))


def test_a_second_answer_to_one_assignment_is_dropped() -> None:
    actions = play(new_buffer("ab", target_updates=3), (1, header("a")), (2, header("a", sequence=2)))
    assert actions[-1] == DropUpdate(update("a", 2), "duplicate")


def test_too_few_make_no_step_and_give_all_back() -> None:
    end = closed(play(new_buffer("abc", target_updates=3, min_updates=2), (1, header("a")), (10, Tick())))
    assert (end.reason, end.aggregated, end.dropped) == ("too-few", (), (update("a"),))


def test_a_stop_gives_all_back() -> None:
    end = closed(play(new_buffer("ab"), (1, header("a")), (2, Stop())))
    assert (end.reason, end.dropped) == ("stopped", (update("a"),))


def test_what_was_decided_before_a_restart_is_not_decided_again() -> None:
    b = new_buffer("a", target_updates=3)
    assert b.on(ReplacementSelected("b", "assignment-b"), 104.0) == []
    assert (b.outstanding, b.at_work["b"].until_s) == (("a", "b"), 114.0)


def test_what_was_accepted_before_a_restart_is_accepted_again_and_what_is_not_valid_leaves_it_full() -> None:
    b = new_buffer("abc")
    told = [
        UpdateArrived(update(d), f"assignment-{d}", d, 6, again=True) for d in "abc"
    ]  # one of them was refused before
    assert [type(action) for event in told for action in b.on(event, 100.0)] == [AggregateUpdate] * 3
    b.on(AggregationRejected(update("a"), "bad-payload"), 100.0)
    end = closed(play(b, (1, AggregationDone(update("b"))), (1, AggregationDone(update("c")))))
    assert (end.reason, end.aggregated) == ("buffer", (update("b"), update("c")))


def test_what_a_device_was_selected_while_it_stood_here_is_known_again_after_a_restart() -> None:
    b, again = new_buffer("ab", target_updates=3), UpdateArrived(update("a"), "assignment-a", "a", 6, again=True)
    b.replay([(again, 101.0), (ReplacementSelected("a", "more-a"), 101.0)])
    assert (b.assignments["a"], b.followed_up, b.outstanding) == ("assignment-a", {"a"}, ("b", "a"))
    b.replay([(AssignmentFailed("a", "more-a", "task-error", "x"), 102.0)])
    assert (b.outstanding, b.lost) == (("b",), {}), "what it was requested this buffer is answered"


def test_nothing_goes_into_a_closed_buffer() -> None:
    b = new_buffer("ab", target_updates=1)
    play(b, (1, header("a")))
    with pytest.raises(RuntimeError, match="closed"):
        b.on(Tick(), 200.0)


events = st.one_of(
    st.builds(lambda d, s: ("header", d, s), st.sampled_from("abcdefg"), st.integers(0, 8)),
    st.builds(lambda d: ("offline", d), st.sampled_from("abcdefg")),
    st.builds(lambda d: ("joined", d), st.sampled_from("abcdefg")),
    st.builds(lambda d: ("failed", d), st.sampled_from("abcdefg")),
    st.builds(lambda bad: ("addition", bad), st.booleans()),
    st.builds(lambda s: ("wait", s), st.floats(0.1, 4)),
    st.just(("stop",)),
)


@given(st.lists(events, max_size=60), st.integers(1, 6), st.integers(1, 3), st.integers(0, 4))
def test_a_device_has_one_update_in_a_buffer_and_it_always_closes(
    script: list[tuple[object, ...]], target: int, min_updates: int, limit: int
) -> None:
    opening = "ab"[: limit or 2]
    working = {**{d: f"assignment-{d}" for d in opening}, "g": "assignment-old-g"}
    b = new_buffer(
        opening, target, min_updates=min_updates, max_concurrency=limit, earlier={"g": SlotLease("assignment-old-g",
            104.0)},
        follow_up=lambda device: "" if device in working else f"more-{device}",
    )  # fmt: skip
    if limit:
        b.at_work.pop("g", None)  # it would be one more than the limit at the opening
    now, adding, outcomes = 100.0, list[UpdateId](), dict[UpdateId, str]()
    assignments, back = [f"assignment-{device}" for device in opening], 0

    def feed(event: Input) -> None:
        for action in b.on(event, now, Idle("".join(d for d in "abcdef" if d not in working))):
            match action:
                case AggregateUpdate(update_id, staleness, discount):
                    assert outcomes.get(update_id) is None
                    assert 0 <= staleness <= 5 and discount == (1.0 + staleness) ** -0.5
                    outcomes[update_id] = "accepted"
                    adding.append(update_id)
                case DropUpdate(update_id):
                    assert outcomes.get(update_id) in (None, "accepted")
                    outcomes[update_id] = "dropped"
                case SelectReplacement(device, assignment_id):
                    assert assignment_id.startswith("more") == (device in b.devices), "only who stands here trains on"
                    assignments.append(assignment_id)
                    working[device] = assignment_id
        if limit:
            assert len(b.at_work) <= limit + back, "who comes back goes on, though others were selected meanwhile"
        assert len(b.buffered) <= target

    for number, step in enumerate([*script, *[("wait", 50.0)] * 10]):
        if b.closed:
            break
        match step:
            case ("header", str(d), int(behind)) if d in working:
                feed(UpdateArrived(update(d, number), working.pop(d), d, max(0, 6 - behind)))
            case ("offline", str(d)):
                working.pop(d, None)
                feed(DeviceDisconnected(d, "gone"))
            case ("joined", str(d)):
                if b.lost.get(d) == "offline":
                    working[d], back = f"assignment-{d}", back + 1
                feed(DeviceConnected(d))
            case ("failed", str(d)) if d in working:
                feed(AssignmentFailed(d, working.pop(d), "task-error", "x"))
            case ("addition", bool(bad)) if adding:
                u = adding.pop(0)
                feed(AggregationRejected(u, "bad-payload") if bad else AggregationDone(u))
            case ("wait", float(seconds)):
                now += seconds
                feed(Tick())
            case ("stop",):
                feed(Stop())
    while adding and not b.closed:
        feed(AggregationDone(adding.pop(0)))
    assert b.closed, "a buffer must close once all deadlines have passed and its additions have ended"
    assert len(assignments) == len(set(assignments)), "nobody is selected the same twice by one buffer"
    assert set(b.closed.aggregated) | set(b.closed.dropped) == set(outcomes)
    assert not set(b.closed.aggregated) & set(b.closed.dropped)
    assert len({u.device for u in b.closed.aggregated}) == len(b.closed.aggregated)
    match b.closed.reason:
        case "buffer":
            assert len(b.closed.aggregated) == target
        case "enough":
            assert min_updates <= len(b.closed.aggregated) < target
            assert b.at_work.keys() <= b.devices
        case reason:
            assert reason in ("too-few", "stopped")
            assert not b.closed.aggregated
