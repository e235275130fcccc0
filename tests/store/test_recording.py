from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy.exc import IntegrityError

from tests.support.reasons import noted, sentences
from tests.support.store_agreement import assert_is_replayed, assert_sums_agree, empty_store, shown
from tests.support.store_story import DENSE, accepted, closed, dropped, header, histories, new_run, opened, status
from thinwire.core.errors import NotFound, NotWritten
from thinwire.core.events import (
    ClientFailed,
    Evaluated,
    ModelStored,
    RoundClosed,
    RoundOpened,
    RunNoted,
    RunStatusChanged,
    UpdateAggregated,
    UpdateDropped,
)
from thinwire.core.formatting import Reasons
from thinwire.reports.reason_text import sentence
from thinwire.store import Store
from thinwire.store.journal import KINDS, from_json, to_json


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
        done = [
            u for u in store.updates(run_id) if u.outcome in ("aggregated", "aggregated-late") and u.aggregated_round
        ]
        for n in repeats[: len(done)]:
            update = done[n % len(done)]
            store.record(run_id, [UpdateAggregated(99.0, update.aggregated_round or 0, update.update_id, 0.1)])
        assert shown(store, run_id) == before


def test_an_event_comes_back_from_its_json() -> None:
    closed = RoundClosed(
        1.0, 3, "deadline", 4, ["r/a/1"], [], ["b"], 9.0, 2.5, {"loss": 0.5}, {"aggregate_s": 0.1}, "a"
    )
    assert to_json(closed) == {"event": "RoundClosed", **asdict(closed)}
    assert from_json(to_json(closed)) == closed
    assert from_json({**to_json(closed), "added_later": 1}) == closed
    assert KINDS["UpdateDropped"] is UpdateDropped


def test_events_come_back_as_they_were_recorded(store: Store) -> None:
    run_id = new_run(store)
    events = [*opened(run_id, 1), accepted(header(run_id, 1, "pi-01"), 1), closed(1, [f"{run_id}/pi-01/1"])]
    store.record(run_id, events)
    back = store.events(run_id)[2:]
    assert [json.dumps(to_json(event)) for _, event in back] == [json.dumps(to_json(event)) for event in events]
    assert [type(event) for _, event in back] == [type(event) for event in events]


def test_a_device_that_was_considered_without_another_reason_was_not_sampled(store: Store) -> None:
    run_id = new_run(store)
    first, *sent = opened(run_id, 1)
    assert isinstance(first, RoundOpened)
    busy: dict[str, Reasons] = {"zz-2": noted("busy")}
    store.record(run_id, [replace(first, considered=len(first.assignments) + 2, reasons=busy), *sent])
    (found,) = store.rounds(run_id)
    assert (sentences(found.not_selected), found.not_sampled) == ({"zz-2": "busy"}, 1)


def test_sequence_numbers_rise_over_all_runs_and_a_reader_goes_on_where_it_was(store: Store) -> None:
    a, b = new_run(store), new_run(store)
    seen = store.last_seq(a)
    store.record(b, opened(b, 1))
    assert store.last_seq() == store.last_seq(b) > seen == store.last_seq(a)
    store.record(a, opened(a, 1))
    assert [type(event).__name__ for _, event in store.events(a, after=seen)] == ["RoundOpened"] + [
        "ClientSelected"
    ] * 3
    assert len(store.events(a, after=seen, limit=2)) == 2
    assert store.events(a, after=store.last_seq()) == []
    assert store.last_seq("digits-99") == 0


def test_what_a_run_has_to_say_is_kept_in_its_order(store: Store) -> None:
    run_id = new_run(store)
    assert store.run(run_id).notes == []
    store.record(run_id, [RunNoted(2.0, noted("first")), RunNoted(2.0, noted("second"))])
    store.record(run_id, [RunNoted(3.0, noted("third"))])
    assert [sentence(note) for note in store.run(run_id).notes] == ["first", "second", "third"]


def test_bytes_are_summed_beside_what_dense_ones_would_be(store: Store) -> None:
    run_id = new_run(store)
    store.record(run_id, opened(run_id, 1))
    store.record(run_id, [accepted(header(run_id, 1, "pi-01"), 1), dropped(header(run_id, 1, "pi-02"), 1, "stale")])
    run = store.run(run_id)
    assert (run.payload_up, run.payload_down, run.wire_up, run.wire_down) == (202, 3000, 1200, 1000)
    assert (run.dense_up, run.dense_down) == (2 * DENSE, 3 * DENSE)
    last = Evaluated(9.0, 1, 1, {"loss": 0.5}, {"loss": [0.0, 1.0]}, 9, 3, payload_bytes=70, models_sent=2)
    store.record(run_id, [last])
    run = store.run(run_id)
    assert (run.payload_down, run.dense_down) == (3070, 5 * DENSE)


def test_where_there_is_no_wire_its_bytes_stay_unknown(store: Store) -> None:
    run_id = new_run(store, source="sim")
    store.record(run_id, opened(run_id, 1))
    store.record(run_id, [accepted(header(run_id, 1, "pi-01", wire=False), 1)])
    assert store.run(run_id).wire_up is None
    assert store.rounds(run_id)[0].wire_down is None


def test_an_answer_after_its_round_is_late_there_and_aggregated_where_it_came(store: Store) -> None:
    run_id = new_run(store)
    store.record(run_id, [*opened(run_id, 1), closed(1, [], reason="deadline"), *opened(run_id, 2, ("pi-02",))])
    late = header(run_id, 1, "pi-01")
    store.record(run_id, [accepted(late, 1, round_number=2)])
    assert store.updates(run_id, 1)[0].outcome == "accepted"
    store.record(run_id, [UpdateAggregated(15.0, 2, str(late.update_id), 0.1)])
    row = store.updates(run_id, 1)[0]
    assert (row.outcome, row.aggregated_round, row.staleness) == ("aggregated-late", 2, 1)
    assert [r.late for r in store.rounds(run_id)] == [1, 0]


def test_too_few_gives_all_answers_back(store: Store) -> None:
    run_id = new_run(store)
    reply = header(run_id, 1, "pi-01")
    store.record(run_id, [*opened(run_id, 1), accepted(reply, 1), UpdateAggregated(15.0, 1, str(reply.update_id), 0.1)])
    store.record(run_id, [closed(1, [], (str(reply.update_id),), "too-few")])
    row, round_row = store.updates(run_id, 1)[0], store.rounds(run_id)[0]
    assert (row.outcome, row.reason, row.aggregated_round) == ("dropped", "too-few", None)
    assert (round_row.reason, round_row.dropped, round_row.aggregated_count, round_row.aggregated) == (
        "too-few",
        1,
        0,
        [],
    )


def test_what_a_stranger_sends_cannot_stop_the_journal(store: Store) -> None:
    run_id = new_run(store)
    store.record(run_id, opened(run_id, 1))
    nasty = "a\0b\ud800c" + "x" * 100_000
    store.record(run_id, [ClientFailed(13.0, 1, "pi-01", f"{run_id}.1.pi-01", "worker", nasty, 3.0)])
    huge = accepted(header(run_id, 1, "pi-02"), 1)
    huge.header.update(examples=10**40, steps=2**63)
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


def test_events_of_another_run_keep_its_id_while_one_run_gathers(store: Store) -> None:
    gathers, other = new_run(store), new_run(store)
    with store.gathering(gathers):
        store.record(gathers, [RunNoted(1.0, noted("of the one"))])
        store.record(other, [RunNoted(2.0, noted("of the other"))])
        store.record(gathers, [RunNoted(3.0, noted("of the one again"))])
    texts = {
        run_id: [sentence(e.note) for _, e in store.events(run_id) if isinstance(e, RunNoted)]
        for run_id in (gathers, other)
    }
    assert texts == {gathers: ["of the one", "of the one again"], other: ["of the other"]}


def test_gathered_events_stay_when_they_could_not_be_written(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full at the end of a round, and has space again at the end of the run."""

    def refused() -> None:
        raise NotWritten("cannot use the database", why="database or disk is full")

    run_id = new_run(store)
    with store.gathering(run_id):
        store.record(run_id, [status("waiting")])  # written at once
        before = store.last_seq()
        store.record(run_id, [RunNoted(1.0, noted("gathered"))])
        with monkeypatch.context() as full, pytest.raises(NotWritten):
            full.setattr(store._database, "writing", refused)
            store.record(run_id, [status("waiting", 2.0)])
        assert store.last_seq() == before
        store.record(run_id, [status("failed")])
    found = [event for _, event in store.events(run_id, before)]
    assert [type(event) for event in found] == [RunNoted, RunStatusChanged]
