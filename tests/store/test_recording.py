from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy.exc import IntegrityError

from tests.store.agreement import assert_is_replayed, assert_sums_agree, empty_store, shown
from tests.store.story import (
    DENSE,
    DEVICES,
    accepted,
    closed,
    dropped,
    head,
    histories,
    new_run,
    opened,
    status,
)
from thinwire.core.errors import NotFound
from thinwire.core.event_json import to_json
from thinwire.core.events import (
    AskTakenUp,
    ClientAsked,
    ClientBack,
    ClientFailed,
    Evaluated,
    Event,
    ModelStored,
    RunNoted,
    UpdateFolded,
)
from thinwire.store import Store


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(batches=histories("digits-1"))
def test_whatever_happens_the_sums_agree_and_the_journal_replays_to_the_same_tables(batches: list) -> None:
    with empty_store() as store:
        run_id = new_run(store)
        for batch in batches:
            store.record(run_id, batch)
            assert_sums_agree(store, run_id)
        assert_is_replayed(store, run_id)


@settings(max_examples=10, deadline=None)
@given(batches=histories("digits-1"), repeats=st.lists(st.integers(0, 40), max_size=3))
def test_a_fold_that_is_repeated_after_a_restart_changes_nothing(batches: list, repeats: list[int]) -> None:
    with empty_store() as store:
        run_id = new_run(store)
        for batch in batches:
            store.record(run_id, batch)
        before = shown(store, run_id)
        done = [u for u in store.updates(run_id) if u.outcome in ("folded", "late") and u.folded_round]
        for n in repeats[: len(done)]:
            update = done[n % len(done)]
            store.record(run_id, [UpdateFolded(99.0, update.folded_round or 0, update.update_id, 0.1)])
        assert shown(store, run_id) == before


def test_events_come_back_as_they_were_recorded(store: Store) -> None:
    run_id = new_run(store)
    events = [*opened(run_id, 1), accepted(head(run_id, 1, "pi-01"), 1), closed(1, [f"{run_id}/pi-01/1"])]
    store.record(run_id, events)
    back = store.events(run_id)[2:]
    assert [json.dumps(to_json(event)) for _, event in back] == [json.dumps(to_json(event)) for event in events]
    assert [type(event) for _, event in back] == [type(event) for event in events]


def test_sequence_numbers_rise_over_all_runs_and_a_reader_goes_on_where_it_was(store: Store) -> None:
    a, b = new_run(store), new_run(store)
    seen = store.last_seq(a)
    store.record(b, opened(b, 1))
    assert store.last_seq() == store.last_seq(b) > seen == store.last_seq(a)
    store.record(a, opened(a, 1))
    assert [type(event).__name__ for _, event in store.events(a, after=seen)] == ["RoundOpened"] + ["ClientAsked"] * 3
    assert len(store.events(a, after=seen, limit=2)) == 2
    assert store.events(a, after=store.last_seq()) == []
    assert store.last_seq("digits-99") == 0


def test_a_device_that_had_left_and_is_back_is_at_work_again(store: Store) -> None:
    run_id = new_run(store)
    ask_id = f"{run_id}.1.pi-02"
    left = ClientFailed(12.0, 1, "pi-02", ask_id, "left", "its connection is closed", 2.0)
    store.record(run_id, [*opened(run_id, 1), left])
    assert [u.outcome for u in store.updates(run_id, round=1) if u.device == "pi-02"] == ["failed"]
    store.record(run_id, [ClientBack(13.0, 1, "pi-02", ask_id, 3.0)])
    assert [(u.outcome, u.reason) for u in store.updates(run_id, round=1) if u.device == "pi-02"] == [("asked", "")]
    assert [c.last_outcome for c in store.clients(run_id) if c.device == "pi-02"] == ["asked: it had left and is back"]
    assert (store.run(run_id).failed, store.rounds(run_id)[0].failed) == (0, 0)
    assert_sums_agree(store, run_id)
    store.record(run_id, [left])
    assert store.rounds(run_id)[0].failed == 1, "it may leave again"


def test_an_ask_that_was_open_when_its_run_ended_counts_as_nobody_s_failure(store: Store) -> None:
    run_id = new_run(store)
    over = ClientFailed(12.0, 1, "pi-02", f"{run_id}.1.pi-02", "over", "no answer was taken before the run's end", 2.0)
    store.record(run_id, [*opened(run_id, 1), over])
    shown = [(u.outcome, u.reason) for u in store.updates(run_id, round=1) if u.device == "pi-02"]
    assert shown == [("over", "no answer was taken before the run's end")]
    assert (store.run(run_id).failed, store.rounds(run_id)[0].failed) == (0, 0)
    assert [c.failed for c in store.clients(run_id)] == [0, 0, 0]
    assert_is_replayed(store, run_id)


def test_when_a_device_took_an_ask_up_is_known_before_and_after_it_answered(store: Store) -> None:
    run_id = new_run(store)
    ask_id = f"{run_id}.1.pi-01"
    store.record(run_id, [*opened(run_id, 1), AskTakenUp(10.5, 1, "pi-01", ask_id)])
    store.record(run_id, [AskTakenUp(99.0, 1, "pi-01", ask_id), AskTakenUp(99.0, 1, "pi-01", "of no round")])
    reply = head(run_id, 1, "pi-01")
    assert [u.pulled_at for u in store.updates(run_id, round=1)] == [10.5, None, None], "the first time counts"
    assert reply.transfer is not None
    of_another_life = replace(reply, transfer=replace(reply.transfer, pulled_at=0.0))
    store.record(run_id, [accepted(of_another_life, 1)])
    assert store.updates(run_id, round=1)[0].pulled_at == 10.5
    assert_is_replayed(store, run_id)


def test_an_ask_is_shown_before_it_is_answered_and_with_its_numbers_after(store: Store) -> None:
    run_id = new_run(store)
    store.record(run_id, opened(run_id, 1))
    waiting = store.updates(run_id, round=1)
    assert [(u.device, u.outcome, u.payload_down, u.arrived_at) for u in waiting] == [
        (device, "asked", 1000, None) for device in DEVICES
    ]
    reply = head(run_id, 1, "pi-02")
    store.record(run_id, [accepted(reply, 1)])
    row = store.updates(run_id, 1)[1]
    assert (row.outcome, row.update_id, row.examples, row.steps, row.norm) == (
        "accepted",
        f"{run_id}/pi-02/1",
        40,
        5,
        1.5,
    )
    assert (row.pulled_at, row.began_at, row.arrived_at, row.asked_at) == (11.0, 12.0, 13.0, 10.0)
    assert (row.download_s, row.queue_s, row.evaluate_s, row.train_s, row.encode_s) == (0.1, 0.2, 0.3, 0.4, 0.5)
    assert (row.payload_up, row.wire_up, row.wire_down, row.requests) == (101, 600, 500, 3)
    assert row.metrics == {"train/loss": 1.5}


@pytest.mark.parametrize("together", [True, False])
def test_who_is_asked_in_the_middle_of_a_round_stands_there_with_all_its_reasons(store: Store, together: bool) -> None:
    run_id = new_run(store)
    since = [
        ClientAsked(
            12.0, 1, device, f"{run_id}.1.{device}", 1000, 2.0, 0, 50.0, "2 of 3 answers could still come", "pi-01",
            steps=4, batch=8, work_reason="4 of 9 steps fit", codec="sign", codec_reason=f"sign fits {device}",
        )
        for device in ("pi-08", "pi-09")
    ]  # fmt: skip
    events: list[Event] = [*opened(run_id, 1), *since]
    for batch in [events] if together else [[event] for event in events]:
        store.record(run_id, batch)
    (row,) = store.rounds(run_id)
    assert row.asked == [*DEVICES, "pi-08", "pi-09"]
    assert row.codecs == {"pi-08": "sign", "pi-09": "sign"}
    assert row.codec_reasons == {"pi-08": "sign fits pi-08", "pi-09": "sign fits pi-09"}
    first, *_, last = store.updates(run_id)
    assert (first.asked_why, first.instead_of, first.work_reason) == ("", "", "")
    assert (last.asked_why, last.instead_of) == ("2 of 3 answers could still come", "pi-01")
    assert last.work_reason == "4 of 9 steps fit"


def test_what_a_run_has_to_say_is_kept_in_its_order(store: Store) -> None:
    run_id = new_run(store)
    assert store.run(run_id).notes == []
    store.record(run_id, [RunNoted(2.0, "first"), RunNoted(2.0, "second")])
    store.record(run_id, [RunNoted(3.0, "third")])
    assert store.run(run_id).notes == ["first", "second", "third"]


def test_bytes_are_summed_beside_what_dense_ones_would_be(store: Store) -> None:
    run_id = new_run(store)
    store.record(run_id, opened(run_id, 1))
    store.record(run_id, [accepted(head(run_id, 1, "pi-01"), 1), dropped(head(run_id, 1, "pi-02"), 1, "stale")])
    run = store.run(run_id)
    assert (run.payload_up, run.payload_down, run.wire_up, run.wire_down) == (202, 3000, 1200, 1000)
    assert (run.dense_up, run.dense_down) == (2 * DENSE, 3 * DENSE)


def test_where_there_is_no_wire_its_bytes_stay_unknown(store: Store) -> None:
    run_id = new_run(store, source="sim")
    store.record(run_id, opened(run_id, 1))
    store.record(run_id, [accepted(head(run_id, 1, "pi-01", wire=False), 1)])
    assert store.run(run_id).wire_up is None
    assert store.rounds(run_id)[0].wire_down is None


def test_an_answer_after_its_round_is_late_there_and_folded_where_it_came(store: Store) -> None:
    run_id = new_run(store)
    store.record(run_id, [*opened(run_id, 1), closed(1, [], reason="deadline"), *opened(run_id, 2, ("pi-02",))])
    late = head(run_id, 1, "pi-01")
    store.record(run_id, [accepted(late, 1, round_number=2)])
    assert store.updates(run_id, 1)[0].outcome == "accepted"
    store.record(run_id, [UpdateFolded(15.0, 2, str(late.update_id), 0.1)])
    row = store.updates(run_id, 1)[0]
    assert (row.outcome, row.folded_round, row.staleness) == ("late", 2, 1)
    assert [r.late for r in store.rounds(run_id)] == [1, 0]


def test_too_few_gives_all_answers_back(store: Store) -> None:
    run_id = new_run(store)
    reply = head(run_id, 1, "pi-01")
    store.record(run_id, [*opened(run_id, 1), accepted(reply, 1), UpdateFolded(15.0, 1, str(reply.update_id), 0.1)])
    store.record(run_id, [closed(1, [], (str(reply.update_id),), "too-few")])
    row, round_row = store.updates(run_id, 1)[0], store.rounds(run_id)[0]
    assert (row.outcome, row.reason, row.folded_round) == ("dropped", "too-few", None)
    assert (round_row.reason, round_row.dropped, round_row.folded_count, round_row.folded) == ("too-few", 1, 0, [])


def test_a_failure_says_its_kind_and_does_not_undo_an_answer(store: Store) -> None:
    run_id = new_run(store)
    ask = f"{run_id}.1."
    store.record(run_id, [*opened(run_id, 1), accepted(head(run_id, 1, "pi-02"), 1)])
    store.record(
        run_id, [ClientFailed(13.0, 1, d, ask + d, "task-error", "KeyError task.py:7", 3.0) for d in DEVICES[:2]]
    )
    one, two, _ = store.updates(run_id, 1)
    assert (one.outcome, one.reason) == ("failed", "task-error: KeyError task.py:7")
    assert two.outcome == "accepted"
    assert store.rounds(run_id)[0].failed == 1


def test_a_second_answer_to_one_ask_leaves_the_first_and_counts_its_sequence(store: Store) -> None:
    run_id = new_run(store)
    store.record(run_id, [*opened(run_id, 1), accepted(head(run_id, 1, "pi-01"), 1)])
    store.record(run_id, [dropped(head(run_id, 1, "pi-01", sequence=7), 1, "duplicate")])
    assert store.updates(run_id, 1)[0].update_id == f"{run_id}/pi-01/1"
    assert store.clients(run_id)[0].sequence == 7


def test_what_a_stranger_sends_cannot_stop_the_journal(store: Store) -> None:
    run_id = new_run(store)
    store.record(run_id, opened(run_id, 1))
    nasty = "a\0b\ud800c" + "x" * 100_000
    store.record(run_id, [ClientFailed(13.0, 1, "pi-01", f"{run_id}.1.pi-01", "worker", nasty, 3.0)])
    huge = accepted(head(run_id, 1, "pi-02"), 1)
    huge.head.update(examples=10**40, steps=2**63)
    store.record(run_id, [huge])
    first, second, _ = store.updates(run_id, 1)
    assert first.reason.startswith("worker: a?b?c")
    assert (second.examples, second.steps) == (2**63 - 1, 2**63 - 1)


def test_metrics_belong_to_the_round_that_made_the_version(store: Store) -> None:
    run_id = new_run(store)
    store.record(run_id, [*opened(run_id, 1), closed(1, [])])
    store.record(run_id, [Evaluated(20.0, 0, 0, {"loss": 2.3}, {"loss": [2.0, 3.0]}, 10, 3, best=True)])
    store.record(run_id, [Evaluated(21.0, 1, 1, {"loss": 1.1}, {"loss": [1.0, 2.0]}, 10, 3, best=True)])
    store.record(run_id, [Evaluated(22.0, 1, 1, {"loss": 1.7}, {"loss": [1.0, 2.0]}, 10, 3)])
    run, (one,) = store.run(run_id), store.rounds(run_id)
    assert (run.metrics0, run.spread0) == ({"loss": 2.3}, {"loss": [2.0, 3.0]})
    assert (one.metrics, one.spread, one.train_metrics) == ({"loss": 1.7}, {"loss": [1.0, 2.0]}, {"loss": 1.0})
    assert (run.metrics, run.best_version, run.best_value) == ({"loss": 1.7}, 1, 1.1)


def test_a_run_goes_from_preparing_to_its_end(store: Store) -> None:
    run_id = new_run(store)
    store.record(
        run_id, [status("waiting", 3.0), status("running", 4.0), status("waiting", 5.0), status("running", 6.0)]
    )
    store.record(run_id, [ModelStored(7.0, 1, "bb", "v1.model", [("full/0", 3, "cc")], {"seen": 4}), closed(1, [])])
    store.record(run_id, [status("failed", 9.0, exit_code=6)])
    run = store.run(run_id)
    assert (run.status, run.status_text, run.exit_code) == ("failed", "is failed", 6)
    assert (run.started_at, run.finished_at, run.rounds_closed, run.rounds_total) == (4.0, 9.0, 1, 4)
    assert (run.version, run.model_digest, run.model_file) == (1, "bb", "v1.model")
    assert [(m.version, m.digest, m.counters) for m in store.models(run_id)] == [(0, "aa", {}), (1, "bb", {"seen": 4})]
    assert store.models(run_id)[1].parts == [("full/0", 3, "cc")]


def test_an_unknown_run_cannot_be_recorded(store: Store) -> None:
    with pytest.raises(NotFound):
        store.record("digits-9", [status("running")])


def test_nothing_of_a_batch_is_kept_when_one_event_cannot_be(store: Store) -> None:
    run_id = new_run(store)
    before, seq = shown(store, run_id), store.last_seq()
    with pytest.raises(IntegrityError):
        store.record(run_id, [*opened(run_id, 1), *opened(run_id, 1)])
    assert (shown(store, run_id), store.last_seq()) == (before, seq)


@pytest.mark.parametrize("together", [True, False])
def test_who_is_asked_in_the_middle_of_a_round_stands_among_its_others(store: Store, together: bool) -> None:
    run_id = new_run(store)
    begun, why = opened(run_id, 1, DEVICES[:1]), "1 of 2 answers could still come, 9 s were left"
    since: list[Event] = [
        ClientAsked(12.0, 1, name, f"{run_id}.1.{name}", 1000, 3.0, 0, 9.0, why) for name in DEVICES[1:]
    ]
    for batch in [[*begun, *since]] if together else [begun, since[:1], since[1:]]:
        store.record(run_id, batch)
    (row,) = store.rounds(run_id)
    assert (row.asked, row.not_asked) == (list(DEVICES), {})
    assert_sums_agree(store, run_id)
    assert_is_replayed(store, run_id)
