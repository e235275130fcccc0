"""Delayed averaging on the device: training goes on from the version and its own changes that are still under way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.client.test_handler import decoded, residual
from tests.support.small_task import RUN, Aggregator, cross_entropy, plan_of, task_of
from thinwire.client.execute import Begun
from thinwire.client.outbox import starting_vector, still_pending
from thinwire.core.types import Failure, UpdateId, UpdateOutcome

OVERLAP = "[local.overlap]\nmax_delay = {}\n"
SPARSE = {"codec": "topk(0.2) > int8", "feedback": "classic"}


def aggregator_of(folder, delay=1, task=None, **uplink):
    return Aggregator(folder, task or task_of(), plan_of(OVERLAP.format(delay), **uplink))


def ahead(aggregator, number, version=0, aggregated=(), dropped=(), params=None):
    """The assignment of round `number`, which starts from `version` and tells what was decided by then."""
    told = [UpdateOutcome(UpdateId(RUN, "pi-01", n), "aggregated", at) for n, at in aggregated]
    told += [UpdateOutcome(UpdateId(RUN, "pi-01", n), "dropped") for n in dropped]
    made = aggregator.assign(number, params=params)
    return replace(made, assignment=replace(made.assignment, base_version=version, outcomes=tuple(told)))


def pending(handler):
    return {int(n): change for n, change in handler.runs[RUN][1].pending.items()}


def seen_starts(handler):
    """Where each training began, as the executor was given it."""
    executor, starts = handler.executor, []
    do = executor.do

    def watched(order, client, params, *rest):
        if order.train:
            starts.append(params.copy())
        return do(order, client, params, *rest)

    executor.do = watched
    return starts


def test_training_starts_from_the_version_and_every_change_that_it_does_not_hold(tmp_path):
    aggregator = aggregator_of(tmp_path, 2, **SPARSE)
    handler, first = aggregator.handler(), aggregator.first.vector
    starts = seen_starts(handler)
    for number in (1, 2, 3):
        aggregator.answer(handler, ahead(aggregator, number))
    mine, newer = pending(handler), first + np.float32(0.5)
    aggregator.answer(handler, ahead(aggregator, 4, version=1, aggregated=[(1, 1), (2, 2)], params=newer))
    assert [start.tobytes() for start in starts] == [
        first.tobytes(),
        (first + mine[1]).tobytes(),
        (first + mine[1] + mine[2]).tobytes(),
        (newer + mine[2] + mine[3]).tobytes(),
    ]


def test_the_learning_rate_goes_on_by_the_changes_that_are_under_way(tmp_path):
    """The second assignment starts from the version of the first: of 4 rounds it is the second all the same."""
    plan = plan_of('schedule = "linear"\n' + OVERLAP.format(1), run="rounds = 4")
    aggregator = Aggregator(tmp_path, task_of(), plan, steps=1)
    handler = aggregator.handler()
    headers = [aggregator.answer(handler, ahead(aggregator, number))[0] for number in (1, 2)]
    assert [header.a for header in headers] == pytest.approx([7 / 8, 5 / 8]), "the rate in the middle of each round"


def test_a_pending_change_is_what_was_trained_and_not_what_was_sent(tmp_path):
    aggregator = aggregator_of(tmp_path, **SPARSE)
    handler = aggregator.handler()
    header, bundle = aggregator.answer(handler, ahead(aggregator, 1))
    sent = decoded(aggregator, header, bundle)
    np.testing.assert_allclose(pending(handler)[1] / header.a, sent + residual(handler), atol=1e-6)
    assert float(np.abs(residual(handler)).max()) > 0


def test_a_dropped_change_is_pending_no_more_and_what_was_sent_of_it_is_in_the_residual(tmp_path):
    aggregator = aggregator_of(tmp_path, **SPARSE)
    handler, first = aggregator.handler(), aggregator.first.vector
    starts = seen_starts(handler)
    given = [aggregator.answer(handler, ahead(aggregator, number)) for number in (1, 2)]
    before, sent = residual(handler).copy(), decoded(aggregator, *given[0])
    begun = handler.begin(ahead(aggregator, 3, dropped=[1]), lambda: False, aggregator.said.append)
    assert isinstance(begun, Begun)
    assert starts[2].tobytes() == (first + pending(handler)[2]).tobytes()
    folder, state = handler.runs[RUN]
    back = handler._apply_outcomes(handler._outcome_handler(begun.job, folder), state).residual
    np.testing.assert_allclose(back, before + sent, atol=1e-7)


def test_assignments_may_be_begun_before_answers_are_finished_and_the_bytes_are_the_same(tmp_path):
    assignments = [(1, {}), (2, {}), (3, {"version": 1, "aggregated": [(1, 1)]}), (4, {"version": 1, "dropped": [2]})]
    one, other = aggregator_of(tmp_path / "one", **SPARSE), aggregator_of(tmp_path / "other", **SPARSE)
    handler = one.handler()
    apart = [one.answer(handler, ahead(one, number, **how))[0] for number, how in assignments]
    handler, begun, together = other.handler(), [], []
    for number, how in assignments:  # each is begun before the one before it is finished
        begun.append(handler.begin(ahead(other, number, **how), lambda: False, other.said.append))
        together += [handler.finish(begun.pop(0))[0]] if len(begun) > 1 else []
    together += [handler.finish(begun.pop())[0]]
    assert [(h.update_id, h.parts, h.norm) for h in apart] == [(h.update_id, h.parts, h.norm) for h in together]


def test_a_new_process_goes_on_with_what_was_pending(tmp_path):
    aggregator = aggregator_of(tmp_path, **SPARSE)
    handler = aggregator.handler()
    aggregator.answer(handler, ahead(aggregator, 1))
    expected = (aggregator.first.vector + pending(handler)[1]).tobytes()
    again = aggregator.handler()
    starts = seen_starts(again)
    aggregator.answer(again, ahead(aggregator, 2))
    assert [start.tobytes() for start in starts] == [expected]


def test_where_each_assignment_brings_the_outcome_on_the_last_it_is_training_without_overlap(tmp_path):
    overlapped, plain = (
        aggregator_of(tmp_path / "o", **SPARSE),
        Aggregator(tmp_path / "p", task_of(), plan_of(**SPARSE)),
    )
    found = []
    for aggregator in (overlapped, plain):
        handler = aggregator.handler()
        told = [ahead(aggregator, n, version=n - 1, aggregated=[(n - 1, n - 1)] if n > 1 else []) for n in (1, 2, 3)]
        found.append([aggregator.answer(handler, assignment)[1].read_bytes() for assignment in told])
    assert found[0] == found[1]


def test_a_change_that_cannot_be_encoded_is_not_gone_on_with(tmp_path, monkeypatch):
    aggregator = aggregator_of(tmp_path, **SPARSE)
    handler, first = aggregator.handler(), aggregator.first.vector
    starts = seen_starts(handler)
    begun = handler.begin(ahead(aggregator, 1), lambda: False, aggregator.said.append)
    monkeypatch.setattr("thinwire.client.execute.encode", lambda *given: 1 / 0)
    reply, _ = handler.finish(begun)
    monkeypatch.undo()
    assert isinstance(reply, Failure) and reply.kind == "task-error"
    header, _ = aggregator.answer(handler, ahead(aggregator, 2))
    assert starts[1].tobytes() == first.tobytes()
    assert header.update_id.sequence == 2 and set(pending(handler)) == {2}


def test_a_failure_is_told_in_its_turn_and_its_outcomes_count(tmp_path):
    broken: list[str] = []

    def loss(model, batch):
        if broken:
            raise RuntimeError(broken.pop())
        return cross_entropy(model, batch)

    aggregator = aggregator_of(tmp_path, task=task_of(loss=loss), **SPARSE)
    handler = aggregator.handler()
    aggregator.answer(handler, ahead(aggregator, 1))
    broken.append("no")
    reply, _ = aggregator.answer(handler, ahead(aggregator, 2, version=1, aggregated=[(1, 1)]))
    assert isinstance(reply, Failure)
    assert handler.runs[RUN][1].outbox == ()
    aggregator.answer(handler, ahead(aggregator, 3, version=1, aggregated=[(1, 1)]))
    assert set(pending(handler)) == {2}


@pytest.mark.parametrize(("told", "left"), [
    ([], [3, 4]), ([("aggregated", 3, 5)], [4]), ([("aggregated", 3, 6)], [3, 4]), ([("dropped", 4, -1)], [3]),
    ([("unknown", 4, -1)], [3, 4]),
])  # fmt: skip
def test_a_change_is_under_way_until_the_version_holds_it_or_nobody_wants_it(told, left):
    changes = {str(n): np.full(2, n, np.float32) for n in (3, 4)}
    outcomes = [UpdateOutcome(UpdateId(RUN, "pi-01", n), outcome, at) for outcome, n, at in told]
    assert [int(n) for n in still_pending(changes, outcomes, version=5, most=2)] == left


def test_of_more_changes_than_may_be_under_way_the_oldest_are_not_counted_on():
    changes = {str(n): np.full(2, n, np.float32) for n in (9, 10, 11)}
    assert list(still_pending(changes, [], version=0, most=2)) == ["10", "11"]


def test_without_pending_changes_the_version_itself_is_where_training_starts():
    base = np.zeros(3, np.float32)
    assert starting_vector(base, {}) is base
