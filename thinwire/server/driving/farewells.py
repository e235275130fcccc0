"""Devices that may not have heard that a run is over, since they or the aggregator were away: told when they come.

What a device does with it twice is what it does with it once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from thinwire.core.clock import Clock
from thinwire.core.fleet import Envelope, Fleet
from thinwire.core.plan import digest_of
from thinwire.core.types import Ask, Verdict
from thinwire.store import RunRow, Store

UNTOLD_S = 86_400.0  # who has not come back by then is told no more


class Over(NamedTuple):
    """A run that is over. `digest`: of its plan; `at` is wall-clock."""

    run_id: str
    task: str
    digest: str
    identity: str
    at: float = 0.0


def stop_of(over: Over, device: str, verdicts: Sequence[Verdict] = (), farewell: bool = False) -> Envelope:
    """Tell a device that a run is over. `verdicts`: the last on its updates, which are settled with the run whether
    they are told or not; `farewell`: to one that was away at the end.
    """
    ask = Ask(
        f"{over.run_id}.stop.{device}", over.run_id, over.task, "stop", over.digest,
        verdicts=tuple(verdicts), farewell=farewell, identity=over.identity,
    )  # fmt: skip
    return Envelope(device, ask)


class Farewells:
    """Of the runs that ended in the last UNTOLD_S seconds: who is to be told."""

    def __init__(self, fleet: Fleet, store: Store, clock: Clock) -> None:
        self._fleet, self._store, self._clock = fleet, store, clock
        self._due: defaultdict[str, list[Over]] = defaultdict(list)  # device -> what it is told of when it comes
        self._renames = store.roster.renames()
        self._look()

    def over(self, run_id: str, sent: Collection[str]) -> None:
        """A run has ended here, and these devices were sent a stop; who else was asked in it hears it when it comes."""
        row = self._store.run(run_id)
        if row.status in ("done", "failed", "stopped"):
            self._add(row, sent)

    def tell(self, device: str) -> None:
        """It is there: it is sent what it may not have heard, once in this aggregator's life."""
        if (renames := self._store.roster.renames()) != self._renames:
            self._renames = renames
            self._look()  # by today's names, also for who was sent a stop by another, which it cannot take any more
        since = self._clock.wall() - UNTOLD_S
        due = [over for over in self._due.pop(device, ()) if over.at >= since]
        self._fleet.send([stop_of(over, device, farewell=True) for over in due])

    def _look(self) -> None:
        self._due.clear()
        for row in self._store.ended_since(self._clock.wall() - UNTOLD_S):
            self._add(row, ())

    def _add(self, row: RunRow, sent: Collection[str]) -> None:
        over = Over(row.run_id, row.task, digest_of(row.plan), row.identity, row.finished_at or self._clock.wall())
        for device in self._store.untold(row.run_id):
            if device not in sent:
                self._due[device].append(over)
