"""Rounds that rather draw the fast and leave nobody out, and rounds in which only so many are at work at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.test_cohort_and_deadline import plan
from tests.server.test_replacements import Idle, assigned
from tests.server.test_round import closed, header, new_round, play
from tests.support.server_bench import Bench, drive_through, killed, scripted
from thinwire.core import Layout, RunPlan, VirtualClock
from thinwire.core.events import ClientSelected, Event, RoundClosed, RoundOpened, UpdateAccepted
from thinwire.core.statedir import AggregatorHome
from thinwire.core.types import Assignment, UpdateId
from thinwire.reports.reason_text import sentence
from thinwire.server.concurrency import at_work_before, slot_s, slowest_s
from thinwire.server.policy.cohort import LEAST, sample, select_clients, weights
from thinwire.server.round_events import AssignmentFailed, DeviceDisconnected, Input, SelectReplacement, SlotLease, Tick
from thinwire.server.state.run_state import RunState
from thinwire.simulation import (
    Behavior,
    InMemorySpool,
    ScriptedDevice,
    ScriptedFleet,
    SyntheticUpdates,
    run_scripted,
    task_report,
)
from thinwire.store import Store

LAYOUT = Layout.of({"w": (40,)})
measured = st.dictionaries(
    st.sampled_from([f"pi-{i:02}" for i in range(20)]), st.none() | st.floats(0, 1e9), min_size=1
)


@given(measured)
def test_weights_are_bounded_and_fall_with_the_seconds(seconds: dict[str, float | None]) -> None:
    found = weights("speed", seconds, "step").each
    assert found or all(taken is None for taken in seconds.values())
    assert all(LEAST <= weights <= 1.0 for weights in found.values())
    for device, taken in seconds.items():
        for other, more in seconds.items():
            if found and taken is not None and more is not None and taken <= more:
                assert found[device] >= found[other]
            if found and taken is None:
                assert found[device] == 1.0


@settings(deadline=None)
@given(measured, st.integers(1, 50), st.integers(1, 8), st.randoms())
def test_a_draw_depends_on_seed_round_candidates_and_weights_only(
    seconds: dict[str, float | None], number: int, count: int, order: object
) -> None:
    found, candidates = weights("link", seconds, "exchange"), sorted(seconds)
    sampled = sample(3, number, candidates, min(count, len(candidates)), found)
    assert sampled == sample(3, number, candidates, min(count, len(candidates)), found)
    assert len(set(sampled)) == min(count, len(candidates)) and set(sampled) <= set(candidates)


def test_the_slowest_is_drawn_less_often_and_again_and_again() -> None:
    seconds = {**{f"pi-{i}": 1.0 for i in range(9)}, "pi-9": 1e6}
    found = weights("speed", seconds, "step")
    counts = Counter(device for number in range(2000) for device in sample(3, number, sorted(seconds), 3, found))
    assert 40 < counts["pi-9"] < 160, counts  # about an eighth of what the others have
    assert all(550 < counts[f"pi-{i}"] < 750 for i in range(9)), counts


def test_nobody_is_preferred_while_nobody_is_measured() -> None:
    present = [f"pi-{i}" for i in range(10)]
    unmeasured = weights("speed", dict.fromkeys(present), "step")
    uniform = select_clients(plan(clients=3), 5, present, {}, {})
    sampled = select_clients(plan(clients=3, selection="speed"), 5, present, {}, {}, lambda candidates: unmeasured)
    assert sampled.selected == uniform.selected
    assert sentence(sampled.sampling) == "sampled by speed: no device is measured yet, so all have the same weight"


def test_who_was_not_drawn_is_told_its_weights() -> None:
    found = weights("speed", {"a": 1.0, "b": 1.0, "c": 4.0, "d": None}, "step")
    for number in range(20):
        cohort = select_clients(
            plan(clients=2, selection="speed"), number, list("abcd"), {}, {}, lambda candidates: found
        )
        assert set(cohort.selected) | set(cohort.reasons) == set("abcd")
        if "c" in cohort.reasons:
            assert sentence(cohort.reasons["c"]) == (
                "not sampled: its weight is 0.25 of the fastest's, with 4.00 s for each step"
            )


def test_a_cohort_larger_than_may_be_at_work_is_selected_in_part() -> None:
    present = [f"pi-{i}" for i in range(9)]
    cohort = select_clients(plan(clients=6, max_concurrency=4), 2, present, {}, {})
    assert (len(cohort.selected), len(cohort.later), cohort.target_updates) == (4, 2, 6)
    assert set(cohort.selected + cohort.later) == set(select_clients(plan(clients=6), 2, present, {}, {}).selected)
    assert {sentence(cohort.reasons[d]) for d in cohort.later} == {
        "selected when a concurrency slot is free: at most 4 devices work at once"
    }


def test_the_next_is_selected_when_a_place_is_free() -> None:
    r = new_round("ab", target_updates=4, max_concurrency=2)
    assert assigned(r.on(Tick(), 100.5, Idle(c=3.0, d=3.0))) == []
    assert assigned(r.on(header("a"), 101.0, Idle(c=3.0, d=3.0))) == ["c"]
    assert assigned(r.on(DeviceDisconnected("b", "gone"), 102.0, Idle(c=3.0, d=3.0))) == ["d"]
    assert r.outstanding == ("c", "d")


def test_a_round_without_time_for_the_rest_closes_with_those_it_has() -> None:
    r = new_round("a", target_updates=2, max_concurrency=1)
    assert closed(play(r, (4, header("a")))).reason == "enough"


def test_who_is_silent_for_its_share_of_the_deadline_holds_no_place() -> None:
    r = new_round("a", target_updates=2, max_concurrency=1)  # two groups in 10 s
    assert assigned(r.on(Tick(), 104.9, Idle(b=3.0))) == []
    found = r.on(Tick(), 105.0, Idle(b=3.0))
    assert assigned(found) == ["b"]
    assert isinstance(found[-1], SelectReplacement) and sentence(found[-1].why).endswith(
        "; too long without a reply to hold a concurrency slot: 1 (a)"
    )
    assert closed(play(r, (6, header("b")), (7, header("a")))).reason == "all", "its answer still counts"


def test_who_was_slow_before_holds_its_place_for_twice_as_long() -> None:
    r = new_round("a", target_updates=3, deadline_s=15.0, max_concurrency=1, slowest_s=lambda device: 4.0)
    assert assigned(r.on(Tick(), 107.9, Idle(b=1.0))) == []
    assert assigned(r.on(Tick(), 108.0, Idle(b=1.0))) == ["b"]


def test_who_was_slow_before_holds_no_place_that_a_step_needs() -> None:
    """Five seconds are a share; two answers make a step, and need the last ten."""
    r = new_round(
        "a", target_updates=3, min_updates=2, deadline_s=15.0, max_concurrency=1, slowest_s=lambda device: 100.0
    )
    assert assigned(r.on(Tick(), 104.9, Idle(b=4.0, c=4.0))) == []
    assert assigned(r.on(Tick(), 105.0, Idle(b=4.0, c=4.0))) == ["b"]
    assert assigned(r.on(header("b"), 109.0, Idle(c=4.0))) == [], "the last five are enough for the last one"
    assert assigned(r.on(Tick(), 110.0, Idle(c=4.0))) == ["c"]


def test_who_was_slow_before_holds_its_place_where_a_step_lacks_nothing() -> None:
    r = new_round(
        "ab", target_updates=4, min_updates=1, deadline_s=15.0, max_concurrency=2, slowest_s=lambda device: 100.0
    )
    assert assigned(r.on(header("b"), 101.0, Idle(c=4.0))) == ["c"]
    r.on(AssignmentFailed("c", "assignment-c", "task-error", "x"), 102.0)
    assert assigned(r.on(Tick(), 114.0, Idle(d=0.5, e=0.5))) == ["d"], "one place is free, the other still a's"


def test_one_answer_that_took_hours_holds_no_place_for_longer_than_a_rounds_deadline() -> None:
    past = RunState()
    past.reply_seconds["a"] = [28_800.0]
    past.apply(RoundOpened(0.0, 1, 100.0, 0, "", ["a"], {"a": "assignment-a"}, "identity", 10.0, 1, 1))
    assert slot_s(10.0, 2.5, slowest_s(past, "a")) == 10.0
    assert at_work_before(past, 2) == {"a": SlotLease("assignment-a", 120.0)}, "once more as long as it was given"
    past.reply_seconds["a"] = [6.0]
    assert at_work_before(past, 2) == {"a": SlotLease("assignment-a", 112.0)}


def test_a_round_goes_on_while_earlier_ones_hold_all_places() -> None:
    r = new_round("a", target_updates=3, max_concurrency=1, earlier={"x": SlotLease("assignment-old", 1e9)})
    assert assigned(r.on(Tick(), 100.5, Idle(b=1.0, c=1.0))) == []
    found = r.on(header("a"), 101.0, Idle(b=1.0, c=1.0))
    assert assigned(found) == ["b"], "one at once"
    assert isinstance(found[-1], SelectReplacement)
    assert sentence(found[-1].why).endswith("; no concurrency slot is free, but no device works on this round")
    assert assigned(r.on(header("b"), 102.0, Idle(c=1.0))) == ["c"]


def test_the_silent_are_named_in_so_many_words_however_many_they_are() -> None:
    silent, others = [f"s{i:03}" for i in range(60)], {f"o{i:03}": 0.5 for i in range(60)}
    r = new_round(silent, target_updates=120, max_concurrency=60)
    found = [each for each in r.on(Tick(), 105.0, Idle(**others)) if isinstance(each, SelectReplacement)]
    assert len(found) == 60
    said = "; too long without a reply to hold a concurrency slot: 60 (s000, s001, s002, s003, s004, ...)"
    assert all(sentence(each.why).endswith(said) for each in found)


@pytest.mark.parametrize(
    "over",
    [
        header("x", "assignment-old"),
        AssignmentFailed("x", "assignment-old", "task-error", ""),
        DeviceDisconnected("x", "gone"),
        Tick(),
    ],
)
def test_who_is_at_work_on_an_earlier_round_holds_a_place(over: Input) -> None:
    r = new_round("a", target_updates=3, max_concurrency=2, earlier={"x": SlotLease("assignment-old", 105.0)})
    assert assigned(r.on(Tick(), 100.5, Idle(b=1.0, c=1.0))) == []
    assert assigned(r.on(header("a"), 101.0, Idle(b=1.0, c=1.0))) == ["b"]
    assert assigned(r.on(over, 105.0 if over == Tick() else 102.0, Idle(c=1.0))) == ["c"]


def test_a_cohort_finds_as_many_places_as_earlier_rounds_leave() -> None:
    present = [f"pi-{i}" for i in range(5)]
    cohort = select_clients(plan(max_concurrency=3), 2, present, {}, {"pi-0": 1}, at_work=1)
    assert (len(cohort.selected), len(cohort.later), cohort.target_updates) == (2, 2, 4)


def test_one_of_a_cohort_is_selected_though_earlier_rounds_hold_all_places() -> None:
    present = [f"pi-{i}" for i in range(5)]
    for at_work in (1, 2):
        cohort = select_clients(plan(max_concurrency=1), 2, present, {}, {"pi-0": 1}, at_work=at_work)
        assert (len(cohort.selected), len(cohort.later), cohort.target_updates) == (1, 3, 4)
        assert {sentence(cohort.reasons[d]) for d in cohort.later} == {
            f"no concurrency slot is free: {at_work} devices work on earlier rounds, and at most 1 work at once"
        }
    assert select_clients(plan(max_concurrency=1), 2, ["pi-0"], {}, {"pi-0": 1}, at_work=1).selected == ()


def played(folder: Path, speeds: Mapping[str, float | list[float]], **cohort: object) -> list[Event]:
    raw = {"run": {"task": "toy", "rounds": 30, "evaluate": "off"}, "local": {"lr": 1, "steps": 1}}
    made = RunPlan.from_json({**raw, "uplink": {"codec": "identity", "feedback": "none"}, "cohort": cohort})
    home = AggregatorHome.under(folder, durable=False)

    def of_speed(name: str, speed: float | list[float]) -> ScriptedDevice:
        def script(assignment: Assignment) -> Behavior:
            seconds = speed if isinstance(speed, float) else speed.pop(0)
            return Behavior(download_s=seconds / 4, compute_s=seconds / 2, upload_s=seconds / 4)

        return ScriptedDevice(name, SyntheticUpdates(name, LAYOUT), script)

    devices = [of_speed(*one) for one in speeds.items()]
    fleet = ScriptedFleet(InMemorySpool(home.spool), VirtualClock(), task_report(made, LAYOUT), devices)
    with Store.open(home.database, durable=False) as store:
        run_id = run_scripted(made, LAYOUT, fleet, store=store, home=home)
        return [event for _, event in store.events(run_id)]


@pytest.mark.parametrize(("selection", "of"), [("speed", "step"), ("link", "exchange")])
def test_a_run_learns_who_is_quick_and_draws_those_more_often(tmp_path: Path, selection: str, of: str) -> None:
    speeds = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 50.0, "e": 50.0, "f": 50.0}
    events = played(tmp_path, speeds, clients=2, wait_for=6, selection=selection, deadline_s=600)
    opened = [event for event in events if isinstance(event, RoundOpened)]
    counts = Counter(device for event in opened for device in event.assignments)
    assert 2 * sum(counts[d] for d in "def") < sum(counts[d] for d in "abc"), counts
    assert "no device is measured yet" in sentence(opened[0].sampling)
    assert f"{of}, weights from 1 to 0.12" in sentence(opened[-1].sampling)


def test_no_more_are_at_work_than_the_plan_allows_and_all_are_selected(tmp_path: Path) -> None:
    speeds = {name: 1.0 + i for i, name in enumerate("abcdefg")}
    events = played(tmp_path, speeds, wait_for=7, max_concurrency=3, deadline_s=100)
    at_work, most = set[str](), 0
    for event in events:
        match event:
            case RoundOpened():
                at_work |= event.assignments.keys()
            case ClientSelected():
                at_work.add(event.device)
            case UpdateAccepted():
                at_work.discard(event.device)
        most = max(most, len(at_work))
    assert most == 3
    closings = [event for event in events if isinstance(event, RoundClosed)]
    assert {(event.reason, len(event.aggregated)) for event in closings} == {("all", 7)}


def test_a_frozen_device_keeps_nobody_from_being_selected(tmp_path: Path) -> None:
    speeds = {"a": 1e9, "b": 1.0, "c": 1.0, "d": 1.0}
    events = played(tmp_path, speeds, wait_for=4, max_concurrency=1, deadline_s=100)
    for closing in (event for event in events if isinstance(event, RoundClosed)):
        assert {UpdateId.parse(each).device for each in closing.aggregated} == set("bcd")


def test_a_frozen_device_that_was_slow_once_stops_no_run(tmp_path: Path) -> None:
    speeds: dict[str, float | list[float]] = {"a": [100.0] + 30 * [1e9], "b": 4.0, "c": 4.0, "d": 4.0}
    events = played(tmp_path, speeds, wait_for=4, max_concurrency=1, deadline_s=20, max_staleness=60)
    assert [event.device for event in events if isinstance(event, UpdateAccepted) and event.late] == ["a"]
    rounds = [event for event in events if isinstance(event, RoundOpened | RoundClosed)]
    waits = [then.elapsed_s - one.elapsed_s for one, then in pairwise(rounds) if isinstance(then, RoundOpened)]
    assert len(waits) >= 29 and max(waits) < 1.0


def test_a_slow_device_that_freezes_costs_no_round(tmp_path: Path) -> None:
    speeds: dict[str, float | list[float]] = {"a": [15.0] + 30 * [1e9], "b": 4.0, "c": 4.0, "d": 4.0}
    events = played(tmp_path, speeds, wait_for=4, max_concurrency=1, deadline_s=20, max_staleness=3)
    assert "too-few" not in [event.reason for event in events if isinstance(event, RoundClosed)]
    assert any(
        event.assignments.keys() == {"a"} for event in events if isinstance(event, RoundOpened) and event.round > 1
    )


def test_a_device_that_is_still_at_work_on_an_earlier_round_holds_a_place(tmp_path: Path) -> None:
    speeds = {"a": 150.0, "b": 30.0, "c": 30.0, "d": 30.0}
    events = played(tmp_path, speeds, wait_for=4, max_concurrency=2, deadline_s=100)
    known = next(i for i, event in enumerate(events) if isinstance(event, UpdateAccepted) and event.device == "a")
    at_work, alone = set[str](), 0
    for i, event in enumerate(events):
        match event:
            case RoundOpened():
                alone += at_work == {"a"}
                at_work |= event.assignments.keys()
            case ClientSelected():
                at_work.add(event.device)
            case UpdateAccepted():
                at_work.discard(event.device)
        assert i < known or len(at_work) <= 2
    assert alone > 3, "rounds did begin while it was at work"


def test_a_kill_at_any_commit_leaves_nobody_out_and_assignments_nobody_twice(tmp_path: Path) -> None:
    def three(folder: Path) -> Bench:
        more = {"wait_for": 3, "max_concurrency": 1, "deadline_s": 100}
        return Bench(folder, [scripted(each) for each in "abc"], run={"rounds": 1}, cohort=more)

    def check(made: Bench, where: str) -> None:
        assert made.reasons() == ["all"], where
        opened = [assignment_id for event in made.events(RoundOpened) for assignment_id in event.assignments.values()]
        assigned_now = [event.assignment_id for event in made.events(ClientSelected)]
        assert len(opened) == 1 and len(assigned_now) == len(set(assigned_now)) == 3
        assert len(made.events(UpdateAccepted)) == 3

    killed(three, tmp_path, drive_through(three(tmp_path / "undisturbed")), check)
