"""This module computes the time breakdown of an assignment: seconds by stage from its selection until its reply
arrived.

Moments are measured by the aggregator, durations on a device by the device's own stopwatch. Invariant: only durations
are compared.

A wall clock that was set in the middle of a round makes moments on its two sides incomparable: `clock_was_set`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from thinwire.core.clock import downtime_s
from thinwire.core.events import RoundBecameCurrent
from thinwire.store.read_models import MeasureRow, RoundRow, UpdateRow

ON_DEVICE = ("download", "queue", "load", "evaluate", "train", "encode", "commit")
# In order. delivery: from the selection until the first delivery. again: from there to the last delivery, to a device
# that was offline in between. between: the device's time from the delivery to its reply, without its own stages.
ALONG = ("delivery", "again", *ON_DEVICE, "between", "upload")
# receive: from the arrival of the last reply that counted until the aggregator handles it.
OWN = ("receive", "aggregate", "step", "store")
# before: from the round's opening until the selection. away: no aggregator was running and no device was at work.
STAGES = ("before", *ALONG, "away", "waiting", *OWN)
REDELIVERY_S = 1.0  # two deliveries of an assignment within this time count as one
Away = Sequence[Sequence[float]]  # [from, to] without an aggregator, by the wall clock


def along(assignment: UpdateRow, away: Away = ()) -> dict[str, float]:
    """Return the seconds by stage of one assignment with a reply.

    The device's own stages leave a part of its time: without an aggregator this part is `away`, else `between`. Round
    trips are no stage: they are a part of downloads, uploads and `between`. A device that was at work when the
    aggregator stopped had received the assignment before: it is not delivered again.
    """
    assert assignment.arrived_at is not None
    selected = _assigned_at(assignment)
    began = min(max(selected, assignment.began_at or assignment.arrived_at), assignment.arrived_at)
    on_device = {name: getattr(assignment, f"{name}_s") or 0.0 for name in ON_DEVICE}
    untold = selected if within_s(away, selected, began) else began - sum(on_device.values())
    pulled = min(max(selected, assignment.pulled_at or untold), began)
    left = max(0.0, began - pulled - sum(on_device.values()))
    before, after = within_s(away, selected, pulled), min(left, within_s(away, pulled, began))
    first = max(selected, first_delivered(assignment, pulled))
    found = {"delivery": first - selected - within_s(away, selected, first)}
    if first < pulled:
        found["again"] = pulled - first - within_s(away, first, pulled)
    found |= {**on_device, "between": left - after, "upload": assignment.arrived_at - began}
    return {**found, "away": before + after} if before + after else found


def first_delivered(assignment: UpdateRow, pulled_at: float) -> float:
    """Return when an assignment was delivered for the first time, given the moment of its last delivery."""
    return (
        assignment.delivered_at
        if assignment.delivered_at is not None and pulled_at - assignment.delivered_at >= REDELIVERY_S
        else pulled_at
    )


def within_s(away: Away, begin: float, end: float) -> float:
    """Return for how many seconds between two moments no aggregator was running."""
    return sum(max(0.0, min(until, end) - max(since, begin)) for since, until, *_ in away)


def turns(rounds: Sequence[RoundRow], taken: RoundBecameCurrent | None = None) -> dict[int, float | None]:
    """Return when each round began to accept replies, from which its seconds count; None if it has not begun yet.

    A round begins to accept replies when it opens. A pipelined round begins when it becomes the current round. That can
    be long after the previous round closed, because the run may have waited for devices. For a closed round its seconds
    give this moment. Its closing time does not: the round closed before its step was made and stored, which its seconds
    include. For an open round of a pipelined run `taken` gives it: the last round that became current. Older journals
    do not record that, so there a round begins when the previous one has closed.
    """
    before = {later.round: earlier.closed_at for earlier, later in pairwise(rounds)}
    return {one.round: turn_at(one, before.get(one.round, 0.0), taken) for one in rounds}


def turn_at(one: RoundRow, before: float | None, taken: RoundBecameCurrent | None = None) -> float | None:
    """Return the moment at which one round began to accept replies.

    `before` is when the previous round closed: None if it is open, 0 if there is none.
    """
    if before is None:
        return None
    if taken is not None and not one.reason and one.round >= taken.round:
        return taken.at if one.round == taken.round else None
    if one.opened_at >= before or one.closed_at is None or one.seconds is None:
        return max(one.opened_at, before)
    since = one.seconds - one.spent.get("step_s", 0.0) - one.spent.get("store_s", 0.0)
    return max(one.opened_at, one.closed_at - max(0.0, since))


def within(assignment: UpdateRow, opened_at: float, away: Away = ()) -> dict[str, float]:
    """Return `along` for the part of an assignment that lies in a round that opened at `opened_at`.

    An assignment made in the middle of the round starts with the stage `before`. An assignment made before the round
    counts only with the stages that were still to be done when the round opened.
    """
    away = [(max(since, opened_at), until) for since, until, *_ in away if until > opened_at]
    stages, before = along(assignment, away), _assigned_at(assignment) - opened_at
    if before > 0.0:
        gone = within_s(away, opened_at, _assigned_at(assignment))
        return {"before": before - gone, **stages, **({"away": stages.get("away", 0.0) + gone} if gone else {})}
    done = -before
    for name in (name for name in ALONG if name in stages):
        part = min(stages[name], done)
        stages[name], done = stages[name] - part, done - part
    return stages


def _assigned_at(assignment: UpdateRow) -> float:
    assert assignment.arrived_at is not None
    return min(assignment.assigned_at or assignment.arrived_at, assignment.arrived_at)


def over_at(assignment: UpdateRow, found: RoundRow) -> float | None:
    """Return when the assignment had its outcome; None if not before the round closed, 0 if its failure has no time."""
    if assignment.arrived_at is None and assignment.failed_at is None:
        return 0.0 if assignment.outcome in ("failed", "aggregated", "dropped") else None
    moments = [at for at in (assignment.arrived_at, assignment.failed_at) if at is not None]
    return max((at for at in moments if found.closed_at is None or at <= found.closed_at), default=None)


def clock_was_set(found: RoundRow) -> bool:
    """Return True if the wall clock was set during a downtime of the round: the downtime's length is unknown."""
    return any(downtime_s(*one) is None for one in found.away)


def down_s(found: RoundRow) -> float:
    """Return for how many seconds no aggregator was running while the round was open, as far as that is known."""
    return sum(downtime_s(*one) or 0.0 for one in found.away)


def round_trips(measures: Iterable[MeasureRow]) -> dict[str, float]:
    """Return each device's median round trip, in seconds."""
    return {one.device: one.p50 for one in measures if one.kind == "rtt" and one.p50}
