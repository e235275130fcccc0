"""Why each closed round of a run took so long, kept: tabs ask for it often, and only the newest still change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from thinwire.store import RoundRow, RunRow, Store, UpdateRow
from thinwire.store.stages import turns
from thinwire.store.why import Why
from thinwire.store.why_of_run import round_trips, whys
from thinwire.web.sentences import buffered

EARLIER_ROUNDS = 20  # in which earlier asks are looked for
AT_WORK = ("asked", "accepted")  # outcomes of an ask of which nothing is decided yet
LOOK_BACK = 3  # closed rounds read again when another closes: late answers tell more of them
KEPT_RUNS = 8
AT_ONCE = 24  # rounds, from which on all asks of a run are read at once


@dataclass
class Kept:
    """`state`: what of the run was looked at."""

    state: object = None
    found: list[Why] = field(default_factory=list)


class Reasons:
    """Of the runs that were looked at last. A late answer tells more of its round when the next one closes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._kept: dict[str, Kept] = {}

    def of(self, row: RunRow, rounds: Sequence[RoundRow]) -> list[Why]:
        """In their order; `rounds`: all of the run."""
        closed = [one for one in rounds if one.reason]
        state, kept = (len(closed), row.status), self._kept.pop(row.run_id, Kept())
        if kept.state != state:
            first = max(0, min(len(kept.found), len(closed)) - LOOK_BACK)
            kept = Kept(state, [*kept.found[:first], *self._read(row, rounds, closed[first:])])
        self._kept[row.run_id] = kept
        for oldest in list(self._kept)[:-KEPT_RUNS]:
            self._kept.pop(oldest, None)
        return kept.found

    def rtts(self, row: RunRow) -> Mapping[str, float]:
        """Seconds of each device's round trip; nothing where there is no wire."""
        return round_trips(self._store.measures("rtt")) if row.source == "devices" else {}

    def _read(self, row: RunRow, rounds: Sequence[RoundRow], wanted: Sequence[RoundRow]) -> list[Why]:
        if len(wanted) >= AT_ONCE:
            asks = self._store.updates(row.run_id)
        else:
            asks = asks_of(row, wanted, lambda number: self._store.updates(row.run_id, number))
        return whys(row, wanted, asks, turns(rounds), self.rtts(row))


def asks_of(
    row: RunRow, rounds: Sequence[RoundRow], read: Callable[[int], Sequence[UpdateRow]]
) -> list[UpdateRow]:  # fmt: skip
    """Those of these rounds, and the earlier ones that were folded into them."""
    found = dict[str, UpdateRow]()
    for one in rounds:
        own = read(one.round)
        found |= {ask.ask_id: ask for ask in [*own, *earlier(row, one, own, read)]}
    return list(found.values())


def earlier(
    row: RunRow, found: RoundRow, own: Sequence[UpdateRow], read: Callable[[int], Sequence[UpdateRow]]
) -> list[UpdateRow]:
    """Asks of earlier rounds that were folded into this one; in an open buffer also those that may yet be."""
    missing = set(found.folded) - {one.update_id for one in own}
    waits = not found.reason and buffered(row)
    came = list[UpdateRow]()
    for number in range(found.round - 1, max(0, found.round - EARLIER_ROUNDS), -1):
        if found.reason and not missing:
            break
        asks = read(number)
        mine = [one for one in asks if one.update_id in missing or one.folded_round == found.round]
        came += mine + [one for one in asks if waits and one.outcome in AT_WORK]
        missing -= {one.update_id for one in mine}
    return came
