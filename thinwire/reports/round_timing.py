"""This module computes the time breakdown of an assignment: seconds by stage from its selection until its reply
arrived.

Moments are measured by the aggregator, durations on a device by the device's own stopwatch. Invariant: only durations
are compared.

A wall clock that was set in the middle of a round makes moments on its two sides incomparable: `clock_was_set`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from thinwire.core.clock import downtime_s
from thinwire.core.events import RoundBecameCurrent
from thinwire.store.read_models import RoundRow, UpdateRow

ON_DEVICE = ("download", "queue", "load", "evaluate", "train", "encode", "commit")
# In order. delivery: from the selection until the first delivery. again: from there to the last delivery, to a device
# that was offline in between. between: the device's time from the delivery to its reply, without its own stages.
ALONG = ("delivery", "again", *ON_DEVICE, "between", "upload")
# receive: from the arrival of the last reply that counted until the aggregator handles it.
OWN = ("receive", "aggregate", "step", "store")
# before: from the round's opening until the selection. downtime: no aggregator was running and no device was at work.
STAGES = ("before", *ALONG, "downtime", "waiting", *OWN)
REDELIVERY_S = 1.0  # two deliveries of an assignment within this time count as one
Downtimes = Sequence[Sequence[float]]  # [from, to] without an aggregator, by the wall clock


def along(assignment: UpdateRow, downtimes: Downtimes = ()) -> dict[str, float]:
    """Return the seconds by stage of one assignment with a reply.

    The device's own stages leave a part of its time: without an aggregator this part is `downtime`, else `between`.
    Round trips are no stage: they are a part of downloads, uploads and `between`. A device that was at work when the
    aggregator stopped had received the assignment before: it is not delivered again.
    """
    assert assignment.arrived_at is not None
    selected = _assigned_at(assignment)
    began = min(max(selected, assignment.began_at or assignment.arrived_at), assignment.arrived_at)
    on_device = {name: getattr(assignment, f"{name}_s") or 0.0 for name in ON_DEVICE}
    untold = selected if within_s(downtimes, selected, began) else began - sum(on_device.values())
    pulled = min(max(selected, assignment.pulled_at or untold), began)
    left = max(0.0, began - pulled - sum(on_device.values()))
    before, after = within_s(downtimes, selected, pulled), min(left, within_s(downtimes, pulled, began))
    first = max(selected, first_delivered(assignment, pulled))
    found = {"delivery": first - selected - within_s(downtimes, selected, first)}
    if first < pulled:
        found["again"] = pulled - first - within_s(downtimes, first, pulled)
    found |= {**on_device, "between": left - after, "upload": assignment.arrived_at - began}
    return {**found, "downtime": before + after} if before + after else found


def first_delivered(assignment: UpdateRow, pulled_at: float) -> float:
    """Return when an assignment was delivered for the first time, given the moment of its last delivery."""
    return (
        assignment.delivered_at
        if assignment.delivered_at is not None and pulled_at - assignment.delivered_at >= REDELIVERY_S
        else pulled_at
    )


def within_s(downtimes: Downtimes, begin: float, end: float) -> float:
    """Return for how many seconds between two moments no aggregator was running."""
    return sum(max(0.0, min(until, end) - max(since, begin)) for since, until, *_ in downtimes)


def turns(rounds: Sequence[RoundRow], taken: RoundBecameCurrent | None = None) -> dict[int, float | None]:
    """Return when each round began to accept replies, from which its seconds count; None if it has not begun yet.

    A round begins to accept replies when it opens. A pipelined round begins when it becomes the current round. That can
    be long after the previous round closed, because the run may have waited for devices. For a closed round its seconds
    give this moment. Its closing time does not: the round closed before its step was made and stored, which its seconds
    include. For an open round of a pipelined run `taken` gives it: the last round that became current. Older journals
    do not record that, so there a round begins when the previous one has closed.
    """
    before = {later.round: earlier.closed_at for earlier, later in pairwise(rounds)}
    return {one.round: _turn_at(one, before.get(one.round, 0.0), taken) for one in rounds}


def _turn_at(one: RoundRow, before: float | None, taken: RoundBecameCurrent | None) -> float | None:
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


def within(assignment: UpdateRow, opened_at: float, downtimes: Downtimes = ()) -> dict[str, float]:
    """Return `along` for the part of an assignment that lies in a round that opened at `opened_at`.

    An assignment made in the middle of the round starts with the stage `before`. An assignment made before the round
    counts only with the stages that were still to be done when the round opened.
    """
    downtimes = [(max(since, opened_at), until) for since, until, *_ in downtimes if until > opened_at]
    stages, before = along(assignment, downtimes), _assigned_at(assignment) - opened_at
    if before > 0.0:
        gone = within_s(downtimes, opened_at, _assigned_at(assignment))
        return {"before": before - gone, **stages, **({"downtime": stages.get("downtime", 0.0) + gone} if gone else {})}
    done = -before
    for name in (name for name in ALONG if name in stages):
        part = min(stages[name], done)
        stages[name], done = stages[name] - part, done - part
    return stages


def _assigned_at(assignment: UpdateRow) -> float:
    assert assignment.arrived_at is not None
    return min(assignment.assigned_at or assignment.arrived_at, assignment.arrived_at)


def clock_was_set(found: RoundRow) -> bool:
    """Return True if the wall clock was set during a downtime of the round: the downtime's length is unknown."""
    return any(downtime_s(*one) is None for one in found.downtimes)
