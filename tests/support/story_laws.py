"""What holds of every run, whatever its devices do: nothing is lost or aggregated twice, nobody waited for in vain."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from tests.support.faulty_fleet import FaultyBehavior
from tests.support.stories import DEADLINE_S, NAMES, Story, Told, told
from thinwire.core.events import (
    ClientFailed,
    ClientReconnected,
    ClientSelected,
    Event,
    RoundBecameCurrent,
    RoundClosed,
    RoundOpened,
    UpdateAccepted,
    UpdateDropped,
)
from thinwire.core.types import UpdateId, assignment_round, is_follow_up
from thinwire.server.state.model_history import EvaluationLog, ModelHistory
from thinwire.server.state.run_state import OpenRounds, RoundProgress, RunState
from thinwire.store.journal import to_json


def who_is_assigned_in_the_middle_of_a_round_has_its_rest(made: Told) -> None:
    assert all(0 < e.deadline_s <= DEADLINE_S for e in made.of(ClientSelected) if e.why)


def a_round_closes_as_soon_as_nobody_can_answer(made: Told) -> None:
    opened = {e.round: e for e in made.of(RoundOpened)}
    happened = [e for e in made.events if isinstance(e, (UpdateAccepted, UpdateDropped, ClientFailed))]
    taken = {e.round: e.elapsed_s for e in made.of(RoundBecameCurrent)}
    header_s = 0.0  # since when it is the one that takes answers
    for closed in made.of(RoundClosed):
        header_s = max(header_s, opened[closed.round].elapsed_s, taken.get(closed.round, 0.0))
        last = max((e.elapsed_s for e in happened if e.round == closed.round), default=header_s)
        assert closed.seconds <= DEADLINE_S + 1e-6
        last, header_s = max(last, header_s), closed.elapsed_s
        if closed.elapsed_s > last + 1e-6 and closed.reason != "stopped":
            assert closed.seconds == pytest.approx(DEADLINE_S) and closed.outstanding, "it waited for nobody"
    assert len(opened) == len(made.of(RoundClosed))


def a_buffer_never_waits_for_nobody(made: Told) -> None:
    """From its opening to its close there is always somebody at work whose time is not up, and not for the next one."""
    bad = {e.update_id for e in made.of(UpdateDropped)}
    stands = {(e.round, e.device): e.assignment_id for e in made.of(UpdateAccepted) if e.update_id not in bad}
    began, at_work = dict[str, float](), list[tuple[float, float, str, str]]()
    for e in made.events:
        if isinstance(e, RoundOpened):
            began |= dict.fromkeys(e.assignments.values(), e.elapsed_s)
        elif isinstance(e, ClientReconnected) or (isinstance(e, ClientSelected) and e.why):
            began[e.assignment_id] = e.elapsed_s
        elif isinstance(e, (UpdateAccepted, UpdateDropped, ClientFailed)) and e.assignment_id in began:
            since = began.pop(e.assignment_id)
            at_work.append((since, min(e.elapsed_s, since + DEADLINE_S), e.device, e.assignment_id))
    at_work.sort()
    opened = {e.round: e.elapsed_s for e in made.of(RoundOpened)}
    for closed in made.of(RoundClosed):
        covered = opened[closed.round]
        for since, until, device, assignment_id in at_work:
            for_next = is_follow_up(assignment_id) and assignment_round(assignment_id) == closed.round
            if since <= covered + 1e-6 and not (
                for_next and stands.get((closed.round, device), assignment_id) != assignment_id
            ):
                covered = max(covered, until)
        assert closed.elapsed_s <= covered + 1e-6 or closed.reason == "stopped", "it waited for nobody"


def a_buffer_holds_one_update_of_a_device_and_no_more_than_it_has_places(made: Told) -> None:
    device_of = {e.update_id: e.device for e in made.of(UpdateAccepted)}
    for closed in made.of(RoundClosed):
        assert len(closed.aggregated) <= made.plan.cohort.buffer
        assert len({device_of[u] for u in closed.aggregated}) == len(closed.aggregated)
        assert (closed.reason == "buffer") <= (len(closed.aggregated) == made.plan.cohort.buffer)


def what_is_accepted_is_aggregated_or_dropped_once_and_so_is_said(made: Told) -> None:
    aggregated = Counter(u for e in made.of(RoundClosed) for u in e.aggregated)
    dropped = {u for e in made.of(RoundClosed) for u in e.dropped} | {e.update_id for e in made.of(UpdateDropped)}
    assert set(aggregated.values()) <= {1}
    assert not aggregated.keys() & dropped
    assert {e.update_id for e in made.of(UpdateAccepted)} <= aggregated.keys() | dropped
    said = {UpdateId.parse(u): "aggregated" for u in aggregated} | {UpdateId.parse(u): "dropped" for u in dropped}
    for device in made.devices:
        assert {u: v.outcome for u, v in device.told.items()}.items() <= said.items()
        if device.name in made.there:  # it was told its last ones at the end, and who sends too many has older ones
            last = made.live.ledger.outcomes.of(device.name, most=made.told_at_most)
            assert {outcome.update_id for outcome in last} <= device.told.keys()


def what_is_no_garbage_can_be_aggregated(made: Told, story: Story) -> None:
    """Each is read in the codec in which it was selected."""
    refused = [e for e in made.of(UpdateDropped) if e.reason == "bad-payload"]
    behaviors = [story.table[e.device, e.assignment_round % story.rounds] for e in refused]
    assert all(isinstance(behavior, FaultyBehavior) and behavior.garbage for behavior in behaviors)


def the_model_is_the_sum_of_what_was_aggregated(made: Told) -> None:
    """Each device sends one constant a step: the model is the sum of the rounds' weighted means of them, times the
    mean of their steps, and the sum of the buffers' plain means of their whole changes.
    """
    accepted, exponent = {e.update_id: e for e in made.of(UpdateAccepted)}, made.plan.cohort.staleness_exponent
    assert all(e.discount == pytest.approx((1 + e.staleness) ** -exponent) for e in accepted.values())
    total = 0.0
    for closed in made.of(RoundClosed):
        headers = [accepted[u] for u in closed.aggregated]
        constants = [e.discount * (NAMES.index(e.device) + 1) for e in headers]
        steps, examples = [e.header["a"] for e in headers], sum(e.header["examples"] for e in headers)
        if made.plan.cohort.mode == "buffered":
            total += sum(a * c for a, c in zip(steps, constants, strict=True)) / max(1, len(headers))
            continue
        shares = [e.header["examples"] / examples for e in headers]
        mean_steps = sum(p * a for p, a in zip(shares, steps, strict=True))
        total += mean_steps * sum(p * c for p, c in zip(shares, constants, strict=True))
    np.testing.assert_allclose(made.params, total, rtol=1e-5, atol=1e-6)
    assert np.isfinite(total)


def a_round_says_how_the_devices_that_it_considers_differ_from_the_last_ones(made: Told) -> None:
    considered = set[str]()
    for e in made.of(RoundOpened):
        assert considered.isdisjoint(e.added) and considered.issuperset(e.removed)
        considered = (considered - set(e.removed)) | set(e.added)
        assert len(considered) == e.considered
        assert {*e.assignments, *e.later, *e.reasons} <= considered
    assert considered == made.live.considered


def the_journal_replays_to_the_same_past(made: Told) -> None:
    again = RunState(made.live.delay, made.live.kept, made.live.logged)
    for event in made.events:
        again.apply(event)
    for field in fields(RunState):
        assert plain(getattr(again, field.name)) == plain(getattr(made.live, field.name)), field.name


def plain(value: object) -> object:
    """Events as their JSON: what the journal gives back has lists where there were tuples."""
    if isinstance(value, Event):
        return json.dumps(to_json(value))
    if isinstance(value, (ModelHistory, OpenRounds, RoundProgress, EvaluationLog)):
        value = vars(value)
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value


def tell(story: Story) -> Told:
    """What came of it, after the laws that hold in every mode."""
    with tempfile.TemporaryDirectory() as folder:
        made = told(story, Path(folder))
    assert made.status in ("done", "failed", "stopped")
    who_is_assigned_in_the_middle_of_a_round_has_its_rest(made)
    what_is_accepted_is_aggregated_or_dropped_once_and_so_is_said(made)
    what_is_no_garbage_can_be_aggregated(made, story)
    the_model_is_the_sum_of_what_was_aggregated(made)
    a_round_says_how_the_devices_that_it_considers_differ_from_the_last_ones(made)
    the_journal_replays_to_the_same_past(made)
    return made
