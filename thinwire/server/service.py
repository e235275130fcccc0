"""The aggregator's service: it executes runs, several at once, and the commands of people, within limits.

People leave commands as rows of the store, so a command survives a crash and stays on record.

Limits follow from a run's plan and layout. The size limit of a reply is known before a byte of it is parsed
(`RunLimits`). A run begins only if its models fit into memory beside those of the runs that go on (`Admission`). The
need of a run is an estimate: four bytes for each trained parameter, times the number of vectors of the model's size
that the aggregator holds at once. A run that does not fit stays in the queue, with the reason in its status, and runs
behind it wait too: otherwise small runs would keep a large one out for ever. A run that is alone always begins, with a
note if the estimate is above the limit, because nothing would ever make room for it. (submit refuses a model that no
machine takes: `MAX_PARAMETERS`.)
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from thinwire.aggregation.control_variates import algorithm_of, transmitted_layout
from thinwire.aggregation.mean import counters, float_buffers
from thinwire.aggregation.reductions import reductions
from thinwire.aggregation.server_optimizers import optimizers
from thinwire.compression.catalog import steps
from thinwire.core.clock import Clock, RealClock, StoppableClock
from thinwire.core.disk_reserve import Reserve
from thinwire.core.errors import TRANSIENT, NotFound, NotWritten, ThinwireError, Unreachable
from thinwire.core.events import Event, RunNoted, RunStatusChanged
from thinwire.core.fleet import Fleet
from thinwire.core.formatting import Reason, size
from thinwire.core.layout import FLOAT_BYTES, Layout
from thinwire.core.owner_file import AggregatorFile
from thinwire.core.plan import RunPlan
from thinwire.core.registry import blamed
from thinwire.core.serialization import FREE_HEADER_BYTES, MAX_HEADER_BYTES, ReplyLimit
from thinwire.core.statedir import MB, NO_MORE, AggregatorHome, disk_error
from thinwire.privacy.messages import max_bytes
from thinwire.server import command_queue
from thinwire.server.command_queue import CommandQueue
from thinwire.server.context import POLL_S, RunCommands, StopCommand
from thinwire.server.dispatcher import Dispatcher, FullDisk
from thinwire.server.holdout import CommandedHoldout
from thinwire.server.leases import DeviceLeases
from thinwire.server.policy.eligibility import ConnectedDevices
from thinwire.server.recording_fleet import OnEvent, RecordingFleet, ignore_event
from thinwire.server.run import drive
from thinwire.server.run_deletion import Retention
from thinwire.server.run_end import close_undriven, delete_messages, notify_undriven
from thinwire.server.submit import RunStarter, UnreadableSettings, require_allowed
from thinwire.store import START_RUN, RunRow, Store
from thinwire.store.read_models import MEMORY_TEXT

BASE_BYTES = 64 * 2**20  # for a reply to an unknown assignment
BYTES_A_PARAMETER = 8  # no codec sends more: an index of four bytes and a float32
BYTES_A_PART = 160  # of a header: its name, its length, 64 hex digits
BYTES_A_COUNTER = 32  # without its name: 20 digits and the JSON around them
MIN_HEADER_CLIENTS = 100  # clients whose shares fit into a header of any secure run
RETRY_S = 5.0  # after the database did not answer, until runs without a driver begin
UNKNOWN_RUN_LIMIT = ReplyLimit(BASE_BYTES, identity=None)  # for assignments of unknown runs

log = logging.getLogger("thinwire.service")


def limit_of(plan: RunPlan, layout: Layout, enrolled: int = 0) -> ReplyLimit:
    """Return the size limit of a reply: a part for each segment, one for buffers, and every counter.

    In a secure run a header may hold a client's shares for every other client: so many as the plan selects, or twice
    as many as are `enrolled`, because devices may join.
    """
    travels = transmitted_layout(algorithm_of(plan), layout)
    parts, counted = len(travels.segments) + 1, counters(layout)
    header = FREE_HEADER_BYTES + BYTES_A_PART * parts
    header += sum(BYTES_A_COUNTER + len(json.dumps(tensor.name)) for tensor in counted)
    if (secure := plan.secure).enabled:
        clients = plan.cohort.clients
        selected = math.ceil(clients * (1 + plan.cohort.over_select)) if isinstance(clients, int) else 2 * enrolled
        header += 4 * max_bytes("share", max(selected, MIN_HEADER_CLIENTS), secure.post_quantum) // 3
    payload = BASE_BYTES + BYTES_A_PARAMETER * layout.size
    payload += FLOAT_BYTES * sum(tensor.size for tensor in float_buffers(layout))
    return ReplyLimit(payload, parts, len(counted), min(header, MAX_HEADER_BYTES))


class RunLimits:
    """Size limits of replies to the runs in a store (`core.fleet.ReplyLimits`); any thread may call it.

    An `assignment_id` begins with its run: RUN.ROUND.DEVICE.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._of: dict[str, ReplyLimit] = {}
        for row in store.run_queue():  # their devices may reply to assignments from before this start
            self.of(row.run_id + ".")

    def of(self, assignment_id: str) -> ReplyLimit:
        """Return the limit for a reply to this assignment."""
        run_id = assignment_id.partition(".")[0]
        if run_id not in self._of:
            try:
                row = self._store.run(run_id) if run_id else None
            except NotFound:
                row = None
            if row is None or row.run_id != run_id:
                return UNKNOWN_RUN_LIMIT
            enrolled = len(self._store.roster.rows())
            limit = limit_of(RunPlan.from_json(row.plan), Layout.from_json(row.layout), enrolled)
            self._of[run_id] = replace(limit, identity=row.identity or None)  # a simulation has no identity
        return self._of[run_id]

    def max_header_bytes(self) -> int:
        """Return the largest header limit of all runs that are active, or were looked up since the start."""
        return max((limit.header_bytes for limit in list(self._of.values())), default=FREE_HEADER_BYTES)


MEMORY_SHARE: Final = 0.8  # of the memory that is available at the start
VECTORS_OF_A_RUN: Final = 4  # the model, the sum, one decoded update, and a copy that is being written
OPTIMIZER_VECTORS: Final[Mapping[str, int]] = {"fedavg": 0, "fedavgm": 1}  # any other has two, as FedAdam
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def vectors_of(plan: RunPlan) -> int:
    """Return how many vectors of the model's size a run holds in memory at once, as an estimate."""
    found = VECTORS_OF_A_RUN + OPTIMIZER_VECTORS.get(plan.server.optimizer, 2)
    found += 2 if plan.downlink.compressed else 0  # the replica, and the change that is encoded
    found += 1 if plan.has_client_state else 0  # the sum of what all devices have sent
    found += 3 if plan.secure.enabled else 0  # integers of 64 bits, and one masked vector
    return found + (1 if plan.privacy.mode == "central" else 0)  # the noise


def memory_of(row: RunRow) -> int:
    """Return the bytes of memory that a run needs, as an estimate."""
    plan = RunPlan.from_json(row.plan)
    return FLOAT_BYTES * transmitted_layout(algorithm_of(plan), Layout.from_json(row.layout)).size * vectors_of(plan)


def memory_limit(memory_mb: int | None) -> int:
    """Return the bytes that all runs may take: those of aggregator.toml, else a share of what is available now."""
    return memory_mb * MB if memory_mb is not None else int(MEMORY_SHARE * available_memory())


def available_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Return the bytes of memory that this machine, or this process's control group, has available."""
    found = 2**62
    with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
        line = next(one for one in meminfo.read_text().splitlines() if one.startswith("MemAvailable:"))
        found = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError):  # version 2; "max" without a limit
        limit = int((cgroup / "memory.max").read_text())
        found = min(found, max(0, limit - int((cgroup / "memory.current").read_text())))
    with contextlib.suppress(OSError, ValueError):  # version 1; nearly 2^63 without a limit
        limit = int((cgroup / "memory" / "memory.limit_in_bytes").read_text())
        found = min(found, max(0, limit - int((cgroup / "memory" / "memory.usage_in_bytes").read_text())))
    return found


@dataclass(frozen=True)
class Admission:
    """Decides whether a run may begin beside those that go on, by memory; without `limit` every run may."""

    limit: int | None = None

    def refusal(self, row: RunRow, going: Iterable[RunRow]) -> str:
        """Return why a run stays in the queue, as its status; "" if it may begin."""
        needs = {one.run_id: memory_of(one) for one in going} if self.limit is not None else {}
        if self.limit is None or not needs or (own := memory_of(row)) + sum(needs.values()) <= self.limit:
            return ""
        others = ", ".join(f"{run_id} {size(need)}" for run_id, need in needs.items())
        return f"{MEMORY_TEXT}: it needs about {size(own)}, and of {size(self.limit)} others have {others}"

    def note(self, row: RunRow) -> Event | None:
        """Return a note about a run that begins alone though it is above the limit; None if it is not, or has one."""
        if self.limit is None or (need := memory_of(row)) <= self.limit or any(n[0][0] == "memory" for n in row.notes):
            return None
        return RunNoted(row.created_at, [Reason("memory", {"needs": size(need), "limit": size(self.limit)})])


def queued(row: RunRow, at: float, text: str) -> list[Event]:
    """Return the event that a run stays in the queue for this reason; none if its status says so already."""
    return [] if (row.status, row.status_text) == ("queued", text) else [RunStatusChanged(at, "queued", text)]


def serve(
    fleet: Fleet,
    store: Store,
    home: AggregatorHome,
    *,
    clock: Clock | None = None,
    ending: threading.Event | None = None,
    settings: AggregatorFile = AggregatorFile(),
    memory_bytes: int | None = None,
    reserve: Reserve | None = None,
    on_event: OnEvent = ignore_event,
) -> int:
    """Execute runs until `ending` is set or a person commands `stop-service`, and return the exit code.

    The rounds of several runs go on at once, as many as `settings` allow and as fit into `memory_bytes` (None: no
    limit). The next start resumes runs in progress. A run that fails through a defect of Thinwire is marked failed,
    with the traceback on stderr, and the others go on. A full disk pauses all runs; without a `reserve` it raises
    `NotWritten`. A run whose driver the database did not answer begins again from its journal when it answers.
    `on_event` gets what was recorded: of a run with its id, of a device with "".
    """
    service = Service(
        fleet, store, home, StoppableClock(clock or RealClock()), ending or threading.Event(), settings,
        Admission(memory_bytes), reserve, on_event,
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
    settings: AggregatorFile
    admission: Admission
    reserve: Reserve | None
    on_event: OnEvent

    def __post_init__(self) -> None:
        store, clock, keep_days = self.store, self.clock, self.settings.keep_days
        self.commands, self.leases = CommandQueue(store.commands), DeviceLeases(self.settings.max_runs)
        postponed = partial(self.on_event, "")
        self.retention = None if keep_days is None else Retention(store, clock, keep_days, postponed)
        self.disk = FullDisk(store, clock, self.reserve, self.closing)
        self.recording_fleet = RecordingFleet(self.fleet, store, clock, self.commands, self.home, self.on_event)
        self.dispatcher = Dispatcher(self.recording_fleet, store, clock, self.leases, self._ended, self.disk)
        undriven, self.recording_fleet.postpone = self.recording_fleet.undriven, self._postpone
        self._begins_at = -math.inf  # time from which runs without a driver may begin
        undriven.driven, undriven.online = self.dispatcher.drivers, self.dispatcher.online
        undriven.with_reserve = self.disk.with_reserve

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
                    self.disk.check_space()
                    if self.disk.is_full:
                        self.dispatcher.receive(POLL_S)
                        continue
                    if self.clock.now() - looked_at >= command_queue.COMMANDS_READ_S or not self.dispatcher.drivers:
                        looked_at = self.clock.now()
                        if new := self.commands.about_runs(START_RUN):
                            starter.step(new)
                        if self.retention is not None:
                            self.retention.step()
                        if self.clock.inner.now() >= self._begins_at:
                            self._admit()
                    self.dispatcher.step(POLL_S)
                except TRANSIENT as error:
                    self._postpone(error)
                    if isinstance(error, Unreachable):
                        self.dispatcher.receive(POLL_S)
            self.dispatcher.finish()
        self.recording_fleet.write_deliveries()
        return 0

    def closing(self) -> bool:
        """Return True if the service is to end; a command that the database does not let it answer counts later."""
        try:
            return self.ending.is_set() or self.commands.stop_service(self.disk.with_reserve)
        except Unreachable as error:
            self._postpone(error)
            return False

    def _postpone(self, error: NotWritten | Unreachable) -> None:
        """Continue later: pause all runs on a full disk; if the database does not answer, begin no run for a while."""
        if isinstance(error, NotWritten):
            self.disk.pause_runs(error)
            return
        now = self.clock.inner.now()
        if now >= self._begins_at:
            log.warning("the database does not answer, and runs wait for it: %s", error)
        self._begins_at = now + RETRY_S

    def _admit(self) -> None:
        """Start the runs of the queue that may run beside the others, up to the first that does not fit."""
        waiting = [row for row in self.store.run_queue() if row.run_id not in self.dispatcher.drivers]
        for row in waiting[: self.leases.startable_runs()]:
            going = [self.store.run(run_id) for run_id in self.dispatcher.drivers]
            if refusal := self.admission.refusal(row, going):
                self.store.record(row.run_id, queued(row, self.clock.wall(), refusal))
                return
            if (note := None if going else self.admission.note(row)) is not None:
                self.store.record(row.run_id, [replace(note, at=self.clock.wall())])
            self._start(row.run_id)

    def _start(self, run_id: str) -> None:
        def stop() -> StopCommand:
            return "service" if self.closing() else self.commands.stop_command(run_id)

        said: str | None = None

        def paused() -> str | None:
            nonlocal said
            if self.commands.paused(run_id):
                said = said or ""
            elif said is not None:
                try:
                    require_allowed(self.store, self.home, run_id)
                    said = None
                except UnreadableSettings as error:
                    self.commands.refuse_resume(run_id, error)
                    said = f"; {not_resumed(run_id, error)}"
            return said

        def driver(own: Fleet, online: ConnectedDevices) -> None:
            require_allowed(self.store, self.home, run_id)
            drive(
                run_id, store=self.store, fleet=own, home=self.home, clock=self.clock, online=online,
                commands=RunCommands(stop, paused), leases=self.leases, on_event=partial(self.on_event, run_id),
                holdout=CommandedHoldout(self.commands),
            )  # fmt: skip

        self.commands.unpause(run_id)
        self.dispatcher.start(run_id, driver)

    def _ended(self, run_id: str, error: BaseException | None) -> None:
        """Record the end of a run whose driver raised."""
        if isinstance(error, OSError) and error.errno in NO_MORE:  # such as a file that could not be deleted
            error = disk_error(error, Path(error.filename or self.home.root))
        if isinstance(error, Unreachable):  # nothing is recorded: the run begins again from its journal
            self._postpone(error)
        elif isinstance(error, NotWritten):  # nothing can be recorded: the next start of the service goes on
            if not (self.disk.is_full and self.closing()):
                raise error
        elif isinstance(error, UnreadableSettings):
            paused = RunStatusChanged(self.clock.wall(), "paused", not_resumed(run_id, error))
            self.store.record(run_id, [paused])
            self.on_event(run_id, paused)
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
        notify_undriven(self.recording_fleet, store, store.run(run_id), self.dispatcher.online.names)


def not_resumed(run_id: str, error: UnreadableSettings) -> str:
    """Return the status text of a run that names code, while nobody knows whether that is allowed."""
    return f"its plan names code, and {error}; correct that file, then: thinwire runs resume {run_id}"
