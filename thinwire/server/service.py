"""The aggregator's service: it executes runs, several at once, and the commands of people.

People leave commands as rows of the store, so a command survives a crash and stays on record.
"""

from __future__ import annotations

import contextlib
import math
import threading
import traceback
from dataclasses import dataclass, replace
from functools import partial

from thinwire.aggregation.reductions import reductions
from thinwire.aggregation.server_optimizers import optimizers
from thinwire.compression.catalog import steps
from thinwire.core.clock import Clock, RealClock, StoppableClock
from thinwire.core.disk_reserve import Reserve
from thinwire.core.errors import NotWritten, ThinwireError
from thinwire.core.events import RunStatusChanged
from thinwire.core.fleet import Fleet
from thinwire.core.owner_file import MAX_RUNS
from thinwire.core.registry import blamed
from thinwire.core.statedir import AggregatorHome
from thinwire.server import command_queue
from thinwire.server.command_queue import CommandQueue, OnEvent, OrderedHoldout, RecordingFleet, unreported
from thinwire.server.context import POLL_S, StopOrder
from thinwire.server.dispatcher import Dispatcher, FullDisk
from thinwire.server.ended_runs import Retention
from thinwire.server.leases import DeviceLeases
from thinwire.server.limits import Admission, queued
from thinwire.server.policy.eligibility import ConnectedDevices
from thinwire.server.run import drive
from thinwire.server.run_end import close_undriven, delete_messages, notify
from thinwire.server.submit import RunStarter, require_allowed
from thinwire.store import START_RUN, Store


def serve(
    fleet: Fleet,
    store: Store,
    home: AggregatorHome,
    *,
    clock: Clock | None = None,
    ending: threading.Event | None = None,
    max_runs: int = MAX_RUNS,
    memory_bytes: int | None = None,
    reserve: Reserve | None = None,
    on_event: OnEvent = unreported,
    keep_days: int | None = None,
) -> int:
    """Execute runs until `ending` is set or a person commands `stop-service`, and return the exit code.

    The rounds of up to `max_runs` runs go on at once, as far as they fit into `memory_bytes` (None: no limit). The next
    start resumes runs in progress. A run that fails through a defect of Thinwire is marked failed, with the traceback
    on stderr, and the others go on. A full disk pauses all runs; without a `reserve` it raises `NotWritten`. `on_event`
    gets what was recorded: of a run with its id, of a device with "". What is older than `keep_days` is deleted.
    """
    service = Service(
        fleet, store, home, StoppableClock(clock or RealClock()), ending or threading.Event(), max_runs,
        Admission(memory_bytes), reserve, on_event, keep_days,
    )  # fmt: skip
    return service.serve()


@dataclass
class Service:
    """Executes the runs of one store."""

    fleet: Fleet
    store: Store
    home: AggregatorHome
    clock: StoppableClock
    ending: threading.Event
    max_runs: int
    admission: Admission
    reserve: Reserve | None
    on_event: OnEvent
    keep_days: int | None

    def __post_init__(self) -> None:
        store, clock = self.store, self.clock
        self.orders, self.leases = CommandQueue(store.commands), DeviceLeases(self.max_runs)
        self.retention = Retention(store, clock, self.keep_days)
        self.disk = FullDisk(store, clock, self.reserve, self.closing)
        self.noted = RecordingFleet(self.fleet, store, clock, self.orders, self.home, self.on_event)
        self.dispatcher = Dispatcher(self.noted, store, clock, self.leases, self._ended, self.disk)
        self.noted.driven, self.noted.presence = self.dispatcher.drivers, self.dispatcher.presence
        self.noted.on_full, self.noted.with_reserve = self.disk.fill_up, self.disk.with_reserve

    def serve(self) -> int:
        """Execute runs until the service is closing, and return the exit code."""
        if self.reserve is not None:
            self.reserve.unmark()
            self.reserve.fill()
        delete_messages(self.store, self.home)  # of runs whose process died before it did, or that a person stopped
        looked_at = -math.inf
        with contextlib.closing(self.dispatcher), contextlib.closing(RunStarter(self.store, self.home)) as starter:
            while not self.closing():
                try:
                    self.disk.look()
                    if self.disk.is_full:
                        self.dispatcher.receive(POLL_S)
                        continue
                    if self.clock.now() - looked_at >= command_queue.LOOK_S or not self.dispatcher.drivers:
                        looked_at = self.clock.now()
                        starter.step(self.orders.about_runs(START_RUN))
                        self.retention.step()
                        self._admit()
                    self.dispatcher.step(POLL_S)
                except NotWritten as error:
                    self.disk.fill_up(error)
            self.dispatcher.finish()
        self.noted.write_noted()
        return 0

    def closing(self) -> bool:
        """Return True if the service is to end."""
        return self.ending.is_set() or self.orders.stop_service(self.disk.with_reserve)

    def _admit(self) -> None:
        """Start the runs of the queue that may go on beside the others; the first that does not fit ends the look."""
        waiting = [row for row in self.store.line() if row.run_id not in self.dispatcher.drivers]
        for row in waiting[: self.leases.free()]:
            going = [self.store.run(run_id) for run_id in self.dispatcher.drivers]
            if refusal := self.admission.refusal(row, going):
                self.store.record(row.run_id, queued(row, self.clock.wall(), refusal))
                return
            if (note := None if going else self.admission.note(row)) is not None:
                self.store.record(row.run_id, [replace(note, at=self.clock.wall())])
            self._start(row.run_id)

    def _start(self, run_id: str) -> None:
        def stop() -> StopOrder:
            return "service" if self.closing() else self.orders.stop_order(run_id)

        was_paused = False

        def paused() -> bool:
            nonlocal was_paused
            resumes, was_paused = was_paused, self.orders.paused(run_id)
            if resumes and not was_paused:
                require_allowed(self.store, self.home, run_id)
            return was_paused

        def driver(own: Fleet, here: ConnectedDevices) -> None:
            require_allowed(self.store, self.home, run_id)
            drive(
                run_id, store=self.store, fleet=own, home=self.home, clock=self.clock, presence=here, stop=stop,
                leases=self.leases, paused=paused, on_event=partial(self.on_event, run_id),
                holdout=OrderedHoldout(self.orders),
            )  # fmt: skip

        self.dispatcher.start(run_id, driver)

    def _ended(self, run_id: str, error: BaseException | None) -> None:
        """Record the end of a run whose driver raised."""
        if isinstance(error, NotWritten):  # nothing can be recorded: the next start of the service goes on
            if not (self.disk.is_full and self.closing()):
                raise error
        elif isinstance(error, ThinwireError):  # the run could not be started
            self._close(run_id, str(error), error.exit_code)
        elif isinstance(error, Exception):
            traceback.print_exception(error)
            blame = blamed(error, steps, optimizers, reductions)
            said = blame.said(error) if blame else f"a defect of Thinwire: {type(error).__name__}: {error}"
            self._close(run_id, said, 1)

    def _close(self, run_id: str, said: str, exit_code: int) -> None:
        """Record that the run failed and notify its devices, because its driver did neither."""
        store = self.store
        close_undriven(store, run_id, failed := RunStatusChanged(self.clock.wall(), "failed", said, exit_code))
        self.on_event(run_id, failed)
        delete_messages(store, self.home)
        self.dispatcher.receive(0.0)  # devices that registered before the end was recorded
        row, clients = store.run(run_id), {client.device for client in store.clients(run_id)}
        notify(self.noted, row, {device: () for device in self.dispatcher.presence.devices if device in clients})
