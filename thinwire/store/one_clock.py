"""A round over whose middle the wall clock was set, on one clock: the one that the aggregator came back with.

What was before an absence over which the clock was set is moved up to it. Where nobody knows how long it took, it takes
no time here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from thinwire.core.absence import absence_s
from thinwire.store.rows import RoundRow, UpdateRow

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
