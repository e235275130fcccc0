"""Runs the drivers of several runs on one thread, one at a time, and gives each the arrivals of its own run.

A driver (`run.drive`) is written as if it were alone: it polls its fleet, and handles what arrived. Here each driver is
a greenlet: a function that is suspended inside its poll. The dispatcher resumes it when it has arrivals, or when its
wait has ended; that is its turn. So there are no locks: one thread calls the real fleet, and nothing changes while a
driver reads which devices are free and records its selection. The order of turns follows from the arrivals alone, so
runs on a virtual clock repeat bit for bit. Uploads and sums do not wait for a turn: they have threads of their own.

A full disk pauses all runs (`FullDisk`): the service stays up, reports it, and goes on when there is space. A driver
journals before it acts, so it can wait in the middle of a write: `RunFleet.wait_for_disk` suspends the driver, which
then repeats the write. Meanwhile no driver gets a turn, and the clock of all runs is stopped. No decision is made and
no reply is lost: replies that arrive stay in the mailboxes, and a device sends an upload again that the disk refused.
Without a reserve (simulations, tests) `NotWritten` is raised.

A driver that raised an error, for example because the database did not answer, begins again from the journal if its run
is not over. It gets the replies again that the last driver had polled and not acknowledged, as after a restart of the
aggregator, which finds them in the spool.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from greenlet import getcurrent, greenlet

from thinwire.core.clock import Clock, StoppableClock
from thinwire.core.disk_reserve import Reserve
from thinwire.core.errors import TRANSIENT, NotFound, NotWritten, Unreachable
from thinwire.core.events import ENDED, Event
from thinwire.core.fleet import Arrival, ClientConnected, ClientDisconnected, Delivered, Fleet
from thinwire.core.run_events import DiskFilled, DiskFreed
from thinwire.core.statedir import ON_FULL_DISK
from thinwire.core.types import Failure, PhaseReply, ReplyHeader, UpdateId
from thinwire.server.context import MIN_WAIT_S, POLL_S
from thinwire.server.leases import DeviceLeases
from thinwire.server.policy.eligibility import ConnectedDevices
from thinwire.store import Store

SPACE_CHECK_S = 2.0  # period of the check whether there is space again


@dataclass
class FullDisk:
    """Knows whether the disk is full. `closing` returns True once the service ends."""

    store: Store
    clock: StoppableClock
    reserve: Reserve | None
    closing: Callable[[], bool]
    is_full: bool = False
    checked_at: float = -math.inf

    def pause_runs(self, error: NotWritten) -> None:
        """Pause all runs because a write failed; raise `error` without a reserve, or if the service ends."""
        if self.reserve is None or self.closing():
            raise error
        if self.is_full:
            return
        self.is_full, self.checked_at = True, self.clock.inner.now()
        self.clock.stop()
        with self.reserve.released():
            self.reserve.mark(str(error))
            self._record(DiskFilled(self.clock.wall(), str(error)))

    def check_space(self) -> None:
        """Resume all runs if the disk has space again; check it at most every SPACE_CHECK_S seconds."""
        if not self.is_full or self.reserve is None or self.clock.inner.now() - self.checked_at < SPACE_CHECK_S:
            return
        self.checked_at = self.clock.inner.now()
        if self.reserve.has_space():
            self.is_full = False
            self._record(DiskFreed(self.clock.wall(), self.clock.go_on()))
            self.reserve.unmark()

    @contextlib.contextmanager
    def with_reserve(self) -> Iterator[None]:
        """Let the block use the reserve if the disk is full, to delete what makes space."""
        if self.is_full and self.reserve is not None:
            with self.reserve.released():
                yield
        else:
            yield

    def _record(self, event: Event) -> None:
        """Journal an event, if the disk takes it; the reserve's mark on the disk says the same."""
        with contextlib.suppress(*TRANSIENT):
            self.store.record_own(event)


KEPT_CHECK_S = 2.0  # period of the check whether runs whose replies are kept without a driver are over


class RunFleet:
    """The fleet as the driver of one run sees it: `poll` suspends the driver, and returns what arrived for its run."""

    def __init__(self, fleet: Fleet, clock: Clock) -> None:
        self.send, self.open, self.cancel = fleet.send, fleet.open, fleet.cancel
        self.revoke_access, self.drop_uploads = fleet.revoke_access, fleet.drop_uploads
        self.drop_replies = fleet.drop_replies
        self._fleet, self._clock = fleet, clock
        self.disk: FullDisk | None = None  # what a write does if the disk is full; None: it raises
        self.mailbox: list[Arrival] = []
        self.unacked: dict[UpdateId, ReplyHeader] = {}  # replies that the driver has polled
        self.due_at = -math.inf  # time at which the driver continues even if nothing has arrived

    def poll(self, wait_s: float) -> list[Arrival]:
        """Let the other drivers work until something arrives for this run, or for `wait_s` seconds."""
        self.due_at = self._clock.now() + wait_s
        self._suspend()
        arrived, self.mailbox = self.mailbox, []
        self.unacked |= {one.update_id: one for one in arrived if isinstance(one, ReplyHeader)}
        return arrived

    def ack(self, update_ids: Sequence[UpdateId]) -> None:
        """Delete replies, which are decided, from the spool."""
        self._fleet.ack(update_ids)
        for update_id in update_ids:
            self.unacked.pop(update_id, None)

    def wait_for_disk(self, error: NotWritten) -> None:
        """Suspend the driver in the middle of a write until the disk has space; raise `error` if the service ends.

        The write is then made again. What arrived meanwhile stays in the mailbox.
        """
        if self.disk is None:
            raise error
        self.disk.pause_runs(error)
        while self.disk.is_full:
            if self.disk.closing():
                raise error
            self.due_at = self._clock.now()
            self._suspend()

    def _suspend(self) -> None:
        dispatcher = getcurrent().parent
        assert dispatcher is not None, "a driver is started by the dispatcher"
        dispatcher.switch()

    def delivered(self) -> Sequence[Delivered]:
        """Return nothing: the service records the deliveries of all runs."""
        return ()

    def close(self) -> None:
        """Leave the real fleet open, which is not this run's."""


@dataclass
class Driver:
    """Holds the driver of one run between two turns."""

    run_id: str
    fleet: RunFleet
    coroutine: greenlet

    def is_due(self, now: float) -> bool:
        """Return True if the driver has something to do."""
        return bool(self.fleet.mailbox) or self.fleet.due_at <= now


@dataclass
class Dispatcher:
    """Gives arrivals to the runs that they concern, and turns to their drivers.

    `ended` is called after a driver returned or raised, with the exception in the second case; what it raises ends the
    service. A reply to a run that is not over and has no driver, because it is paused or waits in the queue, is kept.
    """

    fleet: Fleet
    store: Store
    clock: Clock
    leases: DeviceLeases
    ended: Callable[[str, BaseException | None], None]
    disk: FullDisk | None = None  # without one a driver's write raises where the disk is full
    online: ConnectedDevices = field(default_factory=ConnectedDevices)
    drivers: dict[str, Driver] = field(default_factory=dict)
    _kept: dict[str, list[ReplyHeader]] = field(default_factory=dict)
    _kept_checked_at: float = -math.inf
    _returned: list[tuple[Driver, BaseException | None]] = field(default_factory=list)  # since the last turn of all
    _busy_since: float = math.inf  # the time since which some driver always has something to do

    def start(self, run_id: str, drive: Callable[[RunFleet, ConnectedDevices], object]) -> None:
        """Start the driver of a run, which sees the devices that are connected now."""
        fleet = RunFleet(self.fleet, self.clock)
        fleet.disk = self.disk
        fleet.mailbox += self._kept.pop(run_id, [])
        online = self.online.copy()

        def driver() -> None:
            ON_FULL_DISK.set(fleet.wait_for_disk)  # of this greenlet alone
            drive(fleet, online)

        self.drivers[run_id] = Driver(run_id, fleet, greenlet(driver))

    def step(self, wait_s: float) -> None:
        """Wait for arrivals, at most `wait_s` seconds, then give a turn to each driver that has something to do."""
        waits = [one.fleet.due_at - self.clock.now() for one in self.drivers.values()]
        if any(one.fleet.mailbox for one in self.drivers.values()):
            waits.append(0.0)
        shortest = min([*waits, wait_s])
        self.receive(max(shortest, MIN_WAIT_S) if shortest > 0 else 0.0)
        now = self.clock.now()
        for run_id in self.leases.least_used_first([one.run_id for one in self.drivers.values() if one.is_due(now)]):
            if not self._is_paused:
                self._run_driver(self.drivers[run_id])
        self._report_ended()
        if self._is_paused:
            return
        quiet = not any(one.is_due(now) for one in self.drivers.values())
        self._busy_since = math.inf if quiet else min(self._busy_since, now)
        if quiet or now - self._busy_since >= POLL_S:
            self._decide()

    @property
    def _is_paused(self) -> bool:
        """Return True if no driver gets a turn, because the disk is full."""
        return self.disk is not None and self.disk.is_full

    def _decide(self) -> None:
        """Let the runs that want devices decide, one after the other.

        They wait until no driver has anything else to do, but not for long: sums of large updates may never pause.
        """
        self.leases.level_waiting_runs()
        for run_id in self.leases.waiting():
            self.leases.deciding = run_id
            if not self._is_paused:
                self._run_driver(self.drivers[run_id])
        self.leases.deciding = ""
        self._report_ended()

    def finish(self) -> None:
        """Give turns to all drivers until each has returned, because the service ends."""
        while self.drivers:
            self.receive(0.0)
            for driver in list(self.drivers.values()):
                self._run_driver(driver)
            self._report_ended()

    def receive(self, wait_s: float) -> None:
        """Poll the fleet once, and put what arrived into the mailboxes of the runs that it concerns."""
        now = self.clock.wall()  # which goes on while a full disk stops the other clock, and may be set back
        if self._kept and abs(now - self._kept_checked_at) >= KEPT_CHECK_S:
            self._kept_checked_at = now
            for run_id in [run_id for run_id in self._kept if not self._is_active(run_id)]:
                self.fleet.ack([one.update_id for one in self._kept.pop(run_id)])
        for arrival in self.fleet.poll(wait_s):
            if isinstance(arrival, ClientConnected | ClientDisconnected):
                self.online.apply(arrival)
                for driver in self.drivers.values():
                    driver.fleet.mailbox.append(arrival)
            else:
                self._deliver(arrival)

    def close(self) -> None:
        """Abandon the drivers where they are, as a crash would; the journal has all that they decided."""
        for driver in self.drivers.values():
            driver.coroutine.throw()
        self.drivers.clear()

    def _deliver(self, arrival: ReplyHeader | PhaseReply | Failure) -> None:
        """Put a reply or a failure into its run's mailbox; acknowledge a reply to a run that is over."""
        reply = arrival if isinstance(arrival, ReplyHeader) else None
        run_id = reply.update_id.run if reply else arrival.assignment_id.partition(".")[0]
        if (driver := self.drivers.get(run_id)) is not None:
            driver.fleet.mailbox.append(arrival)
        elif reply and self._is_active(run_id):
            self._kept.setdefault(run_id, []).append(reply)
        elif reply:
            self.fleet.ack([reply.update_id])

    def _is_active(self, run_id: str) -> bool:
        """Return True if a run is not over, or if the database does not answer now: then nothing is deleted."""
        try:
            row = self.store.run(run_id)
            return row.run_id == run_id and row.status not in ENDED
        except NotFound:
            return False
        except Unreachable:
            return True

    def _run_driver(self, driver: Driver) -> None:
        """Let a driver work until it polls again, returns or raises."""
        failed: BaseException | None = None
        try:
            driver.coroutine.switch()
        except Exception as error:
            failed = error
        if driver.coroutine.dead:
            del self.drivers[driver.run_id]
            self.leases.leave(driver.run_id)
            self._returned.append((driver, failed))

    def _report_ended(self) -> None:
        """Report the drivers that returned or raised, after all others have handled the same arrivals."""
        while self._returned:
            driver, failed = self._returned.pop(0)
            arrivals = [*driver.fleet.unacked.values(), *driver.fleet.mailbox]
            replies = [arrival for arrival in arrivals if isinstance(arrival, ReplyHeader)]
            if replies and self._is_active(driver.run_id):  # one look for all: a silent database takes its time
                self._kept.setdefault(driver.run_id, []).extend(replies)
            elif replies:
                self.fleet.ack([reply.update_id for reply in replies])
            self.ended(driver.run_id, failed)
