"""The round against lists of events: it closes for one reason, and never waits when nobody can answer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.core.types import UpdateId
from thinwire.server.policy.cohort import min_updates_of
from thinwire.server.round import Round
from thinwire.server.round_events import (  # fmt: skip
    Action,
    AggregateUpdate,
    AggregationDone,
    AggregationRejected,
    AssignmentFailed,
    DeferUpdate,
    DeviceConnected,
    DeviceDisconnected,
    DropUpdate,
    MarkLost,
    Reinstate,
    Replacement,
    RoundConfig,
    RoundResult,
    SelectReplacement,
    Stop,
    Tick,
    UpdateArrived,
)


def update(device: str, sequence: int = 1) -> UpdateId:
    return UpdateId("run-1", device, sequence)


def new_round(devices: Sequence[str] = "abc", **terms: object) -> Round:
    given = {"target_updates": len(devices), "min_updates": 1, "opened_s": 100.0, "deadline_s": 10.0, **terms}
    return Round(RoundConfig(7, 6, {d: f"assignment-{d}" for d in devices}, **given))  # type: ignore[arg-type]  # tests vary them


def header(device: str, assignment: str | None = None, base: int = 6, sequence: int = 1) -> UpdateArrived:
    return UpdateArrived(update(device, sequence), assignment or f"assignment-{device}", device, base)


def play(round: Round, *script: tuple[float, object]) -> list[Action]:
    """Feed (seconds after opening, event); additions succeed at once where an answer is accepted."""
    actions: list[Action] = []
    for after, event in script:
        done = round.on(event, round.config.opened_s + after)  # type: ignore[arg-type]  # the script holds inputs
        for action in list(done):
            if isinstance(action, AggregateUpdate):
                done += round.on(AggregationDone(action.update_id), round.config.opened_s + after)
        actions += done
    return actions


def closed(actions: list[Action]) -> RoundResult:
    assert isinstance(actions[-1], RoundResult), actions
    return actions[-1]


def test_it_closes_with_all_when_everybody_answered() -> None:
    end = closed(play(new_round("ab"), (1, header("a")), (2, header("b"))))
    assert (end.reason, end.aggregated, end.outstanding) == ("all", (update("a"), update("b")), ())


def test_it_closes_with_enough_when_the_target_came_from_a_larger_cohort() -> None:
    end = closed(play(new_round("abc", target_updates=2), (1, header("a")), (2, header("c"))))
    assert (end.reason, end.outstanding) == ("enough", ("b",))


def test_it_closes_with_enough_when_the_others_are_lost() -> None:
    end = closed(play(new_round("ab"), (1, header("a")), (2, DeviceDisconnected("b", "gone"))))
    assert end.reason == "enough"


def test_it_closes_at_the_deadline_with_what_it_has() -> None:
    end = closed(play(new_round("ab"), (1, header("a")), (9.9, Tick()), (10, Tick())))
    assert (end.reason, end.aggregated, end.outstanding) == ("deadline", (update("a"),), ("b",))


def test_too_few_make_no_step_and_give_all_back() -> None:
    end = closed(play(new_round("abc", min_updates=2), (1, header("a")), (10, Tick())))
    assert (end.reason, end.aggregated, end.dropped) == ("too-few", (), (update("a"),))


def test_it_does_not_wait_for_its_deadline_when_everybody_is_lost() -> None:
    end = closed(
        play(
            new_round("ab"),
            (1, DeviceDisconnected("a", "gone")),
            (1, AssignmentFailed("b", "assignment-b", "task-error", "x")),
        )
    )
    assert end.reason == "too-few"


def test_a_stop_gives_all_back() -> None:
    end = closed(play(new_round("ab"), (1, header("a")), (2, Stop())))
    assert (end.reason, end.dropped) == ("stopped", (update("a"),))


def test_an_answer_before_the_deadline_is_in_time_however_late_its_addition_ends() -> None:
    r = new_round("a")
    assert isinstance(r.on(header("a"), 109.9)[0], AggregateUpdate)
    assert r.on(Tick(), 150.0) == []
    assert closed(r.on(AggregationDone(update("a")), 160.0)).reason == "all"


def test_an_answer_after_the_deadline_is_deferred_while_additions_run() -> None:
    r = new_round("ab")
    r.on(header("a"), 109.0)
    assert r.on(header("b"), 110.0) == [DeferUpdate(update("b"))]
    assert closed(r.on(AggregationDone(update("a")), 111.0)).reason == "deadline"


def test_a_late_answer_is_aggregated_with_its_discount_and_counts_for_no_target() -> None:
    r = new_round("ab", target_updates=2, staleness_exponent=0.5)
    late = AggregateUpdate(update("z", 3), staleness=3, discount=0.5, late=True)
    assert play(r, (1, header("z", "assignment-old", base=3, sequence=3))) == [late]
    assert not r.closed
    assert closed(play(r, (2, header("a")), (3, header("b")))).aggregated == (update("z", 3), update("a"), update("b"))


def test_a_late_answer_is_dropped_where_the_plan_says_so() -> None:
    assert play(new_round(late="drop"), (1, header("z", "assignment-old", base=5))) == [DropUpdate(update("z"), "late")]


def test_an_answer_that_is_just_not_too_old_counts() -> None:
    (accepted,) = play(new_round(max_staleness=2), (1, header("z", "assignment-old", base=4)))
    assert isinstance(accepted, AggregateUpdate) and accepted.staleness == 2


def test_an_answer_that_is_too_old_is_dropped() -> None:
    assert play(new_round(max_staleness=2), (1, header("z", "assignment-old", base=3))) == [
        DropUpdate(update("z"), "stale")
    ]


def test_a_second_answer_to_one_assignment_is_dropped() -> None:
    actions = play(new_round("ab"), (1, header("a")), (2, header("a", sequence=2)))
    assert actions[-1] == DropUpdate(update("a", 2), "duplicate")


def test_a_payload_that_is_not_valid_is_dropped_and_the_round_closes() -> None:
    r = new_round("a")
    r.on(header("a"), 101.0)
    actions = r.on(AggregationRejected(update("a"), "bad-payload"), 102.0)
    assert actions[0] == DropUpdate(update("a"), "bad-payload")
    assert closed(actions).reason == "too-few"


def test_a_device_that_left_and_came_back_in_time_is_waited_for_again() -> None:
    r = new_round("ab")
    assert isinstance(play(r, (1, DeviceDisconnected("a", "gone")))[0], MarkLost)
    play(r, (2, DeviceConnected("a")), (3, header("b")))
    assert not r.closed
    assert closed(play(r, (4, header("a")))).reason == "all"


def test_an_answer_of_a_device_that_was_given_up_still_counts() -> None:
    r = new_round("ab")
    play(r, (1, DeviceDisconnected("a", "gone")), (2, header("a")))
    assert r.outstanding == ("b",)


def test_a_late_answer_of_a_device_that_left_says_not_that_it_is_back() -> None:
    r = new_round("ab")
    play(r, (1, DeviceDisconnected("a", "gone")), (2, header("a", "assignment-old", base=5)))
    assert list(r.outstanding) == ["b"], "what it sent before it left may come after"
    assert play(r, (3, DeviceConnected("a"))) == [Reinstate("a", "assignment-a")]
    assert list(r.outstanding) == ["a", "b"]


def test_it_is_shut_after_a_restart_by_what_shut_it_before() -> None:
    r = new_round("abc")
    r.replay(
        [(AssignmentFailed("c", "assignment-c", "offline", "gone"), 102.0), (header("a"), 104.0), (header("b"), 105.0)]
    )
    assert r.on(DeviceConnected("c"), 105.0) == [] and r.on(AggregationDone(update("a")), 105.0) == []
    end = closed(r.on(AggregationDone(update("b")), 105.0))
    assert (end.reason, end.aggregated) == ("enough", (update("a"), update("b")))


def test_who_was_back_before_a_restart_is_waited_for_after_it() -> None:
    r = new_round("abc")
    left, back = (AssignmentFailed("c", "assignment-c", "offline", "gone"), 102.0), (DeviceConnected("c"), 103.0)
    r.replay([left, back, (header("a"), 104.0), (header("b"), 105.0)])
    assert (r.outstanding, r.shut) == (("c",), None)


def test_nothing_goes_into_a_closed_round() -> None:
    r = new_round("a")
    play(r, (1, header("a")))
    with pytest.raises(RuntimeError, match="closed"):
        r.on(Tick(), 200.0)


@pytest.mark.parametrize(
    ("share", "assigned", "min_updates"), [(0.5, 8, 4), (0.5, 7, 4), (0.01, 3, 1), (3, 8, 3), (0.75, 4, 3)]
)
def test_the_floor_is_a_share_or_a_count(share: float, assigned: int, min_updates: int) -> None:
    assert min_updates_of(share, assigned) == min_updates


events = st.one_of(
    st.builds(
        lambda d, s, base: ("header", d, s, base), st.sampled_from("abcdef"), st.integers(1, 3), st.integers(0, 6)
    ),
    st.builds(lambda d: ("offline", d), st.sampled_from("abcdef")),
    st.builds(lambda d: ("joined", d), st.sampled_from("abcdef")),
    st.builds(lambda d: ("failed", d), st.sampled_from("abcdef")),
    st.builds(lambda bad: ("addition", bad), st.booleans()),
    st.builds(lambda s: ("wait", s), st.floats(0.1, 4)),
    st.just(("stop",)),
)


@given(
    st.lists(events, max_size=40),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from(["aggregate", "drop"]),
    st.dictionaries(st.sampled_from("efg"), st.floats(0, 12)),
)
def test_every_answer_has_one_outcome_and_a_round_closes_as_soon_as_nobody_can_answer(
    script: list[tuple[object, ...]], target: int, min_updates: int, late: str, needs_s: dict[str, float]
) -> None:
    r = new_round("abcd", target_updates=target, min_updates=min_updates, late=late)
    now, adding, outcomes, deferred = 100.0, list[UpdateId](), dict[UpdateId, str](), set[UpdateId]()

    def replacements(left_s: float) -> list[Replacement]:
        return [Replacement(d, f"assignment-{d}") for d, seconds in needs_s.items() if seconds <= left_s]

    def feed(event: object) -> None:
        before = set(r.assignments)
        for action in r.on(event, now, replacements):  # type: ignore[arg-type]  # the script holds inputs
            match action:
                case SelectReplacement(device, _, base, deadline_s):
                    assert device not in before and needs_s[device] <= deadline_s == 110.0 - now and base == 6
                case AggregateUpdate(update_id):
                    assert update_id not in outcomes
                    outcomes[update_id] = "accepted"
                    adding.append(update_id)
                case DropUpdate(update_id):
                    assert outcomes.get(update_id) in (None, "accepted")
                    outcomes[update_id] = "dropped"
                case DeferUpdate(update_id):
                    deferred.add(update_id)
        if not r.closed:
            assert r.aggregating or (r.outstanding and now < 110.0), "it waits for nobody"
            waiting = set(needs_s) - set(r.assignments)
            short = r.possible < target and bool(r.lost or r.rejected_in_time) and not r.shut
            assert not (short and any(needs_s[d] <= 110.0 - now for d in waiting)), "somebody could be selected"

    for step in [*script, ("wait", 50.0)]:
        if r.closed:
            break
        match step:
            case ("header", str(d), int(s), int(base)):
                if (u := update(d, s)) not in outcomes:  # the driver acks what it has decided
                    feed(UpdateArrived(u, f"assignment-{d}" if d in r.assignments else f"old-{d}", d, base))
            case ("offline", str(d)):
                feed(DeviceDisconnected(d, "gone"))
            case ("joined", str(d)):
                feed(DeviceConnected(d))
            case ("failed", str(d)):
                feed(AssignmentFailed(d, f"assignment-{d}", "task-error", "x"))
            case ("addition", bool(bad)) if adding:
                u = adding.pop(0)
                feed(AggregationRejected(u, "bad-payload") if bad else AggregationDone(u))
            case ("wait", float(seconds)):
                now += seconds
                feed(Tick())
            case ("stop",):
                feed(Stop())
    while adding and not r.closed:
        feed(AggregationDone(adding.pop(0)))
    assert r.closed, "a round must close once its deadline has passed and its additions have ended"
    assert set(r.closed.aggregated) | set(r.closed.dropped) == set(outcomes)
    assert not set(r.closed.aggregated) & set(r.closed.dropped)
    assert len(set(r.closed.aggregated)) == len(r.closed.aggregated)
    assert r.closed.reason in ("all", "enough", "deadline", "too-few", "stopped")
    if r.closed.reason not in ("too-few", "stopped"):
        assert len(r.closed.aggregated) >= min_updates
