"""The fleet as the service polls it: it records who connects, and carries out the commands that no driver does.

These are commands about devices, about runs without a driver, and about runs that are over.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

from thinwire.core.clock import Clock
from thinwire.core.errors import TRANSIENT, NotWritten, ThinwireError, Unreachable
from thinwire.core.events import ENDED, AssignmentDelivered, DeviceOffline, DeviceOnline, Event, RunStatusChanged
from thinwire.core.fleet import Arrival, ClientConnected, ClientDisconnected, Fleet
from thinwire.core.formatting import counted
from thinwire.core.statedir import AggregatorHome
from thinwire.server.command_queue import CommandQueue
from thinwire.server.holdout import EVALUATED
from thinwire.server.policy.eligibility import ConnectedDevices
from thinwire.server.run_deletion import deletion_steps
from thinwire.server.run_end import close_undriven, end_abandoned, notify_undriven
from thinwire.server.run_extension import extend_run
from thinwire.store import CommandRow, RunRow, Store

DELIVERIES_WRITE_S = 0.5  # longest delay of events about deliveries, which decide nothing
PROCESSES_CHECK_S = 5.0  # period of the check for processes of simulations that have died
OnEvent = Callable[[str, Event], None]


def raise_error(error: NotWritten | Unreachable) -> None:
    """Raise the error: nobody waits for the disk or the database."""
    raise error


def ignore_event(run_id: str, event: Event) -> None:
    """Report nothing."""


class UndrivenCommands:
    """Carries out the commands about runs without a driver, and about runs that are over.

    A run has no driver while it waits in the queue, after a restart that left it paused, and once it is over. A run
    with a driver reads its commands itself, and so does the process that simulates a run.
    """

    def __init__(
        self, fleet: Fleet, store: Store, clock: Clock, commands: CommandQueue, home: AggregatorHome | None
    ) -> None:
        self._fleet, self._store, self._clock, self._commands, self._home = fleet, store, clock, commands, home
        self._removals: dict[int, Iterator[None]] = {}  # number of a command to delete a run -> what is left to do
        self.with_reserve: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self.driven: Container[str] = ()  # the runs that have a driver
        self.online = ConnectedDevices()

    @property
    def is_deleting(self) -> bool:
        """Return True if a run is deleted in part: the next step can follow at once."""
        return bool(self._removals)

    def change_undriven(self) -> None:
        """Stop, pause and resume runs without a driver, as commanded."""
        for command in self._commands.about_runs("stop-run", "stop-after-round", "pause-run", "resume-run", EVALUATED):
            kind, run_id = command.kind, command.run_id
            if self._store.deleted_run(run_id) is not None:
                self._commands.answer(command, {})
                continue
            row = self._store.run(run_id)
            others = run_id in self.driven or row.source == "sim" or row.status == "preparing"
            others |= kind == EVALUATED  # the run's driver records it, once it has one
            others |= kind in ("stop-after-round", "pause-run") and self._ends_a_round(row)
            if row.status in ENDED or not others:  # else another process or a driver carries it out
                self._change(kind, row)
                self._commands.answer(command, {})

    def _ends_a_round(self, row: RunRow) -> bool:
        """Return True if the run has an open round, or its last evaluation is due. Its next driver ends either.

        A restart may leave such a run without a driver, because it no longer fits in beside the others.
        """
        opened, _ = self._store.round_count(row.run_id)
        return row.status != "paused" and (opened > row.rounds_closed or row.version >= row.rounds_total)

    def _change(self, kind: str, row: RunRow) -> None:
        """Stop, pause or resume a run without a driver; one that is over stays as it is."""
        made = f"after {row.version} of {counted(row.rounds_total, 'round')}"
        begun = made if row.rounds_closed else "before it began"
        now, run_id = self._clock.wall(), row.run_id
        if kind in ("stop-run", "stop-after-round") and row.status not in ENDED:
            close_undriven(self._store, run_id, RunStatusChanged(now, "stopped", f"stopped by a person {begun}", 10))
            notify_undriven(self._fleet, self._store, row, self.online.names)
        elif kind == "pause-run" and row.status in ("queued", "waiting", "running"):
            self._store.record(run_id, [RunStatusChanged(now, "paused", f"paused by a person {begun}")])
        elif kind == "resume-run" and row.status == "paused":
            self._store.record(run_id, [RunStatusChanged(now, "queued", "resumed by a person")])

    def change_ended(self) -> None:
        """Delete runs that are over, and give them more rounds, as commanded."""
        for command in self._commands.about_runs("delete-run", "extend-run") if self._home is not None else ():
            assert self._home is not None
            try:
                (self._remove if command.kind == "delete-run" else self._extend)(command, self._home)
            except TRANSIENT:
                raise
            except Exception as error:  # would else end the service, and each next start of it
                traceback.print_exception(error)
                said = f"a defect of Thinwire: {type(error).__name__}: {error}"
                self._commands.answer(command, ThinwireError(said, why="its traceback is in the log").as_result())

    def _remove(self, command: CommandRow, home: AggregatorHome) -> None:
        """Do the next step of a command to delete a run, and answer it after the last one, or with a refusal."""
        steps = self._removals.get(command.id)
        if steps is None:
            drop = self._fleet.drop_uploads
            steps = self._removals[command.id] = deletion_steps(self._store, home, command.run_id, command.who, drop)
        try:
            with self.with_reserve():  # what is deleted makes space
                next(steps)
            return
        except StopIteration:
            result: dict[str, Any] = {}
        except TRANSIENT:
            del self._removals[command.id]
            raise
        except ThinwireError as error:
            result = error.as_result()
        del self._removals[command.id]
        self._commands.answer(command, result)

    def _extend(self, command: CommandRow, home: AggregatorHome) -> None:
        """Carry out a command to give a run that is over more rounds; a refusal is the command's result."""
        try:
            row = extend_run(self._store, home, command, self._clock.wall)
            result: dict[str, Any] = {"rounds": row.rounds_total}
        except TRANSIENT:
            raise
        except ThinwireError as error:
            result = error.as_result()
        self._commands.answer(command, result)


class RecordingFleet:
    """A fleet that records in the store which devices connect and disconnect, whichever run polls it.

    It also carries out the commands that no driver of a run does: it revokes devices, and leaves those about runs to
    `UndrivenCommands`. A command to revoke is answered at the poll after the one that carried it out. By then all
    consequences are recorded.
    """

    def __init__(
        self, fleet: Fleet, store: Store, clock: Clock, commands: CommandQueue, home: AggregatorHome | None = None,
        on_event: OnEvent = ignore_event,
    ) -> None:  # fmt: skip
        self._fleet, self._store, self._clock, self._commands = fleet, store, clock, commands
        self.undriven, self._on_event = UndrivenCommands(fleet, store, clock, commands, home), on_event
        self._revoking: list[CommandRow] = []
        self._home, self._processes_checked_at = home, -PROCESSES_CHECK_S
        self._deliveries_written_at = -DELIVERIES_WRITE_S  # time at which deliveries were written last
        self._unrecorded = list[Arrival]()  # since the disk was full, or the database did not answer
        self.postpone: Callable[[NotWritten | Unreachable], None] = raise_error  # what to do in both cases
        self._online = set[str]()  # devices that are recorded as online
        self.send, self.open, self.ack, self.cancel, self.close = (
            fleet.send,
            fleet.open,
            fleet.ack,
            fleet.cancel,
            fleet.close,
        )
        self.revoke_access, self.delivered = fleet.revoke_access, fleet.delivered
        self.drop_uploads, self.drop_replies = fleet.drop_uploads, fleet.drop_replies

    def poll(self, wait_s: float) -> list[Arrival]:
        """Carry out the commands, then return the arrivals of the fleet, with connections recorded.

        On a full disk, or while the database does not answer, the commands stay for the next call, and so do the
        arrivals that could not be recorded.
        """
        quick = False  # whether there is more to do at once
        try:
            for step in (self._revoke, self.undriven.change_undriven, self.undriven.change_ended, self._end_abandoned):
                step()
            quick = bool(self._revoking) or self.undriven.is_deleting
        except TRANSIENT as error:
            self.postpone(error)
        arrivals, recorded = [*self._unrecorded], list[Arrival]()
        arrivals += self._fleet.poll(0.0 if quick else wait_s)
        self._unrecorded = []
        for place, arrival in enumerate(arrivals):
            try:
                self._connection(arrival)
            except TRANSIENT as error:
                self._unrecorded = arrivals[place:]
                self.postpone(error)
                break
            recorded.append(arrival)
        self._note_deliveries()
        return recorded

    def _connection(self, arrival: Arrival) -> None:
        """Record that a device came online or went offline, if that is what arrived.

        An online device may report something new in each of its hellos, which adds no row.
        """
        if isinstance(arrival, ClientConnected) and arrival.device not in self._online:
            self._record(DeviceOnline(self._clock.wall(), arrival.device))
            self._online.add(arrival.device)
        elif isinstance(arrival, ClientDisconnected):
            now = self._clock.wall()
            self._record(DeviceOffline(now, arrival.device, arrival.why, now - arrival.silent_s))
            self._online.discard(arrival.device)

    def _record(self, event: DeviceOnline | DeviceOffline) -> None:
        self._store.record_device(event)
        self._on_event("", event)

    def _note_deliveries(self) -> None:
        """Record which assignments were delivered.

        Deliveries decide nothing. They are therefore written with the run's next record, or after DELIVERIES_WRITE_S.
        """
        for one in self._fleet.delivered():
            if (assignment := one.assignment).kind == "train":
                self._store.note(
                    assignment.run,
                    [AssignmentDelivered(one.at, assignment.round, one.device, assignment.assignment_id)],
                )
        if self._clock.now() - self._deliveries_written_at >= DELIVERIES_WRITE_S:
            self._deliveries_written_at = self._clock.now()
            self.write_deliveries()

    def write_deliveries(self) -> None:
        """Write the pending delivery events; if the store does not take them now, the next call tries again."""
        with contextlib.suppress(*TRANSIENT):
            self._store.record_noted()

    def _end_abandoned(self) -> None:
        """End the runs whose own process died; if the store does not take that now, the next call tries again."""
        if self._home is not None and self._clock.now() - self._processes_checked_at >= PROCESSES_CHECK_S:
            self._processes_checked_at = self._clock.now()
            with contextlib.suppress(*TRANSIENT):
                end_abandoned(self._store, self._home)

    def _revoke(self) -> None:
        """Answer the commands to revoke of the last poll, then carry out new ones."""
        for command in self._revoking:
            rounds = [self._store.aggregated_rounds(device) for device in self._devices([command])]
            self._commands.answer(command, {"rounds": dict(*rounds)})
        self._revoking = self._commands.revocations()
        if self._revoking:
            self._store.roster.refresh()  # another process revoked them; no request may pass after `revoke_access`
        self._fleet.revoke_access(self._devices(self._revoking))

    def _devices(self, commands: Sequence[CommandRow]) -> list[str]:
        """Return the present names of the devices that these commands are about by their keys."""
        found = (self._store.roster.by_fingerprint(str(command.args["fingerprint"])) for command in commands)
        return [row.name for row in found if row is not None]
