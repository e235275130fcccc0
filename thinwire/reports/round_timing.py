"""An ask as seconds by stage: what a device did from when it was asked until its answer was here.

Moments are the aggregator's, stretches on a device are by its own stopwatch; only durations are compared.
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
# As it happens. between: what a device's own stages leave of its time, from taking the ask up until its answer began.
# again: from then until it was taken up for the last time, by a device that was gone meanwhile.
ALONG = ("asked", "again", *ON_DEVICE, "between", "upload")
OWN = ("fold", "step", "store")
# before: from a round's opening until the device was asked; away: no aggregator was there, and no device at work
STAGES = ("before", *ALONG, "away", "waiting", *OWN)
ANEW_S = 1.0  # an ask that is handed out twice within so long was taken up once
Away = Sequence[Sequence[float]]  # [from, to] without an aggregator, on one clock (one_clock.py)


def along(ask: UpdateRow, away: Away = ()) -> dict[str, float]:
    """Seconds by stage of one ask that was answered. Of what the device's own stages leave of its time, that without an
    aggregator is `away`, the rest `between`. Round trips are no stage: they lie in downloads, uploads and between.

    A device that worked on it when the aggregator ended took it up before: it is not handed out again.
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
    """When an ask was taken up for the first time, of one that was taken up for the last time then."""
    return ask.taken_at if ask.taken_at is not None and pulled_at - ask.taken_at >= ANEW_S else pulled_at


def within_s(away: Away, begin: float, end: float) -> float:
    """For how many seconds between two moments no aggregator was there."""
    return sum(max(0.0, min(until, end) - max(since, begin)) for since, until, *_ in away)


def turns(rounds: Sequence[RoundRow], taken: HeadTaken | None = None) -> dict[int, float | None]:
    """When each round began to take answers, from which its seconds count; None: it does not yet.

    That is when it opened, or, where asks were sent ahead, when it became the head of the line, which may be long after
    the one before it closed: the run can have waited for devices between the two. Of a closed round its seconds tell;
    the moment of its closing is from before its step was made and stored, which they hold too. Of an open one `taken`
    tells, of a run whose asks go ahead: the last whose answers were taken. Older journals do not say that; there a
    round's turn comes when the one before it has closed.
    """
    before = {later.round: earlier.closed_at for earlier, later in pairwise(rounds)}
    return {one.round: _turn_at(one, before.get(one.round, 0.0), taken) for one in rounds}


def _turn_at(one: RoundRow, before: float | None, taken: HeadTaken | None) -> float | None:
    """`before`: when the round before it closed; None where it is open, 0 where there is none."""
    if before is None:
        return None
    if taken is not None and not one.reason and one.round >= taken.round:
        return taken.at if one.round == taken.round else None
    if one.opened_at >= before or one.closed_at is None or one.seconds is None:
        return max(one.opened_at, before)
    since = one.seconds - one.spent.get("step_s", 0.0) - one.spent.get("store_s", 0.0)
    return max(one.opened_at, one.closed_at - max(0.0, since))


def within(ask: UpdateRow, opened_at: float, away: Away = ()) -> dict[str, float]:
    """`along` an ask, as far as a round saw of it that opened then and was without an aggregator so long.

    Of one that was asked in the middle of the round nothing was under way before; of one that was asked earlier only
    what was still to be done when the round opened counts.
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


# A round over whose middle the wall clock was set, on one clock: the one that the aggregator came back with.
#
# What was before an absence over which the clock was set is moved up to it. Where nobody knows how long it took, it
# takes no time here.


Move = Callable[[float], float]
MOMENTS = ("asked_at", "taken_at", "pulled_at", "began_at", "arrived_at", "failed_at")


def on_one_clock(found: RoundRow, turn_at: float | None, *asks: Sequence[UpdateRow]) -> tuple[
    RoundRow, float | None, list[list[UpdateRow]]
]:  # fmt: skip
    """The round, when it began to take answers, and rows of asks; as they are where no clock was set."""
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
    """A moment belongs to the side of the jump to which it is nearer. A clock that was set back by less than the round
    had taken by then is left: nobody can tell one side from the other.
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
    """Who answered last of those that counted: when the round closed, that was read off clocks that contradict."""
    counted = [one for some in rows for one in some if one.update_id in found.folded]
    came = [(one.arrived_at, one.device) for one in counted if one.arrived_at is not None]
    return max(came)[1] if came else found.slowest
