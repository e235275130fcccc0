"""Simulates a fleet on a virtual clock whose devices follow scripts: nothing sleeps, and nothing is random or left out.

It is a LocalFleet, so an aggregator sees what the invariants of core/fleet.py promise. When the aggregator polls, the
clock moves on to the next event of a device. An hour of rounds takes as long as its aggregation.
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
from thinwire.simulation.scripted_device import Kept, ScriptedDevice, Turn


@dataclass(frozen=True)
class ScheduledEvent:
    """Holds a scheduled event of a device: a method of the fleet, and the device's `life` it belongs to (None: any)."""

    step: Callable[..., None]
    device: ScriptedDevice
    life: int | None
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
        self._timetable = EventQueue[ScheduledEvent](clock)
        for device in devices:
            self.add(device)

    def add(self, device: ScriptedDevice) -> None:
        """Add a device, which connects and disconnects as its script says."""
        self.devices[device.name] = device
        gone = sorted(device.away)
        if not gone or gone[0][0] > 0:
            self.come(device.name)
        for since, until in gone:
            self.die(device.name, since - self.virtual.now())
            self.come(device.name, until - self.virtual.now())

    def come(self, name: str, after_s: float = 0.0) -> None:
        """Schedule that a device connects."""
        self._timetable.put(after_s, ScheduledEvent(ScriptedFleet._come, self.devices[name], None, ()))

    def die(self, name: str, after_s: float = 0.0) -> None:
        """Schedule that a device crashes: its outbox survives on its disk, but its work in progress is lost."""
        self._timetable.put(after_s, ScheduledEvent(ScriptedFleet._die, self.devices[name], None, ()))

    def restart(self, spool: Spool | None = None) -> Self:
        """Return the fleet of a restarted aggregator, with the same spool files and devices; no time has passed for the
        devices.

        Connected devices connect again. The new fleet knows nothing about the others.
        """
        again = type(self)(spool or self.spool, self.virtual, self.report, (), self.grace_s)
        again.devices, again._timetable = self.devices, self._timetable
        again._live = {name: link for name, link in self._live.items() if not link.closed}
        for link in again._live.values():
            link.fleet = again
        for device in self.devices.values():
            if device.link is not None:
                again.join(device.link, self._hello(device))
        return again

    def send(self, assignments: Sequence[Envelope]) -> None:
        """Send assignments, and the replies that were kept back until their round."""
        super().send(assignments)
        for envelope in assignments:
            if envelope.device in self.devices:
                self._after(0.0, ScriptedFleet._look, self.devices[envelope.device])

    def revoke_access(self, devices: Sequence[str]) -> None:
        """Revoke devices, and disconnect them."""
        super().revoke_access(devices)
        for name in devices:
            if name in self.devices:
                self._die(self.devices[name])

    def poll(self, wait_s: float) -> Sequence[Arrival]:
        """Return what has arrived; if nothing has, move the clock to the next arrival, by at most `wait_s`."""
        until = self.virtual.now() + wait_s
        while self._timetable.next_at <= (self.virtual.now() if self._inbox else until):
            with self._timetable.taken() as due:  # if the aggregator crashes here, the event happens again
                if due.life in (None, due.device.life):
                    due.step(self, due.device, *due.given)
        return super().poll(max(0.0, until - self.virtual.now()))

    def _after(self, seconds: float, step: Callable[..., None], device: ScriptedDevice, *given: Any) -> None:
        """Schedule a step of a device, which does not happen if the device crashes first."""
        self._timetable.put(seconds, ScheduledEvent(step, device, device.life, given))

    # What happens to a device.

    def _hello(self, device: ScriptedDevice) -> Hello:
        tasks = () if self.report is None else (self.report,)
        plans, process = tuple(sorted(device.plans)), f"{device.name}-{device.life}"
        return Hello(device.name, process, tasks, plans=plans, secure=SECURE_PARTS[:2])  # without a pinned roster

    def _come(self, device: ScriptedDevice) -> None:
        if device.link is not None:
            return
        self._live.pop(device.name, None)  # its last process, if the fleet has not reported its end yet
        device.link = LocalLink(self, device.name)
        device.link.hello(self._hello(device))
        for kept in device.outbox.values():
            if not kept.pushed:
                self._upload(device, kept)
        self._after(0.0, ScriptedFleet._look, device)

    def _die(self, device: ScriptedDevice) -> None:
        if device.link is None:
            return
        device.link.closed, device.link, device.busy = True, None, False
        device.sent_by = 0.0
        device.life += 1
        self._after(self.grace_s, ScriptedFleet._left, device)

    def _left(self, device: ScriptedDevice) -> None:
        if (link := self._live.get(device.name)) is not None and link.closed:
            self.leave(link)

    def _look(self, device: ScriptedDevice) -> None:
        """Begin the next assignment if there is one and the device is idle."""
        if device.busy or device.link is None or (delivery := device.link.pull(0.0)) is None:
            return
        assignment = delivery.assignment
        if assignment.kind == "stop":
            device.hear(assignment)
            device.outbox.clear()
        elif assignment.assignment_id in device.outbox:
            if device.outbox[assignment.assignment_id].pushed:
                self._upload(device, device.outbox[assignment.assignment_id])
        else:
            self._begin(device, delivery)
        self._after(0.0, ScriptedFleet._look, device)

    def _begin(self, device: ScriptedDevice, delivery: Delivery) -> None:
        assignment, turn = delivery.assignment, device.turn(delivery.assignment)
        if turn.lost == "assignment":
            return
        if not device.hear(assignment):
            self._fail(device, assignment, "need-plan", "")
            return
        device.busy, turn = True, device.work.begin(delivery, turn)
        self._after(turn.download_s + turn.compute_s + turn.encode_s, ScriptedFleet._work, device, delivery, turn)

    def _work(self, device: ScriptedDevice, delivery: Delivery, turn: Turn) -> None:
        """End the work on an assignment: make its reply, or the failure that the script gives."""
        assert device.link is not None
        assignment, device.busy = delivery.assignment, False
        self._after(0.0, ScriptedFleet._look, device)
        if assignment.assignment_id in device.link.cancelled():
            return
        if turn.failure is not None:
            self._fail(device, assignment, *turn.failure)
            return
        header, body = device.work.answer(delivery, turn)
        assert not isinstance(header, PhaseReply), "no script has a secure round"
        if isinstance(header, Failure):
            self._fail(device, assignment, header.kind, header.text)
            return
        timings = Timings(turn.download_s, 0.0, 0.0, turn.compute_s, turn.encode_s)
        if header != without_facts(header):  # else it tells no times
            header = replace(header, timings=timings)
        kept = device.outbox[assignment.assignment_id] = Kept(delivery, turn, header, body)
        self._made(device, kept)

    def _made(self, device: ScriptedDevice, kept: Kept) -> None:
        """Begin the upload of a reply, unless it is lost."""
        if kept.turn.lost != "answer":
            device.busy = not device.overlaps
            self._upload(device, kept)

    def _upload(self, device: ScriptedDevice, kept: Kept) -> None:
        seconds = kept.upload_s
        if device.overlaps:
            device.sent_by = max(device.sent_by, self.virtual.now()) + seconds
            seconds = device.sent_by - self.virtual.now()
        self._after(seconds, ScriptedFleet._send, device, kept.assignment_id)

    def _send(self, device: ScriptedDevice, assignment_id: str) -> None:
        """End an upload: the last byte of the reply has arrived."""
        if not device.overlaps:
            device.busy = False
        self._after(0.0, ScriptedFleet._look, device)
        if device.link is None or (kept := device.outbox.get(assignment_id)) is None:
            return
        self._hand_over(device.link, kept)
        kept.pushed = True
        if not kept.header.parts:
            del device.outbox[assignment_id]  # an evaluation has no outcome

    def _hand_over(self, link: LocalLink, kept: Kept) -> None:
        self.take(link, kept.header, kept.body, kept.upload_s)

    def _fail(self, device: ScriptedDevice, assignment: Assignment, kind: str, text: str) -> None:
        assert device.link is not None
        self.take(device.link, Failure(kind, text, assignment.assignment_id, device.name), None)


T = TypeVar("T")


@dataclass(order=True)
class Entry(Generic[T]):
    """Holds something scheduled for the time `at` on the clock; its `number` is the order of scheduling."""

    at: float
    number: int
    what: T = field(compare=False)


class EventQueue(Generic[T]):
    """Holds a queue of events on a virtual clock, soonest first; events of the same time keep the order of scheduling.

    Invariant: no exception loses an event. If an exception is raised while an event is handled, that event is the next
    one again.

    >>> clock = VirtualClock()
    >>> table = EventQueue(clock)
    >>> table.put(2.0, "late"), table.put(1.0, "early"), table.next_at
    (None, None, 1.0)
    >>> with table.taken() as what:
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
    def taken(self) -> Iterator[T]:
        """Take the next event, and move the clock on to its time unless that has passed; raise `IndexError` if there is
        none.
        """
        entry = heapq.heappop(self._entries)
        self._clock.advance(max(0.0, entry.at - self._clock.now()))
        try:
            yield entry.what
        except BaseException:
            heapq.heappush(self._entries, entry)
            raise
