"""A discrete-event simulation of a fleet: its devices follow scripts on a virtual clock, and nothing sleeps.

`ScriptedFleet` is a `LocalFleet`, so it keeps the invariants of core/fleet.py. When the aggregator polls, the clock
advances to the next event of a device. An hour of rounds takes only as long as its aggregation.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Self, TypeVar

from thinwire.core.clock import VirtualClock
from thinwire.core.fleet import SECURE_PARTS, Arrival, Delivery, Envelope, Hello, Spool, TaskReport
from thinwire.core.protocol import without_facts
from thinwire.core.types import Assignment, Failure, PhaseReply, Timings
from thinwire.simulation.local_fleet import LocalFleet, LocalLink
from thinwire.simulation.scripted_device import Behavior, OutboxEntry, ScriptedDevice


@dataclass(frozen=True)
class ScheduledEvent:
    """A scheduled event of a device: a method of the fleet (`step`) and its arguments (`given`).

    The event is skipped if the device has restarted since: if its `restarts` differ. None: it is never skipped.
    """

    step: Callable[..., None]
    device: ScriptedDevice
    restarts: int | None
    given: tuple[Any, ...]


class ScriptedFleet(LocalFleet):
    """Simulates devices that follow scripts, on a virtual clock.

    `grace_s` is the time after which the fleet reports a crashed device as disconnected, unless it has reconnected.
    """

    def __init__(
        self,
        spool: Spool,
        clock: VirtualClock,
        report: TaskReport | None = None,
        devices: Sequence[ScriptedDevice] = (),
        grace_s: float = 0.0,
    ) -> None:
        super().__init__(spool, clock)
        self.virtual, self.report, self.grace_s = clock, report, grace_s
        self.devices: dict[str, ScriptedDevice] = {}
        self._events = EventQueue[ScheduledEvent](clock)
        for device in devices:
            self.add(device)

    def add(self, device: ScriptedDevice) -> None:
        """Add a device, and schedule when it connects and when it crashes."""
        self.devices[device.name] = device
        spans = sorted(device.offline)
        if not spans or spans[0][0] > 0:
            self.connect(device.name)
        for since, until in spans:
            self.crash(device.name, since - self.virtual.now())
            self.connect(device.name, until - self.virtual.now())

    def connect(self, name: str, after_s: float = 0.0) -> None:
        """Schedule the connection of a device in `after_s` seconds."""
        self._events.put(after_s, ScheduledEvent(ScriptedFleet._connect, self.devices[name], None, ()))

    def crash(self, name: str, after_s: float = 0.0) -> None:
        """Schedule the crash of a device: its outbox survives on its disk, but its work in progress is lost."""
        self._events.put(after_s, ScheduledEvent(ScriptedFleet._crash, self.devices[name], None, ()))

    def restart(self, spool: Spool | None = None) -> Self:
        """Return the fleet of a restarted aggregator, with the same spool files and devices.

        No time passes for the devices. Connected devices connect again. The new fleet knows nothing about the others.
        """
        restarted = type(self)(spool or self.spool, self.virtual, self.report, (), self.grace_s)
        restarted.devices, restarted._events = self.devices, self._events
        restarted._links = {name: link for name, link in self._links.items() if not link.closed}
        for link in restarted._links.values():
            link.fleet = restarted
        for device in self.devices.values():
            if device.link is not None:
                restarted.connect_link(device.link, self._hello(device))
        return restarted

    def send(self, assignments: Sequence[Envelope]) -> None:
        """Send assignments; a device that is idle pulls its own at once."""
        super().send(assignments)
        for envelope in assignments:
            if envelope.device in self.devices:
                self._after(0.0, ScriptedFleet._pull, self.devices[envelope.device])

    def revoke_access(self, devices: Sequence[str]) -> None:
        """Revoke devices, and disconnect them."""
        super().revoke_access(devices)
        for name in devices:
            if name in self.devices:
                self._crash(self.devices[name])

    def poll(self, wait_s: float) -> Sequence[Arrival]:
        """Return what has arrived; if nothing has, move the clock to the next arrival, by at most `wait_s`."""
        until = self.virtual.now() + wait_s
        while self._events.next_at <= (self.virtual.now() if self._inbox else until):
            with self._events.handle_next() as due:  # if the aggregator crashes here, the event happens again
                if due.restarts in (None, due.device.restarts):
                    due.step(self, due.device, *due.given)
        return super().poll(max(0.0, until - self.virtual.now()))

    def _after(self, seconds: float, step: Callable[..., None], device: ScriptedDevice, *given: Any) -> None:
        """Schedule a step of a device; it is skipped if the device crashes first."""
        self._events.put(seconds, ScheduledEvent(step, device, device.restarts, given))

    # The events of a device.

    def _hello(self, device: ScriptedDevice) -> Hello:
        tasks = () if self.report is None else (self.report,)
        plans, process = tuple(sorted(device.plans)), f"{device.name}-{device.restarts}"
        return Hello(device.name, process, tasks, plans=plans, secure=SECURE_PARTS[:2])  # without a pinned roster

    def _connect(self, device: ScriptedDevice) -> None:
        if device.link is not None:
            return
        self._links.pop(device.name, None)  # its last process, if the fleet has not reported its end yet
        device.link = LocalLink(self, device.name)
        device.link.hello(self._hello(device))
        for entry in device.outbox.values():
            if not entry.pushed:
                self._upload(device, entry)
        self._after(0.0, ScriptedFleet._pull, device)

    def _crash(self, device: ScriptedDevice) -> None:
        if device.link is None:
            return
        device.link.closed, device.link, device.busy = True, None, False
        device.uploads_end_at = 0.0
        device.restarts += 1
        self._after(self.grace_s, ScriptedFleet._report_offline, device)

    def _report_offline(self, device: ScriptedDevice) -> None:
        if (link := self._links.get(device.name)) is not None and link.closed:
            self.disconnect_link(link)

    def _pull(self, device: ScriptedDevice) -> None:
        """Begin the next assignment if there is one and the device is idle."""
        if device.busy or device.link is None or (delivery := device.link.pull(0.0)) is None:
            return
        assignment = delivery.assignment
        if assignment.kind == "stop":
            device.receive(assignment)
            device.outbox.clear()
        elif assignment.assignment_id in device.outbox:
            if device.outbox[assignment.assignment_id].pushed:
                self._upload(device, device.outbox[assignment.assignment_id])
        else:
            self._begin(device, delivery)
        self._after(0.0, ScriptedFleet._pull, device)

    def _begin(self, device: ScriptedDevice, delivery: Delivery) -> None:
        assignment, behavior = delivery.assignment, device.choose_behavior(delivery.assignment)
        if behavior.lost == "assignment":
            return
        if not device.receive(assignment):
            self._fail(device, assignment, "need-plan", "")
            return
        device.busy, behavior = True, device.work.begin(delivery, behavior)
        work_s = behavior.download_s + behavior.compute_s + behavior.encode_s
        self._after(work_s, ScriptedFleet._end_work, device, delivery, behavior)

    def _end_work(self, device: ScriptedDevice, delivery: Delivery, behavior: Behavior) -> None:
        """End the work on an assignment: make its reply, or the failure that the script gives."""
        assert device.link is not None
        assignment, device.busy = delivery.assignment, False
        self._after(0.0, ScriptedFleet._pull, device)
        if assignment.assignment_id in device.link.cancelled():
            return
        if behavior.failure is not None:
            self._fail(device, assignment, *behavior.failure)
            return
        header, body = device.work.finish(delivery, behavior)
        assert not isinstance(header, PhaseReply), "no script has a secure round"
        if isinstance(header, Failure):
            self._fail(device, assignment, header.kind, header.text)
            return
        timings = Timings(behavior.download_s, 0.0, 0.0, behavior.compute_s, behavior.encode_s)
        if header != without_facts(header):  # a protected reply has no times
            header = replace(header, timings=timings)
        entry = device.outbox[assignment.assignment_id] = OutboxEntry(delivery, behavior, header, body)
        self._begin_upload(device, entry)

    def _begin_upload(self, device: ScriptedDevice, entry: OutboxEntry) -> None:
        """Begin the upload of a reply, unless it is lost."""
        if entry.behavior.lost != "reply":
            device.busy = not device.overlaps
            self._upload(device, entry)

    def _upload(self, device: ScriptedDevice, entry: OutboxEntry) -> None:
        seconds = entry.upload_s
        if device.overlaps:
            device.uploads_end_at = max(device.uploads_end_at, self.virtual.now()) + seconds
            seconds = device.uploads_end_at - self.virtual.now()
        self._after(seconds, ScriptedFleet._end_upload, device, entry.assignment_id)

    def _end_upload(self, device: ScriptedDevice, assignment_id: str) -> None:
        """End an upload: the last byte of the reply has arrived."""
        if not device.overlaps:
            device.busy = False
        self._after(0.0, ScriptedFleet._pull, device)
        if device.link is None or (entry := device.outbox.get(assignment_id)) is None:
            return
        self._deliver(device.link, entry)
        entry.pushed = True
        if not entry.header.parts:
            del device.outbox[assignment_id]  # an evaluation has no outcome

    def _deliver(self, link: LocalLink, entry: OutboxEntry) -> None:
        self.receive(link, entry.header, entry.body, entry.upload_s)

    def _fail(self, device: ScriptedDevice, assignment: Assignment, kind: str, text: str) -> None:
        assert device.link is not None
        self.receive(device.link, Failure(kind, text, assignment.assignment_id, device.name), None)


T = TypeVar("T")


@dataclass(order=True)
class Entry(Generic[T]):
    """An entry of an `EventQueue`: the event `what` at the time `at`; `number` is the order of scheduling."""

    at: float
    number: int
    what: T = field(compare=False)


class EventQueue(Generic[T]):
    """A priority queue of events on a virtual clock; events of the same time keep the order of scheduling.

    Invariant: no exception loses an event. If an exception is raised while an event is handled, that event is the next
    one again.

    >>> clock = VirtualClock()
    >>> queue = EventQueue(clock)
    >>> queue.put(2.0, "late"), queue.put(1.0, "early"), queue.next_at
    (None, None, 1.0)
    >>> with queue.handle_next() as what:
    ...     print(what, clock.now())
    early 1.0
    """

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._entries: list[Entry[T]] = []
        self._numbers = itertools.count()

    def put(self, after_s: float, what: T) -> None:
        """Schedule an event in `after_s` seconds."""
        heapq.heappush(self._entries, Entry(self._clock.now() + after_s, next(self._numbers), what))

    @property
    def next_at(self) -> float:
        """Return the time of the next event; infinity if there is none."""
        return self._entries[0].at if self._entries else math.inf

    @contextlib.contextmanager
    def handle_next(self) -> Iterator[T]:
        """Yield the next event, with the clock advanced to its time, and remove it if its handling raised nothing.

        Raise `IndexError` if there is no event.
        """
        entry = heapq.heappop(self._entries)
        self._clock.advance(max(0.0, entry.at - self._clock.now()))
        try:
            yield entry.what
        except BaseException:
            heapq.heappush(self._entries, entry)
            raise
