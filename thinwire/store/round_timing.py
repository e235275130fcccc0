"""This module computes time breakdowns: the seconds by stage of an assignment from its selection until its reply
arrived, and of a round.

Each stage is an interval between two moments that were recorded, or a duration that a stopwatch measured. The
aggregator records when it made and delivered an assignment, and when the reply began and arrived. The device measures
its own stages. The rest of the time is `UNACCOUNTED`.

Invariant: each second counts once, no stage is negative, and all stages with `UNACCOUNTED` make up the whole time.

A wall clock that was set in the middle of a round makes moments on its two sides incomparable: `clock_was_set`.

A round with secure aggregation has its phases in place of a device's stages: `phases_of` tells how long each lasted,
what it waited for, and who dropped out in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from thinwire.core.clock import downtime_s
from thinwire.core.events import NO_STEP, ROUND_OVER, RoundBecameCurrent
from thinwire.core.formatting import duration
from thinwire.core.types import PHASES
from thinwire.store.read_models import PhaseRow, RoundRow, UpdateRow

DEVICE_STAGES = ("download", "queue", "load", "evaluate", "train", "encode", "commit")
# In order. delivery: from the selection until the first delivery. redelivery: from there to the last delivery, to a
# device that was offline in between. work: from there until the upload, of a reply that tells no time of its device.
# upload: from the first byte of the reply until all of it is durable.
WORK = "work"
ASSIGNMENT_STAGES = ("delivery", "redelivery", *DEVICE_STAGES, WORK, "upload")
# receive: from the arrival of the last reply that counted until the aggregator handles it. aggregate: from there until
# its update is in the sum. masks: removing them from the sum. step: the optimizer's. store: making the model version
# durable.
AGGREGATOR_STAGES = ("receive", "aggregate", "masks", "step", "store")
UNACCOUNTED = "unaccounted"  # the time that no stage has
# selection: from the round's opening until the selection. downtime: no aggregator was running, no device was at work.
# waiting: from the last update in the sum until the round closed, if a device was outstanding. A round with secure
# aggregation has its phases in place of the stages of a device.
STAGES = ("selection", *ASSIGNMENT_STAGES, *PHASES, "downtime", "waiting", *AGGREGATOR_STAGES, UNACCOUNTED)
REDELIVERY_S = 1.0  # two deliveries of an assignment within this time count as one
Downtimes = Sequence[Sequence[float]]  # [from, to] without an aggregator, by the wall clock


@dataclass(frozen=True)
class Stretch:
    """Holds a stage with its begin and end, in seconds."""

    stage: str
    begin_s: float
    end_s: float


def stretches(assignment: UpdateRow, downtimes: Downtimes = ()) -> list[Stretch]:
    """Return the stages of an assignment in order, from its selection until its reply arrived; empty without a reply.

    The device's stages are laid end to end from the delivery, and from the selection if no delivery is recorded.

    Invariant: a stretch begins where the one before it ended. Two clocks that differ cannot make an upload begin before
    the encoding ends.
    """
    if assignment.arrived_at is None:
        return []
    selected = _assigned_at(assignment)
    began = min(max(selected, assignment.began_at or assignment.arrived_at), assignment.arrived_at)
    pulled = min(max(selected, assignment.pulled_at or selected), began)
    first = max(selected, first_delivered(assignment, pulled))
    found = [*around_downtimes("delivery", selected, first, downtimes)]
    found += around_downtimes("redelivery", first, pulled, downtimes)
    found += end_to_end(pulled, began, {name: getattr(assignment, f"{name}_s") or 0.0 for name in DEVICE_STAGES})
    worked = max([pulled, *(one.end_s for one in found)])
    rest = UNACCOUNTED if any(getattr(assignment, f"{name}_s") for name in DEVICE_STAGES) else WORK
    found += [*around_downtimes(rest, worked, began, downtimes), Stretch("upload", began, assignment.arrived_at)]
    return [one for one in found if one.end_s > one.begin_s]


def end_to_end(begin_s: float, end_s: float, took: Mapping[str, float]) -> list[Stretch]:
    """Return stages with measured durations, one after the other from `begin_s`, none of them after `end_s`.

    >>> end_to_end(1.0, 4.0, {"train": 2.0, "encode": 2.0})
    [Stretch(stage='train', begin_s=1.0, end_s=3.0), Stretch(stage='encode', begin_s=3.0, end_s=4.0)]
    """
    found, at = list[Stretch](), begin_s
    for stage, seconds in took.items():
        found.append(Stretch(stage, at, at := max(at, min(end_s, at + seconds))))
    return found


def around_downtimes(stage: str, begin_s: float, end_s: float, downtimes: Downtimes) -> Iterator[Stretch]:
    """Yield a stage in which no device worked, with each time without an aggregator in it as the stage `downtime`.

    >>> [one.stage for one in around_downtimes("waiting", 0.0, 10.0, [(4.0, 6.0)])]
    ['waiting', 'downtime', 'waiting']
    """
    for since, until, *_ in downtimes:
        if max(since, begin_s) < min(until, end_s):
            yield Stretch(stage, begin_s, max(since, begin_s))
            yield Stretch("downtime", max(since, begin_s), min(until, end_s))
            begin_s = min(until, end_s)
    yield Stretch(stage, begin_s, end_s)


def by_stage(found: Iterable[Stretch], begin_s: float, end_s: float) -> dict[str, float]:
    """Return the seconds of each stage between two moments, in the order of `STAGES`.

    Seconds in which stretches overlap count for the first one.
    """
    took, at = dict.fromkeys(STAGES, 0.0), begin_s
    for one in found:
        since, until = max(at, one.begin_s), min(end_s, one.end_s)
        if since < until and one.stage != UNACCOUNTED:
            took[one.stage] += until - since
            at = until
    took[UNACCOUNTED] = max(0.0, end_s - begin_s - sum(took.values()))
    return {stage: seconds for stage, seconds in took.items() if seconds > 0.0}


def assignment_stages(assignment: UpdateRow, downtimes: Downtimes = (), since_s: float = 0.0) -> dict[str, float]:
    """Return the seconds by stage of one assignment with a reply, from its selection on, and not before `since_s`."""
    assert assignment.arrived_at is not None
    begin_s = max(since_s, _assigned_at(assignment))
    return by_stage(stretches(assignment, downtimes), begin_s, max(begin_s, assignment.arrived_at))


def round_stages(
    found: RoundRow, begin_s: float, slowest: UpdateRow | None, own: Mapping[str, float], waits: bool
) -> dict[str, float]:
    """Return the seconds by stage of a closed round that began to accept replies at `begin_s`.

    The stages are those of `slowest`, the assignment that the round waited for last, and then the aggregator's `own`.
    Without `slowest` they are those that the round recorded. With `waits` a device was outstanding after that.
    """
    end_s = begin_s + (found.seconds or 0.0)
    after = {stage: own.get(stage, 0.0) for stage in ("step", "store")}
    closed_s = min(end_s - sum(after.values()), end_s if found.closed_at is None else found.closed_at)
    if slowest is not None and slowest.arrived_at is not None:
        parts = [
            *around_downtimes("selection", begin_s, _assigned_at(slowest), found.downtimes),
            *stretches(slowest, found.downtimes),
        ]
        at = max(begin_s, slowest.arrived_at)
    else:
        spent = {"delivery": found.spent.get("wait_s", 0.0)}
        spent |= {stage: found.spent.get(f"{stage}_s", 0.0) for stage in (*DEVICE_STAGES, "upload")}
        parts = end_to_end(begin_s, end_s, spent)
        at = parts[-1].end_s
    handled = end_to_end(at, end_s, {stage: own.get(stage, 0.0) for stage in ("receive", "aggregate")})
    at = handled[-1].end_s
    closed_s = max(at, closed_s)
    outstanding = around_downtimes("waiting" if waits else UNACCOUNTED, at, closed_s, found.downtimes)
    return by_stage([*parts, *handled, *outstanding, *end_to_end(closed_s, end_s, after)], begin_s, end_s)


def first_delivered(assignment: UpdateRow, pulled_at: float) -> float:
    """Return when an assignment was delivered for the first time, given the moment of its last delivery."""
    return (
        assignment.delivered_at
        if assignment.delivered_at is not None and pulled_at - assignment.delivered_at >= REDELIVERY_S
        else pulled_at
    )


def turns(rounds: Sequence[RoundRow], became_current: RoundBecameCurrent | None = None) -> dict[int, float | None]:
    """Return when each round began to accept replies, from which its seconds count; None if it has not begun yet.

    A round begins to accept replies when it opens. A pipelined round begins when it becomes the current round. That can
    be long after the previous round closed, because the run may have waited for devices. For a closed round its seconds
    give this moment. Its closing time does not: the round closed before its step was made and stored, which its seconds
    include. For an open round of a pipelined run `became_current` gives it: the last round that became current. Older
    journals do not record that, so there a round begins when the previous one has closed.
    """
    before = {later.round: earlier.closed_at for earlier, later in pairwise(rounds)}
    return {one.round: turn_at(one, before.get(one.round, 0.0), became_current) for one in rounds}


def turn_at(one: RoundRow, before: float | None, became_current: RoundBecameCurrent | None = None) -> float | None:
    """Return the moment at which one round began to accept replies.

    `before` is when the previous round closed: None if it is open, 0 if there is none.
    """
    if before is None:
        return None
    if became_current is not None and not one.reason and one.round >= became_current.round:
        return became_current.at if one.round == became_current.round else None
    if one.opened_at >= before or one.closed_at is None or one.seconds is None:
        return max(one.opened_at, before)
    since = one.seconds - one.spent.get("step_s", 0.0) - one.spent.get("store_s", 0.0)
    return max(one.opened_at, one.closed_at - max(0.0, since))


def _assigned_at(assignment: UpdateRow) -> float:
    assert assignment.arrived_at is not None
    return min(assignment.assigned_at or assignment.arrived_at, assignment.arrived_at)


def settled_at(assignment: UpdateRow, found: RoundRow) -> float | None:
    """Return the time of an assignment's outcome; None if it came after the round closed, 0 if it has no time."""
    if assignment.arrived_at is None and assignment.failed_at is None:
        return 0.0 if assignment.outcome in ("failed", "aggregated", "dropped") else None
    moments = [at for at in (assignment.arrived_at, assignment.failed_at) if at is not None]
    return max((at for at in moments if found.closed_at is None or at <= found.closed_at), default=None)


def clock_was_set(found: RoundRow) -> bool:
    """Return True if the wall clock was set during a downtime of the round: the downtime's length is unknown."""
    return any(downtime_s(*one) is None for one in found.downtimes)


def downtime_of(found: RoundRow) -> float:
    """Return the seconds without an aggregator while the round was open; those of unknown length count as 0."""
    return sum(downtime_s(*one) or 0.0 for one in found.downtimes)


WAITS_FOR: Final[Mapping[str, str]] = {
    "advertise": "keys", "share": "shares", "masked": "masked vectors", "agree": "signatures of the survivors",
    "unmask": "shares that remove the masks",
}  # fmt: skip


@dataclass(frozen=True)
class Phase:
    """Holds a phase of a round. `seconds` is None while the phase is open.

    `is_closed` is False for the phase that is open, or in which the round ended without a sum. `received` is the number
    of clients whose message counts, and `received_bytes` are the bytes of these messages; both are None for a phase
    that was not closed. `last` is the client whose message came last. `dropped` maps each client that dropped out in
    this phase to the reason, "" if no reason is recorded.
    """

    phase: str
    begin_s: float
    seconds: float | None
    is_closed: bool
    received: int | None = None
    received_bytes: int | None = None
    last: str = ""
    dropped: Mapping[str, str] = field(default_factory=dict)

    @property
    def waits_for(self) -> str:
        """Return what the clients send in this phase."""
        return WAITS_FOR[self.phase]


def phases_of(found: RoundRow, closed: Sequence[PhaseRow], assignments: Sequence[UpdateRow]) -> list[Phase]:
    """Return the phases of a secure round in order: those that were closed, then the open one or that of its end.

    `closed` and `assignments` are the round's own rows.
    """
    reasons = {one.device: one.reason for one in assignments if one.outcome in ("failed", "dropped", "over")}
    shown = [
        Phase(
            row.phase, row.elapsed_s - row.seconds, row.seconds, True, len(row.received), row.received_bytes,
            next(reversed(row.received), ""), {device: reasons.get(device, "") for device in row.dropped},
        )
        for row in closed
    ]  # fmt: skip
    if len(closed) < len(PHASES) and (not found.reason or found.reason in NO_STEP):
        before = {device for row in closed for device in row.dropped}
        begin_s = closed[-1].elapsed_s if closed else 0.0
        seconds = None if found.seconds is None else max(0.0, found.seconds - found.missed_s - begin_s)
        lost = {device: reason for device, reason in reasons.items() if device not in before}
        if found.reason:  # the updates that its reason drops did not drop out, nor did clients that it ended for
            ended = found.reason, ROUND_OVER
            lost = {device: reason for device, reason in lost.items() if reason not in ended}
        shown.append(Phase(PHASES[len(closed)], begin_s, seconds, False, dropped=lost))
    return shown


def longest_phase(phases: Sequence[Phase]) -> Phase | None:
    """Return the phase that lasted longest; None if no length is known."""
    return max((one for one in phases if one.seconds is not None), key=lambda one: one.seconds or 0.0, default=None)


def waited_for(one: Phase) -> tuple[str, ...]:
    """Return the clients for whose message the phase waited until its deadline."""
    return tuple(device for device, reason in one.dropped.items() if reason.startswith("stale"))


def waited_text(one: Phase) -> str:
    """Return what a phase waited for as a clause, with the clients that dropped out in it, or the last one to send."""
    silent = waited_for(one)
    said = f"the phase {one.phase} lasted {duration(one.seconds)}, waiting for {one.waits_for}"
    if silent:
        said += f" of {first_name_and_count(silent)} until its deadline"
    elif one.last:
        said += f"; the last came from {one.last}"
    late = [device for device, reason in one.dropped.items() if reason == ROUND_OVER]
    if late:
        said += f"; {first_name_and_count(late)} {'were' if late[1:] else 'was'} not waited for"
    if others := [device for device in one.dropped if device not in (*silent, *late)]:
        kind = one.dropped[others[0]].partition(":")[0]
        said += f"; {first_name_and_count(others)} dropped out" + (f" ({kind})" if kind and not others[1:] else "")
    return said


def open_text(found: RoundRow, phases: Sequence[Phase]) -> str:
    """Return the state of an open secure round as a sentence."""
    lost = sum(len(one.dropped) for one in phases)
    left = f"{len(found.selected) - lost} of {len(found.selected)} clients are in it"
    at = phases[-1]
    waits = f"the phase {at.phase} waits for {at.waits_for}" if not at.is_closed else "the sum is being made"
    return f"Round {found.round} is open: {waits}; {left}."


def first_name_and_count(devices: Sequence[str]) -> str:
    """Return the first device, and the number of the others."""
    return devices[0] if len(devices) == 1 else f"{devices[0]} and {len(devices) - 1} more"
