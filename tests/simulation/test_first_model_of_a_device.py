"""[run] init = "device": whom the seed draws for the first model, whose is taken, and what no kill may change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.crashes import Fate, Killed, around_commits
from tests.support.first_model_runs import NAMES, NOT_NOW, REFUSES, Started, drawn, fails, plan
from tests.support.reasons import noted
from tests.support.small_task import task_of
from thinwire.client.task import initial_model
from thinwire.core.events import ClientFailed, RunNoted, RunStatusChanged
from thinwire.core.fleet import Arrival, Envelope
from thinwire.core.run_events import FirstModelAssigned, FirstModelFailed
from thinwire.core.types import ReplyHeader
from thinwire.reports.reason_text import sentence
from thinwire.simulation import Behavior, Script, simulate
from thinwire.store import MeasureRow


def test_the_run_begins_with_what_the_device_s_task_makes_of_the_run_s_seed(tmp_path: Path) -> None:
    made = Started(tmp_path)
    made.drive()
    assert made.store.run(made.run_id).status == "done"
    assert (made.first == initial_model(task_of(), plan().run.seed).vector).all()
    assert made.assigned() == [made.giver()]


def test_who_cannot_is_passed_over_and_if_nobody_can_the_run_says_what_each_said(tmp_path: Path) -> None:
    one, two, _ = drawn(tmp_path)
    made = Started(tmp_path / "refused", {one: fails(REFUSES)})
    made.drive()
    assert made.store.run(made.run_id).status == "done"
    assert made.assigned() == [one, two] and made.giver() == two
    none = Started(tmp_path / "none", dict.fromkeys(NAMES, fails(REFUSES)))
    none.drive()
    row = none.store.run(none.run_id)
    assert (row.status, row.exit_code) == ("failed", 6)
    assert all(f"{name}: task-error: x" in row.status_text for name in NAMES)


def test_who_was_selected_and_why_another_was_stands_among_what_is_shown_of_the_run(tmp_path: Path) -> None:
    one, two, _ = drawn(tmp_path)
    made = Started(tmp_path / "refused", {one: fails(REFUSES)})
    made.drive()
    notes = [note for note in map(sentence, made.store.run(made.run_id).notes) if "first model" in note]
    assert notes[0] == f"{one}, which makes the first model: task-error: x"
    assert notes[1].startswith(f"{two} makes the first model; the seed selected it from 2; it replaces {one} (task-err")
    assert "it may take 60.1 s; 60 s to make the model, and 3 times the 0.0 s to upload its 60 bytes" in notes[1]
    assert notes[2] == f"the first model is {two}'s" and len(notes) == 3
    assert [sentence(event.note) for event in made.of(FirstModelFailed)] == [notes[0]]


def test_who_declines_for_now_is_selected_again_when_that_has_passed(tmp_path: Path) -> None:
    first = {name: fails(NOT_NOW, REFUSES) for name in NAMES}
    one, *_ = order = drawn(tmp_path)
    seen = iter([NOT_NOW])
    first[one] = lambda assignment: Behavior(failure=next(seen, None))
    made = Started(tmp_path / "declined", first)
    made.drive()
    assert made.store.run(made.run_id).status == "done"
    assert made.assigned() == [*order, one] and made.giver() == one
    assignments = made.of(FirstModelAssigned)
    assert 7200 <= assignments[-1].elapsed_s - made.of(FirstModelFailed)[0].elapsed_s <= 7201
    assert "selected again" in sentence(assignments[-1].why)
    waiting = [event.text for event in made.of(RunStatusChanged) if event.status == "waiting"]
    assert any("no device can give the first model now" in text and NOT_NOW[1] in text for text in waiting)


def test_who_left_for_a_moment_is_selected_again_after_the_others(tmp_path: Path) -> None:
    one, two, three = drawn(tmp_path)
    slow = {one: lambda assignment: Behavior(download_s=5.0), two: fails(REFUSES), three: fails(REFUSES)}
    made = Started(tmp_path / "offline", slow, {one: [(3.0, 40.0)]})
    made.drive()
    assert made.store.run(made.run_id).status == "done"
    assert made.assigned() == [one, two, three, one] and made.giver() == one
    assert [event.kind for event in made.of(FirstModelFailed)] == ["offline", "task-error", "task-error"]


def test_who_still_makes_one_when_a_person_stops_the_run_has_not_failed(tmp_path: Path) -> None:
    made = Started(tmp_path, dict.fromkeys(NAMES, lambda assignment: Behavior(download_s=50.0)))
    made.drive(until=10.0, ends="run")
    (over,) = made.of(FirstModelFailed)
    assert ([over.device], over.kind) == (made.assigned(), "over")
    assert made.events.index(over) < len(made.events) - 1 and made.store.run(made.run_id).status == "stopped"


@pytest.mark.parametrize("first", [fails(NOT_NOW), fails(REFUSES)])
def test_while_nobody_can_give_it_the_run_waits_as_long_as_the_plan_says(tmp_path: Path, first: Script) -> None:
    made = Started(tmp_path, dict.fromkeys(NAMES, first), cohort={"wait_s": 100})
    made.drive()
    row = made.store.run(made.run_id)
    assert (row.status, row.exit_code) == ("failed", 6)
    assert 100 <= made.fleet.virtual.now() <= 110


def test_who_comes_while_the_run_waits_is_selected(tmp_path: Path) -> None:
    *_, last = drawn(tmp_path)
    refusing = dict.fromkeys([name for name in NAMES if name != last], fails(REFUSES))
    made = Started(tmp_path / "late", refusing, {last: [(0.0, 90.0)]}, cohort={"wait_s": 100})
    made.drive()
    assert made.giver() == last


def test_after_a_restart_the_same_device_is_waited_for_though_the_others_are_back_before_it(tmp_path: Path) -> None:
    one, *_ = drawn(tmp_path)
    made = Started(tmp_path / "again", {one: lambda assignment: Behavior(download_s=5.0)}, {one: [(3.0, 20.0)]})
    made.fleet.grace_s = 60.0  # its leaving is not known before the aggregator dies
    made.drive(until=10.0)
    made.fleet = made.fleet.restart()
    made.drive()
    assert made.assigned() == [one] and made.giver() == one
    assert made.store.run(made.run_id).status == "done"


def test_of_two_devices_that_have_made_one_the_first_that_was_taken_counts(tmp_path: Path) -> None:
    """The first is given up after a restart, since it stays away for long; its answer comes while the second works."""
    one, two, _ = drawn(tmp_path)
    first = {
        one: lambda assignment: Behavior(download_s=2.0, upload_s=2.0),
        two: lambda assignment: Behavior(download_s=30.0),
    }
    made = Started(tmp_path / "two", first, {one: [(3.0, 50.0)]})
    made.fleet.grace_s = 60.0
    made.drive(until=10.0)
    made.fleet = made.fleet.restart()
    made.drive()
    assert made.assigned() == [one, two] and made.giver() == two
    assert [(event.kind, event.reason) for event in made.of(FirstModelFailed)] == [("offline", "did not come back")]
    assert made.store.run(made.run_id).status == "done"
    assert made.of(ClientFailed) == []
    assert made.fleet.spool.headers() == []


def test_what_came_before_a_restart_is_looked_for_before_anybody_is_selected_again(tmp_path: Path) -> None:
    made = Started(tmp_path)
    poll = made.fleet.poll

    def dies(wait_s: float) -> Sequence[Arrival]:
        arrivals = poll(wait_s)
        if any(isinstance(arrival, ReplyHeader) for arrival in arrivals):
            raise Killed
        return arrivals

    made.fleet.poll = dies  # type: ignore[method-assign]  # a crash
    with pytest.raises(Killed):
        made.drive()
    assert made.of(RunNoted) == [] and len(made.fleet.spool.headers()) == 1, "it is here, and nobody has taken it"
    made.fleet, assigned = made.fleet.restart(), list[str]()
    send = made.fleet.send

    def noted(assignments: Sequence[Envelope]) -> None:
        assigned.extend(envelope.assignment.kind for envelope in assignments)
        send(assignments)

    made.fleet.send = noted  # type: ignore[method-assign]  # a spy
    made.drive()
    assert made.store.run(made.run_id).status == "done"
    assert "init" not in assigned and made.assigned() == [made.giver()]


def test_an_answer_that_comes_again_after_the_model_is_stored_is_thrown_away(tmp_path: Path) -> None:
    made = Started(tmp_path)
    acked = made.fleet.ack
    made.fleet.ack = lambda update_ids: die() if update_ids else acked(update_ids)  # type: ignore[method-assign]  # a crash
    with pytest.raises(Killed):
        made.drive()
    assert made.giver() and len(made.fleet.spool.headers()) == 1
    made.fleet = made.fleet.restart()
    made.drive()
    assert made.store.run(made.run_id).status == "done"
    assert made.of(ClientFailed) == [] and made.fleet.spool.headers() == []
    assert made.giver() == made.assigned()[0]


def test_who_is_silent_has_as_long_as_the_model_takes_on_a_thin_link(tmp_path: Path) -> None:
    one, two, _ = drawn(tmp_path)
    made = Started(tmp_path / "silent", {one: lambda assignment: Behavior(download_s=1e6)})
    made.drive()
    assert made.assigned() == [one, two] and made.giver() == two
    (failed,) = made.of(FirstModelFailed)
    assert (failed.kind, failed.reason) == ("stale", "no answer within 60.1 s")


def test_how_long_it_may_take_follows_from_the_device_s_link_where_that_was_measured(tmp_path: Path) -> None:
    made = Started(tmp_path)
    rows = [MeasureRow(name, "up", "", [[60.0, 10.0]], 48.0, 32.0, 0.0) for name in NAMES]
    made.store.record(made.run_id, [RunNoted(0.0, noted("measured before"))], rows)
    made.drive()
    (assigned,) = made.of(FirstModelAssigned)
    said = "60 s to make the model, and 3 times the 15.0 s to upload its 60 bytes"
    assert sentence(assigned.deadline_reason) == said, "half as long again as the one upload that was seen"


def die() -> None:
    raise Killed


def test_a_kill_at_any_commit_before_the_first_round_changes_no_bit(tmp_path: Path) -> None:
    for at in range(1, 11):
        made = Started(tmp_path / str(at))
        around_commits(Fate(at), made.store)
        with pytest.raises(Killed):
            made.drive()
        made.fleet = made.fleet.restart()
        made.drive()
        assert made.store.run(made.run_id).status == "done"
        assert (made.first == initial_model(task_of(), plan().run.seed).vector).all()
        assert made.assigned() == [made.giver()] and made.of(FirstModelFailed) == []


def test_a_simulation_assignments_one_of_its_clients() -> None:
    own, device = (simulate(task_of(), plan(init=init), clients=3) for init in ("", "device"))
    assert own.run.model_digest == device.run.model_digest
