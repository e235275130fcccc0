"""What becomes of an assignment: shown from when it is sent until it has its outcome, whoever was selected when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.reasons import noted, sentences
from tests.support.store_agreement import assert_is_replayed, assert_sums_agree
from tests.support.store_story import DEVICES, accepted, closed, dropped, header, new_run, opened
from thinwire.core.events import (
    AssignmentDelivered,
    ClientFailed,
    ClientReconnected,
    ClientSelected,
    Event,
    FullModelSent,
)
from thinwire.reports.reason_text import sentence
from thinwire.store import Store


def test_a_device_that_had_left_and_is_back_is_at_work_again(store: Store) -> None:
    run_id = new_run(store)
    assignment_id = f"{run_id}.1.pi-02"
    left = ClientFailed(12.0, 1, "pi-02", assignment_id, "offline", "its connection is closed", 2.0)
    store.record(run_id, [*opened(run_id, 1), left])
    assert [u.outcome for u in store.updates(run_id, round=1) if u.device == "pi-02"] == ["failed"]
    store.record(run_id, [ClientReconnected(13.0, 1, "pi-02", assignment_id, 3.0)])
    assert [(u.outcome, u.reason) for u in store.updates(run_id, round=1) if u.device == "pi-02"] == [("selected", "")]
    assert [c.last_outcome for c in store.clients(run_id) if c.device == "pi-02"] == [
        "selected: it had left and is back"
    ]
    assert (store.run(run_id).failed, store.rounds(run_id)[0].failed) == (0, 0)
    assert_sums_agree(store, run_id)
    store.record(run_id, [left])
    assert store.rounds(run_id)[0].failed == 1, "it may leave again"


def test_an_assignment_that_was_open_when_its_run_ended_counts_as_nobody_s_failure(store: Store) -> None:
    run_id = new_run(store)
    over = ClientFailed(12.0, 1, "pi-02", f"{run_id}.1.pi-02", "over", "no answer was taken before the run's end", 2.0)
    store.record(run_id, [*opened(run_id, 1), over])
    shown = [(u.outcome, u.reason) for u in store.updates(run_id, round=1) if u.device == "pi-02"]
    assert shown == [("over", "no answer was taken before the run's end")]
    assert (store.run(run_id).failed, store.rounds(run_id)[0].failed) == (0, 0)
    assert [c.failed for c in store.clients(run_id)] == [0, 0, 0]
    assert_is_replayed(store, run_id)


def test_when_a_device_got_an_assignment_is_known_before_and_after_it_answered(store: Store) -> None:
    run_id = new_run(store)
    assignment_id = f"{run_id}.1.pi-01"
    store.record(run_id, [*opened(run_id, 1), AssignmentDelivered(10.5, 1, "pi-01", assignment_id)])
    store.record(
        run_id,
        [AssignmentDelivered(99.0, 1, "pi-01", assignment_id), AssignmentDelivered(99.0, 1, "pi-01", "of no round")],
    )
    reply = header(run_id, 1, "pi-01")
    assert [u.pulled_at for u in store.updates(run_id, round=1)] == [10.5, None, None], "the first time counts"
    assert reply.transfer is not None
    of_another_life = replace(reply, transfer=replace(reply.transfer, pulled_at=0.0))
    store.record(run_id, [accepted(of_another_life, 1)])
    assert store.updates(run_id, round=1)[0].pulled_at == 10.5
    assert_is_replayed(store, run_id)


def test_of_a_device_that_got_an_assignment_again_both_moments_are_kept(store: Store) -> None:
    run_id = new_run(store)
    store.record(run_id, [*opened(run_id, 1), AssignmentDelivered(10.5, 1, "pi-01", f"{run_id}.1.pi-01")])
    reply = header(run_id, 1, "pi-01")
    assert reply.transfer is not None
    again = replace(reply, transfer=replace(reply.transfer, pulled_at=27.5))
    store.record(run_id, [accepted(again, 1)])
    answered, waiting, _ = store.updates(run_id, round=1)
    assert (answered.delivered_at, answered.pulled_at) == (10.5, 27.5)
    assert (waiting.delivered_at, waiting.pulled_at) == (None, None)
    assert_is_replayed(store, run_id)


def test_a_device_that_is_selected_again_with_the_whole_model_was_not_gone(store: Store) -> None:
    run_id = new_run(store)
    assignment_id = f"{run_id}.1.pi-01"
    store.record(run_id, [*opened(run_id, 1), AssignmentDelivered(10.5, 1, "pi-01", assignment_id)])
    store.record(
        run_id,
        [FullModelSent(14.0, 1, "pi-01", assignment_id, 9), AssignmentDelivered(14.5, 1, "pi-01", assignment_id)],
    )
    reply = header(run_id, 1, "pi-01")
    assert reply.transfer is not None
    store.record(run_id, [accepted(replace(reply, transfer=replace(reply.transfer, pulled_at=14.5)), 1)])
    assert [(u.delivered_at, u.pulled_at) for u in store.updates(run_id, round=1)[:1]] == [(None, 14.5)]
    assert_is_replayed(store, run_id)


def test_an_assignment_is_shown_before_it_is_answered_and_with_its_numbers_after(store: Store) -> None:
    run_id = new_run(store)
    store.record(run_id, opened(run_id, 1))
    waiting = store.updates(run_id, round=1)
    assert [(u.device, u.outcome, u.payload_down, u.arrived_at) for u in waiting] == [
        (device, "selected", 1000, None) for device in DEVICES
    ]
    reply = header(run_id, 1, "pi-02")
    store.record(run_id, [accepted(reply, 1)])
    row = store.updates(run_id, 1)[1]
    assert (row.outcome, row.update_id, row.examples, row.steps, row.norm) == (
        "accepted",
        f"{run_id}/pi-02/1",
        40,
        5,
        1.5,
    )
    assert (row.pulled_at, row.began_at, row.arrived_at, row.assigned_at) == (11.0, 12.0, 13.0, 10.0)
    assert (row.download_s, row.queue_s, row.evaluate_s, row.train_s, row.encode_s) == (0.1, 0.2, 0.3, 0.4, 0.5)
    assert (row.payload_up, row.wire_up, row.wire_down, row.requests) == (101, 600, 500, 3)
    assert row.metrics == {"train/loss": 1.5}


@pytest.mark.parametrize("together", [True, False])
def test_who_is_selected_in_the_middle_of_a_round_stands_there_with_all_its_reasons(
    store: Store, together: bool
) -> None:
    run_id = new_run(store)
    since = [
        ClientSelected(
            12.0, 1, device, f"{run_id}.1.{device}", 1000, 2.0, 0, 50.0, noted("2 of 3 could come"), "pi-01",
            steps=4, batch=8, work_reason=noted("4 of 9 steps fit"), codec="sign", codec_reason=noted(f"fits {device}"),
        )
        for device in ("pi-08", "pi-09")
    ]  # fmt: skip
    events: list[Event] = [*opened(run_id, 1), *since]
    for batch in [events] if together else [[event] for event in events]:
        store.record(run_id, batch)
    (row,) = store.rounds(run_id)
    assert row.selected == [*DEVICES, "pi-08", "pi-09"]
    assert row.codecs == {"pi-08": "sign", "pi-09": "sign"}
    assert sentences(row.codec_reasons) == {"pi-08": "fits pi-08", "pi-09": "fits pi-09"}
    first, *_, last = store.updates(run_id)
    assert (first.selection_reason, first.instead_of, first.work_reason) == ([], "", [])
    assert (sentence(last.selection_reason), last.instead_of) == ("2 of 3 could come", "pi-01")
    assert sentence(last.work_reason) == "4 of 9 steps fit"


def test_a_failure_says_its_kind_and_does_not_undo_an_answer(store: Store) -> None:
    run_id = new_run(store)
    assignment = f"{run_id}.1."
    store.record(run_id, [*opened(run_id, 1), accepted(header(run_id, 1, "pi-02"), 1)])
    store.record(
        run_id, [ClientFailed(13.0, 1, d, assignment + d, "task-error", "KeyError task.py:7", 3.0) for d in DEVICES[:2]]
    )
    one, two, _ = store.updates(run_id, 1)
    assert (one.outcome, one.reason) == ("failed", "task-error: KeyError task.py:7")
    assert two.outcome == "accepted"
    assert store.rounds(run_id)[0].failed == 1


def test_a_second_answer_to_one_assignment_leaves_the_first_and_counts_its_sequence(store: Store) -> None:
    run_id = new_run(store)
    store.record(run_id, [*opened(run_id, 1), accepted(header(run_id, 1, "pi-01"), 1)])
    store.record(run_id, [dropped(header(run_id, 1, "pi-01", sequence=7), 1, "duplicate")])
    assert store.updates(run_id, 1)[0].update_id == f"{run_id}/pi-01/1"
    assert store.clients(run_id)[0].sequence == 7


@pytest.mark.parametrize("together", [True, False])
def test_who_is_selected_in_the_middle_of_a_round_stands_among_its_others(store: Store, together: bool) -> None:
    run_id = new_run(store)
    begun, why = opened(run_id, 1, DEVICES[:1]), noted("1 of 2 could come")
    since: list[Event] = [
        ClientSelected(12.0, 1, name, f"{run_id}.1.{name}", 1000, 3.0, 0, 9.0, why) for name in DEVICES[1:]
    ]
    for batch in [[*begun, *since]] if together else [begun, since[:1], since[1:]]:
        store.record(run_id, batch)
    (row,) = store.rounds(run_id)
    assert (row.selected, row.not_selected) == (list(DEVICES), {})
    assert_sums_agree(store, run_id)
    assert_is_replayed(store, run_id)


def test_a_closed_round_keeps_of_all_its_answers_the_metrics_that_most_carried(store: Store) -> None:
    run_id = new_run(store)
    invented = {"train/loss": (3.0, 2.0), "eval/made-up": (1.0, 1.0)}
    replies = [replace(header(run_id, 1, device), metrics=invented) for device in DEVICES[:2]]
    took, late = accepted(replies[0], 1), dropped(replies[1], 1, "late")
    end = replace(closed(1, [took.update_id], (late.update_id,)), names=["train/loss"])
    store.record(run_id, [*opened(run_id, 1), took, late])
    assert {name for u in store.updates(run_id) for name in u.metrics} == set(invented)
    store.record(run_id, [end])
    assert {name for u in store.updates(run_id) for name in u.metrics} == {"train/loss"}
    assert_sums_agree(store, run_id)
    assert_is_replayed(store, run_id)
