"""[run] init = "device": how often a device is selected that is slow, away or silent, and when the run gives up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.first_model_runs import NAMES, NOT_NOW, REFUSES, Started, drawn, fails
from thinwire.core.events import RunStatusChanged
from thinwire.core.run_events import FirstModelAssigned
from thinwire.core.types import Assignment
from thinwire.reports.reason_text import sentence
from thinwire.server.context import RunContext
from thinwire.simulation import Behavior

MANY = tuple(f"sim-{index:02}" for index in range(12))


def slow(assignment: Assignment) -> Behavior:
    """Slower than one is given at first of which nothing is known."""
    return Behavior(download_s=70.0)


def silent(assignment: Assignment) -> Behavior:
    return Behavior(download_s=1e6)


def deadlines(made: Started) -> list[float]:
    return [event.deadline_s for event in made.of(FirstModelAssigned)]


def test_who_is_only_slow_is_selected_again_after_the_others_and_has_twice_as_long(tmp_path: Path) -> None:
    one, two, three = drawn(tmp_path)
    made = Started(tmp_path / "slow", dict.fromkeys(NAMES, slow))
    made.drive()
    assert made.store.run(made.run_id).status == "done"
    assert made.assigned() == [one, two, three, one] and made.giver() == one
    assert deadlines(made) == [60.1, 60.1, 60.1, 120.2]
    said = "2 times 60.1 s, since the device missed its deadline before; 60 s to make the model, and"
    assert sentence(made.of(FirstModelAssigned)[-1].deadline_reason).startswith(said)


def test_a_slow_device_that_is_alone_begins_again_with_more_time(tmp_path: Path) -> None:
    """By another assignment: it may not have let go of the first yet, and takes nothing up that it works on."""
    made = Started(tmp_path, {"sim-0": slow}, names=["sim-0"])
    made.drive()
    assert made.store.run(made.run_id).status == "done"
    assert made.assigned() == ["sim-0", "sim-0"] and made.giver() == "sim-0"
    assert len({event.assignment_id for event in made.of(FirstModelAssigned)}) == 2


@pytest.mark.parametrize(
    ("retries", "times"), [(0, [1]), (3, [1, 2, 4, 8]), (5, [1, 2, 4, 8, 8, 8])], ids=["once", "default", "capped"]
)
def test_who_is_silent_is_selected_as_often_as_the_plan_allows(tmp_path: Path, retries: int, times: list[int]) -> None:
    made = Started(tmp_path, {"sim-0": silent}, names=["sim-0"], cohort={"retry_limit": retries})
    made.drive()
    row = made.store.run(made.run_id)
    assert (row.status, row.exit_code) == ("failed", 6)
    assert deadlines(made) == pytest.approx([60.1 * often for often in times])
    assert f"sim-0: stale: no answer within {60.1 * times[-1]:g} s (assignments: {len(times)})" in row.status_text


def test_how_often_a_device_was_selected_outlives_a_restart(tmp_path: Path) -> None:
    made = Started(tmp_path, {"sim-0": silent}, names=["sim-0"])
    made.drive(until=200.0)
    made.fleet = made.fleet.restart()
    made.drive()
    assert made.store.run(made.run_id).status == "failed"
    assert deadlines(made) == pytest.approx([60.1, 120.2, 240.4, 480.8])


def test_who_dies_of_it_is_not_selected_without_bound_though_it_comes_again_each_time(tmp_path: Path) -> None:
    gone = [(3.0 + 10 * each, 8.0 + 10 * each) for each in range(200)]
    made = Started(
        tmp_path, dict.fromkeys(NAMES, lambda assignment: Behavior(download_s=30.0)), dict.fromkeys(NAMES, gone)
    )
    made.drive(until=1900)
    row = made.store.run(made.run_id)
    assert (row.status, row.exit_code) == ("failed", 6)
    assert sorted(made.assigned()) == sorted(4 * NAMES)
    assert all(f"{name}: offline: the link was closed (assignments: 4)" in row.status_text for name in NAMES)


LAST_ASSIGNMENT_S = 480.0  # eight times a minute, as the last assignment of one that is there and silent has


@pytest.mark.parametrize(
    ("revoked", "until", "status"),
    [(False, LAST_ASSIGNMENT_S, "waiting"), (False, LAST_ASSIGNMENT_S + 5, "failed"), (True, 100.0, "failed")],
)
def test_who_left_is_waited_for_as_long_as_one_that_is_silent_unless_it_was_revoked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revoked: bool, until: float, status: str
) -> None:
    """The others have said no for good, and `[cohort] wait_s` is 0."""
    one, two, three = drawn(tmp_path)
    first = {one: lambda assignment: Behavior(download_s=5.0), two: fails(REFUSES), three: fails(REFUSES)}
    made = Started(tmp_path / "offline", first, {one: [(3.0, 1e9)]})
    monkeypatch.setattr(RunContext, "revoked", lambda running: {one} if revoked and running.elapsed > 10 else set())
    made.drive(until=until)
    assert made.assigned() == [one, two, three]
    row = made.store.run(made.run_id)
    assert row.status == status
    assert (f"{one}: offline: the link was closed" in row.status_text) is not revoked


def test_a_task_that_is_broken_everywhere_is_not_tried_on_every_device(tmp_path: Path) -> None:
    made = Started(tmp_path, dict.fromkeys(MANY, fails(REFUSES)), names=MANY)
    made.drive()
    row, assigned = made.store.run(made.run_id), made.assigned()
    assert (row.status, row.exit_code) == ("failed", 6)
    assert len(assigned) == len(set(assigned)) == 10
    last = "; ".join(f"{name}: task-error: x" for name in assigned[:-6:-1])
    assert f"10 devices failed for good, the last of them {last}; and 5 more" in row.status_text


def test_where_nobody_answers_ten_are_selected_again_before_others_are(tmp_path: Path) -> None:
    made = Started(tmp_path, dict.fromkeys(MANY, silent), names=MANY)
    made.drive()
    assert made.store.run(made.run_id).status == "failed"
    assert len(set(made.assigned())) == 10 and len(made.assigned()) == 40


def test_devices_whose_policy_declines_say_nothing_of_the_task(tmp_path: Path) -> None:
    willing = drawn(tmp_path, MANY)[-1]
    first = {name: fails(("declined", "tasks: not this one")) for name in MANY if name != willing}
    made = Started(tmp_path / "willing", first, names=MANY)
    made.drive()
    assert made.giver() == willing and len(made.assigned()) == 12


def test_what_the_waiting_run_says_names_a_few_devices(tmp_path: Path) -> None:
    made = Started(tmp_path, dict.fromkeys(MANY, fails(NOT_NOW)), names=MANY, cohort={"wait_s": 100})
    made.drive()
    row = made.store.run(made.run_id)
    assert (row.status, row.exit_code) == ("failed", 6)
    waiting = [event.text for event in made.of(RunStatusChanged) if event.status == "waiting"]
    for text in (waiting[-1], row.status_text):
        assert [name for name in MANY if name in text] == list(MANY[:5]) and "; and 7 more" in text


def ends_while_one_is_at_it(folder: Path, restarted: bool = False) -> Started:
    """Two have refused when the aggregator ends; the third refuses after it. `restarted`: the first is started
    again.
    """
    one, two, three = drawn(folder)
    left = [REFUSES]

    def once(assignment: Assignment) -> Behavior:
        return Behavior(failure=left.pop()) if left else Behavior()

    def later(assignment: Assignment) -> Behavior:
        return Behavior(download_s=20.0, failure=REFUSES)

    made = Started(folder / "ended", {one: once if restarted else fails(REFUSES), two: fails(REFUSES), three: later})
    made.drive(until=5.0)
    assert made.assigned() == [one, two, three]
    if restarted:
        made.fleet.crash(one)
        made.fleet.connect(one)
    made.fleet = made.fleet.restart()
    made.drive()
    return made


def test_who_refused_before_a_restart_is_not_selected_again_after_it(tmp_path: Path) -> None:
    made = ends_while_one_is_at_it(tmp_path)
    row = made.store.run(made.run_id)
    assert sorted(made.assigned()) == sorted(NAMES)
    assert row.status == "failed" and all(f"{name}: task-error: x" in row.status_text for name in NAMES)


def test_who_refused_before_a_restart_and_was_restarted_is_selected_again(tmp_path: Path) -> None:
    made = ends_while_one_is_at_it(tmp_path, restarted=True)
    one, two, three = drawn(tmp_path / "order")
    assert made.assigned() == [one, two, three, one] and made.giver() == one
    assert made.store.run(made.run_id).status == "done"
