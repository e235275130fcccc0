"""This module computes the time breakdown of an assignment: seconds by stage from its selection until its reply
arrived.

Moments are measured by the aggregator, durations on a device by the device's own stopwatch. Invariant: only durations
are compared.

`on_one_clock` corrects a round during which the wall clock was set: all moments are moved to the clock after the
downtime. Moments before the downtime in which the clock was set are moved up to its end. A downtime of unknown length
takes no time here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from thinwire.core.clock import absence_s
from thinwire.core.events import HeadTaken
from thinwire.store.read_models import RoundRow, UpdateRow

ON_DEVICE = ("download", "queue", "evaluate", "train", "encode")
# In order. asked: from the selection until the first delivery. again: from there to the last delivery, to a device
# that was offline in between. between: the device's time from the delivery to its reply, without its own stages.
ALONG = ("asked", "again", *ON_DEVICE, "between", "upload")
OWN = ("fold", "step", "store")
# before: from the round's opening until the selection. away: no aggregator was running and no device was at work.
STAGES = ("before", *ALONG, "away", "waiting", *OWN)
ANEW_S = 1.0  # two deliveries of an assignment within this time count as one
Away = Sequence[Sequence[float]]  # [from, to] without an aggregator, on one clock (`on_one_clock`)


def along(ask: UpdateRow, away: Away = ()) -> dict[str, float]:
    """Return the seconds by stage of one assignment with a reply.

    The device's own stages leave a part of its time: without an aggregator this part is `away`, else `between`. Round
    trips are no stage: they are a part of downloads, uploads and `between`. A device that was at work when the
    aggregator stopped had received the assignment before: it is not delivered again.
    """
    assert ask.arrived_at is not None
    asked = _asked_at(ask)
    began = min(max(asked, ask.began_at or ask.arrived_at), ask.arrived_at)
    on_device = {name: getattr(ask, f"{name}_s") or 0.0 for name in ON_DEVICE}
    untold = asked if within_s(away, asked, began) else began - sum(on_device.values())
    pulled = min(max(asked, ask.pulled_at or untold), began)
    left = max(0.0, began - pulled - sum(on_device.values()))
    before, after = within_s(away, asked, pulled), min(left, within_s(away, pulled, began))
    first = max(asked, taken_first(ask, pulled))
    found = {"asked": first - asked - within_s(away, asked, first)}
    if first < pulled:
        found["again"] = pulled - first - within_s(away, first, pulled)
    found |= {**on_device, "between": left - after, "upload": ask.arrived_at - began}
    return {**found, "away": before + after} if before + after else found


def taken_first(ask: UpdateRow, pulled_at: float) -> float:
    """Return when an assignment was delivered for the first time, given the moment of its last delivery."""
    return ask.taken_at if ask.taken_at is not None and pulled_at - ask.taken_at >= ANEW_S else pulled_at


def within_s(away: Away, begin: float, end: float) -> float:
    """Return for how many seconds between two moments no aggregator was running."""
    return sum(max(0.0, min(until, end) - max(since, begin)) for since, until, *_ in away)


def turns(rounds: Sequence[RoundRow], taken: HeadTaken | None = None) -> dict[int, float | None]:
    """Return when each round began to accept replies, from which its seconds count; None if it has not begun yet.

    A round begins to accept replies when it opens. A pipelined round begins when it becomes the current round. That can
    be long after the previous round closed, because the run may have waited for devices. For a closed round its seconds
    give this moment. Its closing time does not: the round closed before its step was made and stored, which its seconds
    include. For an open round of a pipelined run `taken` gives it: the last round that became current. Older journals
    do not record that, so there a round begins when the previous one has closed.
    """
    before = {later.round: earlier.closed_at for earlier, later in pairwise(rounds)}
    return {one.round: _turn_at(one, before.get(one.round, 0.0), taken) for one in rounds}


def _turn_at(one: RoundRow, before: float | None, taken: HeadTaken | None) -> float | None:
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


def within(ask: UpdateRow, opened_at: float, away: Away = ()) -> dict[str, float]:
    """Return `along` for the part of an assignment that lies in a round that opened at `opened_at`.

    An assignment made in the middle of the round starts with the stage `before`. An assignment made before the round
    counts only with the stages that were still to be done when the round opened.
    """
    away = [(max(since, opened_at), until) for since, until, *_ in away if until > opened_at]
    stages, before = along(ask, away), _asked_at(ask) - opened_at
    if before > 0.0:
        gone = within_s(away, opened_at, _asked_at(ask))
        return {"before": before - gone, **stages, **({"away": stages.get("away", 0.0) + gone} if gone else {})}
    done = -before
    for name in (name for name in ALONG if name in stages):
        part = min(stages[name], done)
        stages[name], done = stages[name] - part, done - part
    return stages


def _asked_at(ask: UpdateRow) -> float:
    assert ask.arrived_at is not None
    return min(ask.asked_at or ask.arrived_at, ask.arrived_at)


Move = Callable[[float], float]
MOMENTS = ("asked_at", "taken_at", "pulled_at", "began_at", "arrived_at", "failed_at")


def on_one_clock(found: RoundRow, turn_at: float | None, *asks: Sequence[UpdateRow]) -> tuple[
    RoundRow, float | None, list[list[UpdateRow]]
]:  # fmt: skip
    """Return the round, the moment when it began to accept replies, and rows of assignments, all on one clock.

    They are returned unchanged if the clock was not set.
    """
    rows = [list(some) for some in asks]
    for at, (gone_at, back_at, *set_by_s) in enumerate(found.away):
        took_s = absence_s(gone_at, back_at, *set_by_s)
        if took_s is not None and not set_by_s:
            continue
        since = back_at - (took_s or 0.0)
        move = _move(found.opened_at, gone_at, since)
        turn_at = None if turn_at is None else move(turn_at)
        away = [[move(one[0]), move(one[1]), *one[2:]] for one in found.away]
        away[at] = [since, back_at]
        closed_at = None if found.closed_at is None else move(found.closed_at)
        found = replace(found, opened_at=move(found.opened_at), closed_at=closed_at, away=away)
        rows = [[_moved(one, move) for one in some] for some in rows]
        found = replace(found, slowest=_slowest(found, rows))
    return found, turn_at, rows


def _move(opened_at: float, gone_at: float, back_at: float) -> Move:
    """Return a function that corrects a moment; a moment belongs to the side of the jump to which it is nearer.

    A clock that was set back by less than the round's duration until then is not corrected: the sides cannot be told
    apart.
    """
    by = back_at - gone_at
    if by > 0:
        middle = (gone_at + back_at) / 2
        return lambda at: at + by if at < middle else at
    middle = (back_at + opened_at) / 2
    return lambda at: at + by if back_at < opened_at and at >= middle else at


def _moved(one: UpdateRow, move: Move) -> UpdateRow:
    known = {name: at for name in MOMENTS if (at := getattr(one, name)) is not None}
    moved: dict[str, Any] = {name: move(at) for name, at in known.items()}
    return replace(one, **moved)


def _slowest(found: RoundRow, rows: Sequence[Sequence[UpdateRow]]) -> str:
    """Return the device whose aggregated update arrived last.

    The stored value was read when the round closed, from clocks that contradict each other.
    """
    counted = [one for some in rows for one in some if one.update_id in found.folded]
    came = [(one.arrived_at, one.device) for one in counted if one.arrived_at is not None]
    return max(came)[1] if came else found.slowest
