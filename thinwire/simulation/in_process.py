"""A fleet and its links in one process: core/fleet.py's laws with a lock instead of a network."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from thinwire.core.clock import Clock, RealClock
from thinwire.core.errors import BadPayload, Refused, Unreachable
from thinwire.core.fleet import Arrival, Delivery, Envelope, Hello, NodeJoined, NodeLeft, Spool, Welcome
from thinwire.core.home import private_folder
from thinwire.core.types import Failure, ReplyHead, Transfer, UpdateId

POLL_S = 25.0


@dataclass
class Device:
    """One name: the process that is there, what it is asked and what it holds."""

    hello: Hello | None = None
    link: InProcessLink | None = None
    asks: dict[str, Envelope] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    withdrawn: set[str] = field(default_factory=set)
    pulled_at: dict[str, float] = field(default_factory=dict)


class InProcessFleet:
    """core.fleet.Fleet. Links may be used from other threads; `sequences` says what was seen of a device before."""

    def __init__(
        self,
        spool: Spool,
        folder: Path,
        clock: Clock | None = None,
        sequences: Callable[[str], Mapping[str, int]] = lambda name: {},
    ) -> None:
        self.spool, self.folder, self.clock, self._sequences = (
            spool,
            private_folder(folder),
            clock or RealClock(),
            sequences,
        )
        self.changed = threading.Condition()
        self.devices: dict[str, Device] = {}
        self._asked: dict[str, str] = {}  # ask_id -> device
        self._answers: dict[UpdateId, str] = {}
        self._arrivals: deque[Arrival] = deque(spool.heads())
        for head in spool.heads():
            self._answers[head.update_id] = digest(head)

    def link(self, name: str) -> InProcessLink:
        """A new end for a device of this name."""
        return InProcessLink(self, name)

    def send(self, asks: Sequence[Envelope]) -> None:
        with self.changed:
            for envelope in asks:
                device, ask_id = self._device(envelope.device), envelope.ask.ask_id
                device.asks[ask_id] = envelope
                device.held.discard(ask_id)
                device.withdrawn.discard(ask_id)
                self._asked[ask_id] = envelope.device
            self.changed.notify_all()

    def poll(self, wait_s: float) -> Sequence[Arrival]:
        with self.changed:
            self.changed.wait_for(lambda: bool(self._arrivals), wait_s)
            came, self._arrivals = list(self._arrivals), deque()
            return came

    def open(self, update_id: UpdateId) -> Iterator[bytes]:
        return self.spool.open(update_id)

    def ack(self, update_ids: Sequence[UpdateId]) -> None:
        for update_id in update_ids:
            self.spool.delete(update_id)

    def cancel(self, ask_ids: Sequence[str]) -> None:
        with self.changed:
            for ask_id in ask_ids:
                if (name := self._asked.pop(ask_id, None)) is not None:
                    device = self.devices[name]
                    del device.asks[ask_id]
                    if ask_id in device.held:
                        device.held.discard(ask_id)
                        device.withdrawn.add(ask_id)
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            for device in self.devices.values():
                device.link = None
            self.changed.notify_all()

    # What links call, with the lock held

    def _device(self, name: str) -> Device:
        return self.devices.setdefault(name, Device())

    def join(self, link: InProcessLink, hello: Hello) -> Welcome:
        device = self._device(hello.name)
        if device.hello is not None and device.hello.process != hello.process:
            raise Refused(
                f"{hello.name} is connected already", why="another process has this name", hint="--name ANOTHER"
            )
        if device.link is not link:
            device.held.clear()  # a new process holds nothing
        device.hello, device.link = hello, link
        self.arrived(NodeJoined(hello.name, hello))
        seen = dict(self._sequences(hello.name))
        for update_id in self._answers:
            if update_id.device == hello.name:
                seen[update_id.run] = max(update_id.sequence, seen.get(update_id.run, 0))
        return Welcome(hello.name, seen, POLL_S, self.clock.wall())

    def leave(self, link: InProcessLink) -> None:
        device = self._device(link.name)
        if device.link is link:
            device.hello = device.link = None
            self.arrived(NodeLeft(link.name, "its connection is closed"))

    def arrived(self, arrival: Arrival) -> None:
        self._arrivals.append(arrival)
        self.changed.notify_all()

    def next_for(self, name: str) -> Envelope | None:
        """The oldest ask that the device does not hold; a stop is settled by being handed over."""
        device = self._device(name)
        found = next((e for ask_id, e in device.asks.items() if ask_id not in device.held), None)
        if found is not None:
            device.held.add(found.ask.ask_id)
            device.pulled_at.setdefault(found.ask.ask_id, self.clock.wall())
            if found.ask.kind == "stop":
                self.settle(found.ask.ask_id)
        return found

    def settle(self, ask_id: str) -> float:
        """The ask is answered; gives when it was handed over."""
        if (name := self._asked.pop(ask_id, None)) is None:
            return 0.0
        device = self.devices[name]
        device.held.discard(ask_id)
        del device.asks[ask_id]
        return device.pulled_at.pop(ask_id, 0.0)

    def known(self, head: ReplyHead) -> bool:
        """Whether this very answer came before; another one under its id is a lost state."""
        before = self._answers.get(head.update_id)
        if before is None:
            return False
        if before != digest(head):
            text = f"update {head.update_id} came before with other contents"
            self.settle(head.ask_id)
            self.arrived(Failure("state-lost", text, head.ask_id, head.update_id.device))
            raise Refused(text, why="this client's state folder is older than what it sent before")
        self.settle(head.ask_id)
        return True

    def took(self, head: ReplyHead) -> None:
        self._answers[head.update_id] = digest(head)
        self.arrived(head)


class InProcessLink:
    """core.fleet.Link."""

    _numbers = itertools.count()

    def __init__(self, fleet: InProcessFleet, name: str) -> None:
        self.fleet, self.name = fleet, name
        self._closed = False

    def hello(self, hello: Hello) -> Welcome:
        if hello.name != self.name:
            raise Refused(f"this link is {self.name}'s", why=f"the hello says {hello.name}")
        with self.fleet.changed:
            self._closed = False
            return self.fleet.join(self, hello)

    def pull(self, wait_s: float) -> Delivery | None:
        """The parts are this device's own file: whoever answers the ask removes it."""
        found: list[Envelope] = []

        def come() -> bool:
            if not self._closed and (envelope := self.fleet.next_for(self.name)) is not None:
                found.append(envelope)
            return bool(found) or self._closed

        with self.fleet.changed:
            self.fleet.changed.wait_for(come, wait_s)
        if self._closed:
            raise Unreachable("this link is closed")
        if not found:
            return None
        began = time.monotonic()
        return Delivery(found[0].ask, self._own(found[0].bundle), time.monotonic() - began)

    def push(self, reply: ReplyHead | Failure, bundle: Path | None = None) -> None:
        began = self.fleet.clock.wall()
        if isinstance(reply, Failure):
            with self.fleet.changed:
                self.fleet.settle(reply.ask_id)
                self.fleet.arrived(replace(reply, device=self.name))
            return
        if reply.update_id.device != self.name:
            raise Refused(f"{self.name} cannot answer for {reply.update_id.device}")
        with self.fleet.changed:
            if self.fleet.known(reply):
                return
        draft = self.fleet.spool.draft(reply.update_id)
        _checked_copy(bundle, draft, reply)
        with self.fleet.changed:
            pulled_at = self.fleet.settle(reply.ask_id) or began
            head = reply.arrived(Transfer(pulled_at, began, self.fleet.clock.wall()))
            self.fleet.spool.commit(draft, head)
            self.fleet.took(head)

    def cancelled(self) -> frozenset[str]:
        with self.fleet.changed:
            return (
                frozenset(self.fleet.devices[self.name].withdrawn) if self.name in self.fleet.devices else frozenset()
            )

    def close(self) -> None:
        with self.fleet.changed:
            self._closed = True
            self.fleet.leave(self)
            self.fleet.changed.notify_all()

    def _own(self, bundle: Path | None) -> Path | None:
        if bundle is None:
            return None
        path = self.fleet.folder / f"{self.name}-{next(self._numbers)}"
        try:
            os.link(bundle, path)
        except OSError:  # another disk, or one without links
            shutil.copyfile(bundle, path)
        return path


def digest(head: ReplyHead) -> str:
    """What makes an answer the same answer: everything but when it arrived."""
    return hashlib.sha256(repr(replace(head, transfer=None)).encode()).hexdigest()


def _checked_copy(bundle: Path | None, draft: Path, head: ReplyHead) -> None:
    data = memoryview(bundle.read_bytes() if bundle is not None else b"")
    at = 0
    for part in head.parts:
        if hashlib.sha256(data[at : at + part.length]).hexdigest() != part.sha256:
            raise BadPayload(f"part {part.name} does not match its digest")
        at += part.length
    if at != len(data):
        raise BadPayload(f"the answer's parts have {len(data)} bytes", why=f"its head announces {at}")
    draft.write_bytes(data)
