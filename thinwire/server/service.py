"""The aggregator's service: it executes runs, several at once, and the commands of people.

People leave commands as rows of the store, so a command survives a crash and stays on record.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import traceback
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from thinwire.aggregation.server_optimizers import optimizers
from thinwire.compression.catalog import steps
from thinwire.core.clock import Clock, RealClock
from thinwire.core.errors import NotWritten, ThinwireError
from thinwire.core.events import ENDED, AssignmentDelivered, DeviceOffline, DeviceOnline, Event, RunStatusChanged
from thinwire.core.fleet import Arrival, ClientConnected, ClientDisconnected, Fleet
from thinwire.core.formatting import counted
from thinwire.core.owner_file import MAX_RUNS
from thinwire.core.registry import blamed
from thinwire.core.statedir import AggregatorHome
from thinwire.server.context import POLL_S, StopOrder
from thinwire.server.dispatcher import Dispatcher
from thinwire.server.extending import extend_run
from thinwire.server.leases import DeviceLeases
from thinwire.server.ordered_runs import RunStarter
from thinwire.server.policy.eligibility import ConnectedDevices
from thinwire.server.run import drive
from thinwire.server.run_end import close_undriven, delete_messages, end_abandoned, notify
from thinwire.server.run_removal import removing
from thinwire.store import START_RUN, Commands, Order, RunRow, Store


def refused(error: ThinwireError) -> dict[str, Any]:
    """Return a refusal as the result of a command."""
    return {"done": False, "error": error.what, "why": error.why, "try": error.hint, "exit_code": error.exit_code}


NOTED_S = 1.0  # deliveries decide nothing, so their events may wait this long to be written
LOOKED_S = 5.0  # period of the check whether the processes of simulations live


OnEvent = Callable[[str, Event], None]


def unreported(run_id: str, event: Event) -> None:
    """Report nothing."""


class RecordingFleet:
    """A fleet that records in the store which devices connect and disconnect, whichever run polls it.

    It also revokes devices on command. A command to revoke is answered at the poll after the one that carried it out.
    By then all consequences are recorded.
    """

    def __init__(
        self, fleet: Fleet, store: Store, clock: Clock, orders: CommandQueue, home: AggregatorHome | None = None,
        on_event: OnEvent = unreported,
    ) -> None:  # fmt: skip
        self._fleet, self._store, self._clock, self._orders = fleet, store, clock, orders
        self._on_event = on_event
        self._told: list[Order] = []
        self._removals: dict[int, Iterator[None]] = {}  # number of a command to delete a run -> what is left to do
        self._home, self._looked_at = home, -LOOKED_S
        self._noted_at = -NOTED_S  # time at which deliveries were written last
        self.driven: Container[str] = ()  # the runs that have a driver
        self.presence = ConnectedDevices()
        self.send, self.open, self.ack, self.cancel, self.close = (
            fleet.send,
            fleet.open,
            fleet.ack,
            fleet.cancel,
            fleet.close,
        )
        self.revoke_access, self.delivered, self.drop_uploads = (
            fleet.revoke_access,
            fleet.delivered,
            fleet.drop_uploads,
        )

    def poll(self, wait_s: float) -> list[Arrival]:
        """Carry out the commands, then return the arrivals of the fleet, with connections recorded."""
        self._revoke()
        self._carry_out()
        self._remove()
        self._extend()
        self._end_abandoned()
        arrivals = list(self._fleet.poll(0.0 if self._told or self._removals else wait_s))
        for arrival in arrivals:
            if isinstance(arrival, ClientConnected):
                self._record(DeviceOnline(self._clock.wall(), arrival.device))
            elif isinstance(arrival, ClientDisconnected):
                now = self._clock.wall()
                self._record(DeviceOffline(now, arrival.device, arrival.why, now - arrival.silent_s))
        self._note_taken()
        return arrivals

    def _record(self, event: DeviceOnline | DeviceOffline) -> None:
        self._store.record_device(event)
        self._on_event("", event)

    def _note_taken(self) -> None:
        """Record which assignments were delivered.

        Deliveries decide nothing. They are therefore written with the run's next record, or after NOTED_S.
        """
        for one in self._fleet.delivered():
            if (assignment := one.assignment).kind == "train":
                self._store.note(
                    assignment.run,
                    [AssignmentDelivered(one.at, assignment.round, one.device, assignment.assignment_id)],
                )
        if self._clock.now() - self._noted_at >= NOTED_S:
            self._noted_at = self._clock.now()
            self.write_noted()

    def write_noted(self) -> None:
        """Write the pending delivery events; if the disk is full, the next call tries again."""
        with contextlib.suppress(NotWritten):
            self._store.record_noted()

    def _carry_out(self) -> None:
        """Carry out the commands about runs without a driver: in the queue, paused before a restart, or over."""
        for kind in ("stop-run", "stop-after-round", "pause-run", "resume-run"):
            for run_id in self._orders.runs_of(kind):
                row = self._store.run(run_id)
                others = run_id in self.driven or row.source == "sim" or row.status == "preparing"
                others |= kind == "stop-after-round" and row.status in ("running", "waiting")  # a round may be open
                if row.status in ENDED or not others:  # else another process or a driver carries it out
                    self._change(kind, row)
                    self._orders.answer(kind, run_id)

    def _change(self, kind: str, row: RunRow) -> None:
        """Stop, pause or resume a run without a driver; one that is over stays as it is."""
        begun = f"after {counted(row.rounds_closed, 'round')}" if row.rounds_closed else "before it began"
        now, run_id = self._clock.wall(), row.run_id
        if kind in ("stop-run", "stop-after-round") and row.status not in ENDED:
            close_undriven(self._store, run_id, RunStatusChanged(now, "stopped", f"stopped by a person {begun}", 10))
            self._fleet.drop_uploads(run_id)
            clients = {client.device for client in self._store.clients(run_id)}
            notify(self._fleet, row, {device: () for device in self.presence.devices if device in clients})
        elif kind == "pause-run" and row.status in ("queued", "waiting", "running"):
            self._store.record(run_id, [RunStatusChanged(now, "paused", f"paused by a person {begun}")])
        elif kind == "resume-run" and row.status == "paused":
            self._store.record(run_id, [RunStatusChanged(now, "queued", "resumed by a person")])

    def _remove(self) -> None:
        """Do the next step of each command to delete a run, and answer it after the last one, or with a refusal."""
        for order in self._orders.about_runs("delete-run") if self._home is not None else ():
            assert self._home is not None
            steps = self._removals.get(order.id)
            if steps is None:
                drop = self._fleet.drop_uploads
                steps = self._removals[order.id] = removing(self._store, self._home, order.run_id, order.who, drop)
            try:
                next(steps)
                continue
            except StopIteration:
                result: dict[str, Any] = {}
            except NotWritten:
                del self._removals[order.id]
                raise
            except ThinwireError as error:
                result = refused(error)
            del self._removals[order.id]
            self._orders.done(order, result)

    def _extend(self) -> None:
        """Carry out the commands to give runs that are over more rounds; a refusal is the command's result."""
        for order in self._orders.about_runs("extend-run") if self._home is not None else ():
            assert self._home is not None
            rounds, sets = int(order.args["rounds"]), dict(order.args.get("sets") or {})
            try:
                row = extend_run(
                    self._store, self._home, order.run_id, rounds, sets, order.who, order.id, self._clock.wall
                )
                result: dict[str, Any] = {"rounds": row.rounds_total}
            except NotWritten:
                raise
            except ThinwireError as error:
                result = refused(error)
            self._orders.done(order, result)

    def _end_abandoned(self) -> None:
        """End the runs whose own process died; if the disk is full, the next call tries again."""
        if self._home is not None and self._clock.now() - self._looked_at >= LOOKED_S:
            self._looked_at = self._clock.now()
            with contextlib.suppress(NotWritten):
                end_abandoned(self._store, self._home)

    def _revoke(self) -> None:
        """Answer the commands to revoke of the last poll, then carry out new ones."""
        for order in self._told:
            rounds = [self._store.aggregated_rounds(device) for device in self._devices([order])]
            self._orders.done(order, {"rounds": dict(*rounds)})
        self._told = self._orders.revoked()
        if self._told:
            self._store.roster.refresh()  # another process revoked them; no request may pass after `revoke_access`
        self._fleet.revoke_access(self._devices(self._told))

    def _devices(self, orders: Sequence[Order]) -> list[str]:
        """Return the present names of the devices that these commands are about by their keys."""
        found = (self._store.roster.by_fingerprint(str(order.args["fingerprint"])) for order in orders)
        return [row.name for row in found if row is not None]


def serve(
    fleet: Fleet,
    store: Store,
    home: AggregatorHome,
    *,
    clock: Clock | None = None,
    ending: threading.Event | None = None,
    max_runs: int = MAX_RUNS,
    on_event: OnEvent = unreported,
) -> int:
    """Execute runs until `ending` is set or a person commands `stop-service`, and return the exit code.

    The rounds of up to `max_runs` runs go on at once. The next start resumes runs in progress. A run that fails through
    a defect of Thinwire is marked failed, with the traceback on stderr, and the others go on. `NotWritten`, raised when
    the disk is full, ends the service. `on_event` gets what was recorded: of a run with its id, of a device with "".
    """
    clock, ending = clock or RealClock(), ending or threading.Event()
    orders, leases = CommandQueue(store.commands), DeviceLeases(max_runs)
    noted = RecordingFleet(fleet, store, clock, orders, home, on_event)

    def close(run_id: str, said: str, exit_code: int) -> None:
        """Record that the run failed and notify its devices, because its driver did neither."""
        close_undriven(store, run_id, failed := RunStatusChanged(clock.wall(), "failed", said, exit_code))
        on_event(run_id, failed)
        delete_messages(store, home)
        dispatcher.receive(0.0)  # devices that registered before the end was recorded
        row, clients = store.run(run_id), {client.device for client in store.clients(run_id)}
        notify(noted, row, {device: () for device in dispatcher.presence.devices if device in clients})

    def ended(run_id: str, error: BaseException | None) -> None:
        if isinstance(error, NotWritten):  # nothing can be recorded: the service ends, and its next start goes on
            raise error
        if isinstance(error, ThinwireError):  # the run could not be started
            close(run_id, str(error), error.exit_code)
        elif isinstance(error, Exception):
            traceback.print_exception(error)
            blame = blamed(error, steps, optimizers)
            said = blame.said(error) if blame else f"a defect of Thinwire: {type(error).__name__}: {error}"
            close(run_id, said, 1)

    def closing() -> bool:
        return ending.is_set() or orders.stop_service()

    def start(run_id: str) -> None:
        def stop() -> StopOrder:
            return "service" if closing() else orders.stop_order(run_id)

        def driver(own: Fleet, here: ConnectedDevices) -> None:
            drive(
                run_id, store=store, fleet=own, home=home, clock=clock, presence=here, stop=stop, leases=leases,
                paused=partial(orders.paused, run_id), on_event=partial(on_event, run_id),
            )  # fmt: skip

        dispatcher.start(run_id, driver)

    dispatcher = Dispatcher(noted, store, clock, leases, ended)
    noted.driven, noted.presence = dispatcher.drivers, dispatcher.presence
    delete_messages(store, home)  # of runs whose process died before it did, or that a person stopped meanwhile
    looked_at = -math.inf
    with contextlib.closing(dispatcher), contextlib.closing(RunStarter(store, home)) as starter:
        while not closing():
            if clock.now() - looked_at >= LOOK_S or not dispatcher.drivers:
                looked_at = clock.now()
                starter.step(orders.starts())
                waiting = [row.run_id for row in store.line() if row.run_id not in dispatcher.drivers]
                for run_id in waiting[: leases.free()]:
                    start(run_id)
            dispatcher.step(POLL_S)
        dispatcher.finish()
    noted.write_noted()
    return 0


LOOK_S = 0.2  # shortest period between two reads of the commands


class CommandQueue:
    """The service's view of `store.commands`; a command is answered when it has taken effect."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._looked_at = 0.0
        self._open: list[Order] = []
        self._ending = False
        self._paused = set[str]()
        self._kept = set[tuple[str, str]]()

    def _look(self) -> list[Order]:
        """Return the unanswered commands, read from the store at most every LOOK_S seconds."""
        if time.monotonic() - self._looked_at >= LOOK_S:
            self._open, self._looked_at = self._commands.pending(), time.monotonic()
        return self._open

    def stop_service(self) -> bool:
        """Return True if a person commanded the service to end; once True it stays True."""
        self._ending = self._ending or self.answer("stop-service", "")
        return self._ending

    def stop_order(self, run_id: str) -> StopOrder:
        """Return how a person stops this run, by the unanswered commands."""
        kinds = {order.kind for order in self._look() if order.run_id == run_id}
        return "run" if "stop-run" in kinds else "after-round" if "stop-after-round" in kinds else None

    def runs_of(self, kind: str) -> list[str]:
        """Return the runs with an unanswered command of this kind."""
        return [order.run_id for order in self._look() if order.kind == kind]

    def paused(self, run_id: str) -> bool:
        """Return True from a command to pause this run until one to resume it.

        A command is answered at the call after the one that returned its effect: by then the driver has recorded it.
        """
        kinds = {"pause-run": self._paused.add, "resume-run": self._paused.discard}
        if found := next((one for one in self._look() if one.run_id == run_id and one.kind in kinds), None):
            if (run_id in self._paused) == (found.kind == "pause-run"):
                self.done(found, {})
            else:
                kinds[found.kind](run_id)
        return run_id in self._paused

    def starts(self) -> list[Order]:
        """Return the unanswered commands to start a run."""
        return [order for order in self._look() if order.kind == START_RUN]

    def revoked(self) -> list[Order]:
        """Return the unanswered commands to revoke a device; `done` answers one."""
        return [order for order in self._look() if order.kind == "revoke"]

    def done(self, order: Order, result: Mapping[str, Any]) -> None:
        """Answer a command with its result."""
        self._commands.answer(order.id, {"done": True, **result})
        self._open = [other for other in self._open if other.id != order.id]

    def keeps(self, kind: str, run_id: str) -> bool:
        """Return True from a command of this kind for this run on; it is answered at once."""
        if self.answer(kind, run_id):
            self._kept.add((kind, run_id))
        return (kind, run_id) in self._kept

    def about_runs(self, *kinds: str) -> list[Order]:
        """Return the unanswered commands of these kinds; `done` answers one."""
        return [order for order in self._look() if order.kind in kinds]

    def answer(self, kind: str, run_id: str) -> bool:
        """Answer all commands of this kind for this run; return True if there was one."""
        found = [order for order in self._look() if order.kind == kind and order.run_id == run_id]
        for order in found:
            self.done(order, {})
        return bool(found)
