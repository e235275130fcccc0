"""Devices that may not have heard that a run is over, since the aggregator ended first: they are told when they come.

What a device does with it twice is what it does with it once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from thinwire.core.clock import Clock
from thinwire.core.fleet import Envelope, Fleet
from thinwire.core.plan import digest_of
from thinwire.core.types import Ask, Verdict
from thinwire.store import Store

UNTOLD_S = 86_400.0  # who has not come back by then is told no more


def stop_of(run_id: str, task: str, digest: str, device: str, verdicts: Sequence[Verdict] = ()) -> Envelope:
    """What tells a device that a run is over. `digest`: of the run's plan; `verdicts`: the last on its updates, which
    are settled with the run whether they are told or not.
    """
    return Envelope(device, Ask(f"{run_id}.stop.{device}", run_id, task, "stop", digest, verdicts=tuple(verdicts)))


class Farewells:
    """Of the runs that ended in the last UNTOLD_S seconds, before this aggregator was started: who is to be told."""

    def __init__(self, fleet: Fleet, store: Store, clock: Clock) -> None:
        self._fleet = fleet
        self._stops: defaultdict[str, list[Envelope]] = defaultdict(list)  # device -> what it is sent when it comes
        for row, devices in store.untold(clock.wall() - UNTOLD_S):
            for device in devices:
                self._stops[device].append(stop_of(row.run_id, row.task, digest_of(row.plan), device))

    def tell(self, device: str) -> None:
        """It has come: it is sent what it may not have heard, once in this aggregator's life."""
        self._fleet.send(self._stops.pop(device, ()))
