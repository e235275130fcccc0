"""Several runs share the devices of one aggregator: which run a device works for, and which run gets it next.

A device works for one run at a time. It is leased to the run whose ledger has an assignment of it that is not overdue,
so a lease begins with the event that selects the device, and ends with its reply, failure, cancellation or deadline.
No table of leases exists: after a restart the ledgers of all runs, rebuilt from their journals, say the same.

Runs select devices in turn, when nothing else is to be done: first the one that has had least (`deciding`).
So it does not matter whose round closed first at one moment, nor whether a restart of the aggregator came between.

A free device goes to the run that has had the least device-seconds for its `[run] priority`, among the runs that could
use it now. So runs that always want devices have equal shares (start-time fair queueing, Goyal et al. 1996): a run that
begins, or whose devices were not there, starts level with the others and cannot save up time. An assignment counts once
it is settled. The journal of each run has what it has had, so a restart of the aggregator decides as it would have.

Runs with Poisson sampling are not here. A lease would tell other runs which devices were sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from thinwire.core.formatting import counted
from thinwire.server.state.assignment_ledger import AssignmentLedger

MAX_RUNS = 4  # whose rounds go on at once


@dataclass
class RunShare:
    """Holds what an active run has had of the devices, and which ones it would use now if they were free."""

    run_id: str
    priority: float
    ledger: AssignmentLedger
    elapsed: Callable[[], float]
    wants: frozenset[str] = frozenset()
    has_place: bool = False  # among the `max_runs` whose rounds go on
    is_short: bool = False  # of devices that are there: it needs no place

    @property
    def used_s(self) -> float:
        """Return the device-seconds that the run has had, over its priority."""
        return self.ledger.device_s / self.priority

    def raise_to(self, used_s: float) -> None:
        """Count the run as if it had had so much at least."""
        self.ledger.device_s = max(self.ledger.device_s, used_s * self.priority)

    def has(self, device: str) -> bool:
        """Return True if the device has an assignment of this run that is not overdue."""
        return any(self.elapsed() < assigned.due_s for assigned in self.ledger.outstanding(device))


class DeviceLeases:
    """Decides which devices a run may select, while other runs are active.

    The drivers of runs take turns, so between a question and the event that selects the device nothing changes.

    >>> leases = DeviceLeases()
    >>> leases.join("digits-1", 1.0, AssignmentLedger(), lambda: 0.0)
    >>> leases.reason("digits-1", "pi-1")
    ''
    """

    def __init__(self, max_runs: int = MAX_RUNS) -> None:
        self.max_runs = max_runs
        self.deciding = ""  # the run that may select devices now
        self._runs: dict[str, RunShare] = {}

    def may_decide(self, run_id: str) -> bool:
        """Return True if the run may select devices for a round now, because it is alone or it is its turn."""
        return len(self._runs) < 2 or run_id not in self._runs or self.deciding == run_id

    def join(self, run_id: str, priority: float, ledger: AssignmentLedger, elapsed: Callable[[], float]) -> None:
        """Add a run that becomes active; it starts level with the run that has had least."""
        mine = RunShare(run_id, priority, ledger, elapsed)
        if not ledger.rounds:
            mine.raise_to(min((one.used_s for one in self._runs.values()), default=0.0))
        self._runs[run_id] = mine

    def leave(self, run_id: str) -> None:
        """Remove a run that is over, paused or left to the next start."""
        self._runs.pop(run_id, None)

    def level(self) -> None:
        """Raise the runs that wait for absent devices to the one that has had least of the others."""
        least = min((one.used_s for one in self._runs.values() if not one.is_short), default=0.0)
        for one in self._runs.values():
            if one.is_short:
                one.raise_to(least)

    def reason(self, run_id: str, device: str) -> str:
        """Return why other runs keep this device from the run, as a phrase about the device; "" if they do not."""
        if len(self._runs) < 2 or run_id not in self._runs:
            return ""
        mine = self._runs[run_id]
        others = [one for one in self._runs.values() if one is not mine]
        if holder := next((one for one in others if one.has(device)), None):
            return f"works for {holder.run_id}"
        for one in others:
            if device in one.wants and one.used_s < mine.used_s:
                return f"is kept for {one.run_id}, which has had less time of devices"
        return ""

    def taken(self, run_id: str, devices: Iterable[str]) -> dict[str, str]:
        """Return device -> reason for those of these devices that other runs keep from the run."""
        if len(self._runs) < 2:
            return {}
        return {device: why for device in devices if (why := self.reason(run_id, device))}

    def want(self, run_id: str, devices: Iterable[str]) -> None:
        """Record the devices that the run would select now if other runs did not keep them; none if it has enough."""
        if run_id in self._runs:
            self._runs[run_id].wants = frozenset(devices)

    def place(self, run_id: str) -> str:
        """Give the run a place among those whose rounds go on; return why there is none, "" if it has one."""
        mine = self._runs.get(run_id)
        if mine is None or mine.has_place:
            return ""
        mine.is_short = False
        if sum(one.has_place for one in self._runs.values()) >= self.max_runs:
            return f"waiting: {counted(self.max_runs, 'other run')} at once, as aggregator.toml says (max_runs)"
        mine.has_place = True
        return ""

    def free_places(self, drivers: int) -> int:
        """Return how many further runs may start beside so many drivers: those that wait for devices have no place."""
        return max(0, self.max_runs - drivers + sum(one.is_short for one in self._runs.values()))

    def give_up_place(self, run_id: str) -> None:
        """Take the run's place, because it waits for devices that are not there."""
        if run_id in self._runs:
            self._runs[run_id].has_place, self._runs[run_id].is_short = False, True

    def holders(self, run_id: str) -> list[str]:
        """Return the other runs that have devices or want some, sorted."""
        others = (one for one in self._runs.values() if one.run_id != run_id)
        return sorted(one.run_id for one in others if one.ledger.busy or one.wants)

    def waiting(self) -> list[str]:
        """Return the runs that want devices, those first that have had least."""
        return self.in_turn([one.run_id for one in self._runs.values() if one.wants])

    def in_turn(self, run_ids: Iterable[str]) -> list[str]:
        """Return the runs in the order of what they have had, least first; a run that has not begun is first."""
        used = {run_id: one.used_s for run_id, one in self._runs.items()}
        return sorted(run_ids, key=lambda run_id: (used.get(run_id, 0.0), run_id))
