"""Decides which of several active runs may select a device.

A device is leased to the run whose ledger has an assignment of it that has no reply and is not overdue. A lease begins
with the event that selects the device, and ends with its reply, failure, cancellation or deadline. A secure round keeps
its clients after their reply, until it closes or its deadline passes: `agree` and `unmask` follow the masked update,
and on a slow link another run's model would delay these messages. There is no table of leases: after a restart they
follow from the ledgers, which are rebuilt from the journals, and from the replies, which devices send again.

A free device goes to the run with the fewest device-seconds divided by its `[run] priority`, among the runs that could
use it now. An assignment counts once it is settled. So runs that always want devices get equal shares (start-time fair
queueing, Goyal et al. 1996). A run that begins, was paused, or waited for offline devices starts level with the run
that has used least, so no run saves up time. `RoundOpened.device_s` journals what each run has used, so a restarted
aggregator makes the same decision.

The runs that want devices decide one after the other, the one that has used least first, and only when no driver has
other work (`deciding`). So the decision does not depend on whose round closed first within one moment.

A run with Poisson sampling leases no devices and goes on alone: leases and times of replies would tell other runs which
devices were sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass

from thinwire.core.formatting import counted
from thinwire.core.owner_file import MAX_RUNS
from thinwire.server.state.assignment_ledger import AssignmentLedger, AssignmentRecord


@dataclass
class RunShare:
    """Holds what an active run has used of the devices, and which ones it would use now if they were free."""

    run_id: str
    priority: float
    ledger: AssignmentLedger
    elapsed: Callable[[], float]
    replied: Callable[[], Container[str]] = tuple  # assignments whose replies wait for the next round
    wants: frozenset[str] = frozenset()
    leases: bool = True  # False: with Poisson sampling
    holds_until_close: bool = False  # True with secure aggregation: a round needs its clients after their replies too
    is_going: bool = False  # one of the `max_runs` whose rounds go on
    waits_for_offline: bool = False  # the run waits for devices that are offline

    @property
    def used_s(self) -> float:
        """Return the device-seconds that the run has used, divided by its priority."""
        return self.ledger.device_s / self.priority

    def raise_used_to(self, used_s: float) -> None:
        """Raise the device-seconds of the run to `used_s` times its priority, if it has used less."""
        self.ledger.device_s = max(self.ledger.device_s, used_s * self.priority)

    def uses(self, device: str) -> bool:
        """Return True if the device works for this run, on an assignment or in a secure round that has not closed."""
        if not self.leases:
            return False
        accepted = self.ledger.accepted(device) if self.holds_until_close else None
        if accepted is not None and self.is_open(accepted):
            return True
        return any(map(self.is_open, self.ledger.outstanding(device)))

    def leased_assignments(self) -> Iterator[AssignmentRecord]:
        """Yield the assignments on which devices work for the run now."""
        accepted = self.ledger.all_accepted() if self.holds_until_close else ()
        yield from (one for one in (*self.ledger.oldest(), *accepted) if self.leases and self.is_open(one))

    def is_open(self, assigned: AssignmentRecord) -> bool:
        """Return True if an assignment has no reply that waits for the next round, and is not overdue."""
        return self.elapsed() < assigned.due_s and assigned.assignment_id not in self.replied()


class DeviceLeases:
    """Decides which devices a run may select, while other runs are active.

    The drivers of runs take turns, so between a question and the event that selects the device nothing changes.

    >>> leases = DeviceLeases()
    >>> leases.join(RunShare("digits-1", 1.0, AssignmentLedger(), lambda: 0.0))
    >>> leases.reason("digits-1", "pi-1")
    ''
    """

    def __init__(self, max_runs: int = MAX_RUNS) -> None:
        self.max_runs = max_runs
        self.deciding = ""  # the run that may select devices now
        self._runs: dict[str, RunShare] = {}

    def may_decide(self, run_id: str) -> bool:
        """Return True if the run may select devices for a round now: it is alone, or it is the one that decides."""
        return len(self._runs) < 2 or self._sharing(run_id) is None or self.deciding == run_id

    def _sharing(self, run_id: str) -> RunShare | None:
        """Return the share of an active run that leases devices, None of others."""
        mine = self._runs.get(run_id)
        return mine if mine and mine.leases else None

    def join(self, mine: RunShare, begins: bool = True) -> None:
        """Add a run that becomes active.

        A run that `begins` or goes on after a pause starts level with the run that has used least. Without `begins` it
        was resumed after a restart, and has used what its ledger says.
        """
        if begins:
            mine.raise_used_to(min((one.used_s for one in self._runs.values() if one.leases), default=0.0))
        self._runs[mine.run_id] = mine

    def leave(self, run_id: str) -> None:
        """Remove a run that is over, paused or left to the next start."""
        self._runs.pop(run_id, None)

    def level_waiting_runs(self) -> None:
        """Raise the use of each run that waits for offline devices to the least use of the other runs."""
        least = min(
            (one.used_s for one in self._runs.values() if one.leases and not one.waits_for_offline), default=0.0
        )
        for one in self._runs.values():
            if one.waits_for_offline:
                one.raise_used_to(least)

    def reason(self, run_id: str, device: str) -> str:
        """Return why other runs keep this device from the run, as a phrase about the device; "" if they do not."""
        if len(self._runs) < 2 or (mine := self._sharing(run_id)) is None:
            return ""
        others = [one for one in self._runs.values() if one is not mine]
        if holder := next((one for one in others if one.uses(device)), None):
            return f"works for {holder.run_id}"
        for one in others:
            if device in one.wants and one.used_s < mine.used_s:
                return f"is kept for {one.run_id}, which has used less time of devices"
        return ""

    def reasons(self, run_id: str, devices: Iterable[str]) -> dict[str, str]:
        """Return the devices, of those given, that other runs keep from this run, each with the reason."""
        if len(self._runs) < 2:
            return {}
        return {device: why for device in devices if (why := self.reason(run_id, device))}

    def want(self, run_id: str, devices: Iterable[str]) -> None:
        """Record the devices that the run would select now if other runs did not keep them; none if it has enough."""
        if mine := self._sharing(run_id):
            mine.wants = frozenset(devices)

    def begin(self, run_id: str) -> str:
        """Count the run among those whose rounds go on; return why it may not, or "" if it may."""
        refusal = self.refusal(run_id)
        if mine := self._runs.get(run_id):
            mine.waits_for_offline, mine.is_going = False, not refusal
            if refusal:
                self.want(run_id, ())
        return refusal

    def refusal(self, run_id: str) -> str:
        """Return why the run's rounds may not go on beside those of other runs; "" if they may.

        A run with Poisson sampling goes on alone: the times of a device's replies to another run would tell whether
        the device was sampled.
        """
        mine = self._runs.get(run_id)
        if mine is None or mine.is_going:
            return ""
        going = [one for one in self._runs.values() if one.is_going]
        if len(going) >= self.max_runs:
            return (
                f"waiting: {counted(self.max_runs, 'other run')} go on, the most that aggregator.toml allows (max_runs)"
            )
        sampled = next((one for one in going if not one.leases), None)
        if sampled or (going and not mine.leases):
            secret = "a run with [privacy] sampling_rate goes on alone, so that no reply tells who was sampled"
            return f"waiting for {(sampled or going[0]).run_id}: {secret}"
        return ""

    def waits_for_offline(self, run_id: str) -> bool:
        """Return True if the run waits for offline devices."""
        return run_id in self._runs and self._runs[run_id].waits_for_offline

    def others_busy_s(self, run_id: str) -> float:
        """Return the seconds after which no device works for another run any more, if all reply in time."""
        others = [one for one in self._runs.values() if one.run_id != run_id]
        left_s = (assigned.due_s - one.elapsed() for one in others for assigned in one.leased_assignments())
        return max(left_s, default=0.0)

    def startable_runs(self) -> int:
        """Return how many more runs may start; one that is paused or waits for offline devices does not count."""
        return max(0, self.max_runs - sum(not one.waits_for_offline for one in self._runs.values()))

    def wait_for_offline(self, run_id: str) -> None:
        """Count the run no longer among those whose rounds go on, because devices that it needs are offline."""
        if run_id in self._runs:
            self._runs[run_id].is_going, self._runs[run_id].waits_for_offline = False, True
            self.want(run_id, ())

    def competing_runs(self, run_id: str) -> list[str]:
        """Return the names of the other runs that use devices or want some, sorted."""
        others = [one for one in self._runs.values() if one.run_id != run_id and one.leases]
        return sorted(one.run_id for one in others if one.ledger.busy or one.wants or any(one.leased_assignments()))

    def waiting(self) -> list[str]:
        """Return the runs that want devices, the one with the least use first."""
        return self.least_used_first([one.run_id for one in self._runs.values() if one.wants])

    def least_used_first(self, run_ids: Iterable[str]) -> list[str]:
        """Return the runs sorted by their use, the least first; a run that has not begun has used nothing."""
        used = {run_id: one.used_s for run_id, one in self._runs.items()}
        return sorted(run_ids, key=lambda run_id: (used.get(run_id, 0.0), run_id))
