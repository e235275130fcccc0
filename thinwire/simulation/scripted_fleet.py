"""Simulates a fleet on a virtual clock whose devices follow scripts: nothing sleeps, and nothing is random or left out.

It is a LocalFleet, so an aggregator sees what the invariants of core/fleet.py promise. When the aggregator polls, the
clock moves on to the next event of a device. An hour of rounds takes as long as its aggregation.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Self, TypeVar

from thinwire.core.clock import VirtualClock
from thinwire.core.fleet import Arrival, Delivery, Envelope, Hello, Spool, TaskReport
from thinwire.core.types import Ask, Failure, Part, ReplyHeader, Timings
from thinwire.simulation.local_fleet import LocalFleet, LocalLink
from thinwire.simulation.scripted_device import Again, Kept, ScriptedDevice, Turn, Work


@dataclass(frozen=True)
class ScheduledEvent:
    """Holds a scheduled event of a device: a method of the fleet, and the device's `life` it belongs to (None: any)."""

    step: Callable[..., None]
    device: ScriptedDevice
    life: int | None
    given: tuple[Any, ...]


@dataclass(frozen=True)
class Held:
    """Holds a reply that is sent when the assignments of round `until` are sent."""

    until: int
    device: ScriptedDevice
    kept: Kept


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
        self._held: list[Held] = []
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
        again.devices, again._timetable, again._held = self.devices, self._timetable, self._held
        again._live = {name: link for name, link in self._live.items() if not link.closed}
        for link in again._live.values():
            link.fleet = again
        for device in self.devices.values():
            if device.link is not None:
                again.join(device.link, self._hello(device))
        return again

    def send(self, asks: Sequence[Envelope]) -> None:
        """Send assignments, and the replies that were kept back until their round."""
        super().send(asks)
        for envelope in asks:
            if envelope.device in self.devices:
                self._after(0.0, ScriptedFleet._look, self.devices[envelope.device])
        newest = max((envelope.ask.round for envelope in asks if envelope.ask.kind == "train"), default=0)
        held, self._held = self._held, [one for one in self._held if one.until > newest]
        for one in held:
            if one.until <= newest:
                self._after(one.kept.upload_s, ScriptedFleet._send, one.device, one.kept.ask_id)

    def shut_out(self, devices: Sequence[str]) -> None:
        """Revoke devices, and disconnect them."""
        super().shut_out(devices)
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
        return Hello(device.name, f"{device.name}-{device.life}", tasks, plans=tuple(sorted(device.plans)))

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
        ask = delivery.ask
        if ask.kind == "stop":
            device.hear(ask)
            device.outbox.clear()
        elif ask.ask_id in device.outbox:
            if device.outbox[ask.ask_id].pushed:
                self._upload(device, device.outbox[ask.ask_id])
        else:
            self._begin(device, delivery)
        self._after(0.0, ScriptedFleet._look, device)

    def _begin(self, device: ScriptedDevice, delivery: Delivery) -> None:
        ask, turn = delivery.ask, device.turn(delivery.ask)
        if turn.lost == "ask":
            return
        if not device.hear(ask):
            self._fail(device, ask, "need-plan", "")
            return
        device.busy, turn = True, device.work.begin(delivery, turn)
        self._after(turn.download_s + turn.compute_s + turn.encode_s, ScriptedFleet._work, device, delivery, turn)

    def _work(self, device: ScriptedDevice, delivery: Delivery, turn: Turn) -> None:
        """End the work on an assignment: make its reply, and begin the upload unless the script keeps the reply
        back.
        """
        assert device.link is not None
        ask, device.busy = delivery.ask, False
        self._after(0.0, ScriptedFleet._look, device)
        if ask.ask_id in device.link.cancelled():
            return
        if turn.failure is not None:
            self._fail(device, ask, *turn.failure)
            return
        head, body = device.work.answer(delivery, turn)
        if isinstance(head, Failure):
            self._fail(device, ask, head.kind, head.text)
            return
        timings = Timings(turn.download_s, 0.0, 0.0, turn.compute_s, turn.encode_s)
        kept = device.outbox[ask.ask_id] = Kept(delivery, turn, replace(head, timings=timings), body)
        kept.more = [_once_more(device.work, kept, again) for again in turn.again]
        if turn.held:
            self._held.append(Held(ask.round + turn.held, device, kept))
        elif turn.lost != "answer":
            device.busy = not device.overlaps
            self._upload(device, kept)

    def _upload(self, device: ScriptedDevice, kept: Kept) -> None:
        seconds = kept.upload_s
        if device.overlaps:
            device.sent_by = max(device.sent_by, self.virtual.now()) + seconds
            seconds = device.sent_by - self.virtual.now()
        self._after(seconds, ScriptedFleet._send, device, kept.ask_id)

    def _send(self, device: ScriptedDevice, ask_id: str) -> None:
        """End an upload: the last byte of the reply has arrived."""
        if not device.overlaps:
            device.busy = False
        self._after(0.0, ScriptedFleet._look, device)
        if device.link is None or (kept := device.outbox.get(ask_id)) is None:
            return
        self.take(device.link, kept.head, kept.body, kept.upload_s)
        for head, body in () if kept.pushed else kept.more:
            self.take(device.link, head, body, kept.upload_s)
        kept.pushed = True
        if not kept.head.parts:
            del device.outbox[ask_id]  # an evaluation has no outcome

    def _fail(self, device: ScriptedDevice, ask: Ask, kind: str, text: str) -> None:
        assert device.link is not None
        self.take(device.link, Failure(kind, text, ask.ask_id, device.name), None)


def _once_more(work: Work, kept: Kept, again: Again) -> tuple[ReplyHeader, bytes]:
    """Return what a device sends in addition to its reply."""
    if again == "same":
        return kept.head, kept.body
    if again == "changed":
        body = kept.body + b"!"
        parts = (Part("frame/0", len(body), hashlib.sha256(body).hexdigest()),)
        return replace(kept.head, parts=parts), body
    head, body = work.answer(kept.delivery, kept.turn)
    assert isinstance(head, ReplyHeader), "an ask that was answered can be answered again"
    return head, body


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
