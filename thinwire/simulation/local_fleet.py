"""Connects an aggregator with devices in one process: a `Fleet` as in core/fleet.py, without a network.

Devices reach the aggregator through `LocalLink`. Their replies are spooled and checked as the device API does it. So
the aggregator's code path is the real one; only sockets, keys and Flower are missing, and byte counts of a wire are
None.

`HeldSpool` is a spool for one process: small replies wait in memory, all others in files.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from thinwire.core.clock import Clock, RealClock, VirtualClock
from thinwire.core.errors import BadPayload, Refused, Unreachable
from thinwire.core.fleet import Arrival, Delivered, Delivery, Envelope, Hello, NodeJoined, NodeLeft, Spool, Welcome
from thinwire.core.statedir import private_opener
from thinwire.core.types import Arrived, Failure, ReplyHeader, Transfer, UpdateId
from thinwire.store import FileSpool


class LocalFleet:
    """Holds the assignments and replies between an aggregator and the devices of this process.

    `poll` calls `pump` while nothing has arrived: `pump` lets simulated devices work, and returns True if any did. With
    a `VirtualClock`, a poll that finds nothing moves the clock by its waiting time. The methods of `Fleet` keep the
    invariants that core/fleet.py states.
    """

    def __init__(self, spool: Spool, clock: Clock | None = None, pump: Callable[[], bool] | None = None) -> None:
        self.spool, self.clock, self.pump = spool, clock or RealClock(), pump
        self.changed = threading.Condition()
        self._inbox: list[Arrival] = list(spool.heads())
        self._asks: dict[str, dict[str, Envelope]] = {}  # device -> id -> unanswered assignment, oldest first
        self._withdrawn: dict[str, set[str]] = {}
        self.sent_at: dict[str, float] = {}  # id -> time on the fleet's clock, until it is answered or withdrawn
        self._live: dict[str, LocalLink] = {}
        self._stopped: list[Delivered] = []
        self._seen: dict[UpdateId, object] = {head.update_id: _content(head) for head in spool.heads()}

    # The aggregator's side.

    def send(self, asks: Sequence[Envelope]) -> None:
        """Send assignments; a device with an open link finds its own at its next pull."""
        with self.changed:
            for envelope in asks:
                self._asks.setdefault(envelope.device, {})[envelope.ask.ask_id] = envelope
                self._withdrawn.get(envelope.device, set()).discard(envelope.ask.ask_id)
                self.sent_at[envelope.ask.ask_id] = self.clock.now()
            self.changed.notify_all()

    def poll(self, wait_s: float) -> Sequence[Arrival]:
        """Return what has arrived since the last poll; wait up to `wait_s` seconds for it."""
        while not self._inbox and self.pump is not None and self.pump():
            pass
        with self.changed:
            if not self._inbox and isinstance(self.clock, VirtualClock):
                self.clock.advance(wait_s)
            elif not self._inbox and wait_s > 0:
                self.changed.wait_for(lambda: bool(self._inbox), wait_s)
            arrivals, self._inbox = self._inbox, []
        return arrivals

    def open(self, update_id: UpdateId) -> Iterator[Arrived]:
        """Return the parts of a reply, in order."""
        return self.spool.open(update_id)

    def ack(self, update_ids: Sequence[UpdateId]) -> None:
        """Delete replies from the spool, since the journal holds what follows from them."""
        for update_id in update_ids:
            self.spool.delete(update_id)

    def cancel(self, ask_ids: Sequence[str]) -> None:
        """Withdraw assignments."""
        with self.changed:
            for device, asks in self._asks.items():
                for ask_id in set(ask_ids) & asks.keys():
                    del asks[ask_id]
                    self._withdrawn.setdefault(device, set()).add(ask_id)
                    self.sent_at.pop(ask_id, None)
            self.changed.notify_all()

    def shut_out(self, devices: Sequence[str]) -> None:
        """Revoke devices: drop their replies that were not polled, fail their assignments, and close their links."""
        with self.changed:
            for device in devices:
                gone = [h for h in self._inbox if isinstance(h, ReplyHeader) and h.update_id.device == device]
                self._inbox = [arrival for arrival in self._inbox if arrival not in gone]
                self.ack([head.update_id for head in gone])
                for ask_id in list(self._asks.get(device, {})):
                    self._arrived(device, Failure("refused", "revoked", ask_id, device))
                if (link := self._live.pop(device, None)) is not None:
                    link.closed = True
                    self._inbox.append(NodeLeft(device, "revoked"))
            self.changed.notify_all()

    def taken_up(self) -> Sequence[Delivered]:
        """Return the stop assignments that were delivered since the last call."""
        with self.changed:
            stopped, self._stopped = self._stopped, []
            return stopped

    def close(self) -> None:
        """Do nothing, because a local fleet holds no resources."""

    # The devices' side, called by their links.

    def join(self, link: LocalLink, hello: Hello) -> Welcome:
        """Connect a device; return the highest sequence number seen from it for each run.

        Raise `Refused` if a device of this name is connected already.
        """
        with self.changed:
            live = self._live.get(link.name)
            if live is not None and live is not link:
                raise Refused(
                    f"{link.name} is already connected", why="one name is one process", hint="stop the other one"
                )
            self._live[link.name] = link
            self._inbox.append(NodeJoined(link.name, hello))
            self.changed.notify_all()
            sequences: dict[str, int] = {}
            for update_id in self._seen:
                if update_id.device == link.name:
                    sequences[update_id.run] = max(update_id.sequence, sequences.get(update_id.run, 0))
        return Welcome(link.name, sequences, server_time=self.clock.wall())

    def leave(self, link: LocalLink) -> None:
        """Disconnect a device."""
        with self.changed:
            if self._live.get(link.name) is link:
                del self._live[link.name]
                self._inbox.append(NodeLeft(link.name, "the link was closed"))
                self.changed.notify_all()

    def next_ask(self, link: LocalLink, wait_s: float) -> Envelope | None:
        """Return the oldest assignment that this link was not given yet; wait up to `wait_s` seconds for one.

        The delivery of a stop resolves it.
        """

        def found() -> Envelope | None:
            asks = self._asks.get(link.name, {})
            return next((envelope for ask_id, envelope in asks.items() if ask_id not in link.held), None)

        with self.changed:
            if wait_s > 0:
                self.changed.wait_for(lambda: link.closed or found() is not None, wait_s)
            envelope = found()
            if envelope is not None:
                if isinstance(link.clock, VirtualClock):  # a device with its own clock waits for its assignment
                    link.clock.advance(max(0.0, self.sent_at[envelope.ask.ask_id] - link.clock.now()))
                link.held[envelope.ask.ask_id] = link.clock.wall()
                if envelope.ask.kind == "stop":
                    del self._asks[link.name][envelope.ask.ask_id]
                    self._stopped.append(Delivered(link.name, envelope.ask, self.clock.wall()))
            for ask_id in self._withdrawn.get(link.name, set()):
                link.held.pop(ask_id, None)
            return envelope

    def asked(self) -> list[str]:
        """Return the devices that have an unanswered assignment."""
        with self.changed:
            return [device for device, asks in self._asks.items() if asks]

    def withdrawn(self, device: str) -> frozenset[str]:
        """Return the ids of the device's withdrawn assignments."""
        with self.changed:
            return frozenset(self._withdrawn.get(device, ()))

    def take(
        self, link: LocalLink, reply: ReplyHeader | Failure, bundle: Path | bytes | None, upload_s: float = 0.0
    ) -> None:
        """Spool a reply whose upload took `upload_s` seconds until now; a reply that is here already is acknowledged
        again.

        Raise `Refused` for an update in another device's name. Another update under a known id fails with `state-lost`.
        """
        began = link.clock.wall() - upload_s
        pulled = link.held.get(reply.ask_id, began)
        if isinstance(reply, Failure):
            link.held.pop(reply.ask_id, None)  # it may be sent again, which is another delivery
            return self._arrived(link.name, Failure(reply.kind, reply.text, reply.ask_id, link.name))
        if reply.update_id.device != link.name:
            raise Refused("an answer in another device's name", why=f"this link is {link.name}'s")
        if (known := self._seen.get(reply.update_id)) is not None:
            if known != _content(reply):
                self._arrived(
                    link.name, Failure("state-lost", "another update under a known id", reply.ask_id, link.name)
                )
            return None
        head = spooled(self.spool, reply, bundle, lambda: Transfer(pulled, began, link.clock.wall()))
        self._seen[reply.update_id] = _content(reply)
        return self._arrived(link.name, head)

    def _arrived(self, device: str, arrival: ReplyHeader | Failure) -> None:
        with self.changed:
            self._asks.get(device, {}).pop(arrival.ask_id, None)
            self.sent_at.pop(arrival.ask_id, None)
            self._inbox.append(arrival)
            self.changed.notify_all()


class LocalLink:
    """Connects one device with a LocalFleet.

    `held` maps the ids of the assignments that this process was given to the time of their delivery, by the link's own
    `clock`. Parts are in the aggregator's own file, unless `downloads` names a folder for copies.
    """

    def __init__(self, fleet: LocalFleet, name: str, clock: Clock | None = None, downloads: Path | None = None) -> None:
        self.fleet, self.name, self.clock, self.downloads = fleet, name, clock or fleet.clock, downloads
        self.held: dict[str, float] = {}
        self.closed = False

    def hello(self, hello: Hello) -> Welcome:
        """Connect to the fleet."""
        return self.fleet.join(self, hello)

    def pull(self, wait_s: float) -> Delivery | None:
        """Return the next assignment; None if there is none within `wait_s` seconds.

        Raise `Unreachable` if the link is closed.
        """
        if self.closed:
            raise Unreachable("this link is closed")
        envelope = self.fleet.next_ask(self, wait_s)
        if self.closed:
            raise Unreachable("this link is closed")
        if envelope is None:
            return None
        bundle = envelope.bundle
        if bundle is not None and self.downloads is not None:
            bundle = Path(
                shutil.copyfile(bundle, self.downloads / hashlib.sha256(envelope.ask.ask_id.encode()).hexdigest())
            )
        return Delivery(envelope.ask, bundle)

    def push(self, reply: ReplyHeader | Failure, bundle: Path | None = None) -> None:
        """Send a reply with its parts; return once the spool holds it."""
        self.fleet.take(self, reply, bundle)

    def cancelled(self) -> frozenset[str]:
        """Return the ids of the device's withdrawn assignments."""
        return self.fleet.withdrawn(self.name)

    def close(self) -> None:
        """Disconnect from the fleet."""
        self.closed = True
        self.fleet.leave(self)


def _content(head: ReplyHeader) -> object:
    return head.ask_id, head.parts, head.base_version, head.examples, dict(head.metrics)


BLOCK = 1 << 20


def spooled(
    spool: Spool, reply: ReplyHeader, bundle: Path | bytes | None, transfer: Callable[[], Transfer]
) -> ReplyHeader:
    """Store a reply in the spool and return its header; check each part against its digest, as the device API does.

    `transfer` is called once the spool has all parts. Raise `BadPayload` for a part that does not match its digest.
    """
    if isinstance(spool, HeldSpool) and spool.has_room(reply):
        body = io.BytesIO()
        _copy(bundle, body, reply)
        head = reply.arrived(transfer())
        spool.hold(head, body.getbuffer())
        return head
    draft = spool.draft(reply.update_id)
    try:
        with open(draft, "wb", opener=private_opener) as out:
            _copy(bundle, out, reply)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    head = reply.arrived(transfer())
    spool.commit(draft, head)
    return head


def _copy(bundle: Path | bytes | None, out: BinaryIO, head: ReplyHeader) -> None:
    """Copy the parts of a reply, and check each one against its digest."""
    if bundle is None:
        if head.parts:
            raise BadPayload("an answer whose parts are missing")
        return
    with bundle.open("rb") if isinstance(bundle, Path) else io.BytesIO(bundle) as source:
        for part in head.parts:
            digest, left = hashlib.sha256(), part.length
            while left and (block := source.read(min(left, BLOCK))):
                digest.update(block)
                out.write(block)
                left -= len(block)
            if left or digest.hexdigest() != part.sha256:
                raise BadPayload(f"{part.name} is not what its digest says")


HELD_BYTES = 64 << 20  # of frames that wait in memory for their aggregation


class HeldSpool(FileSpool):
    """Stores replies in memory up to `most_bytes` with `hold`, and as files like its base class.

    Replies in memory are opened, listed and deleted like all others.
    """

    def __init__(self, folder: Path, most_bytes: int = HELD_BYTES) -> None:
        super().__init__(folder, durable=False)
        self._most, self._bytes = most_bytes, 0
        self._bodies: dict[UpdateId, tuple[ReplyHeader, memoryview]] = {}

    def has_room(self, head: ReplyHeader) -> bool:
        """Return True if there is room in memory for this reply."""
        return self._bytes + head.payload_bytes <= self._most

    def hold(self, head: ReplyHeader, body: memoryview) -> None:
        """Keep a reply in memory, unless the spool already has a reply of this update."""
        if self.head(head.update_id) is None:  # only the first one counts
            self._bodies[head.update_id] = head, body
            self._bytes += len(body)

    def head(self, update_id: UpdateId) -> ReplyHeader | None:
        """Return the header of a reply; None if the spool does not have it."""
        held = self._bodies.get(update_id)
        return held[0] if held else super().head(update_id)

    def heads(self) -> Sequence[ReplyHeader]:
        return [*super().heads(), *(head for head, _ in self._bodies.values())]

    def open(self, update_id: UpdateId) -> Iterator[Arrived]:
        if update_id in self._bodies:
            return _parts(*self._bodies[update_id])
        return super().open(update_id)

    def delete(self, update_id: UpdateId) -> None:
        if update_id in self._bodies:
            self._bytes -= len(self._bodies.pop(update_id)[1])
        else:
            super().delete(update_id)


def _parts(head: ReplyHeader, body: memoryview) -> Iterator[Arrived]:
    at = 0
    for part in head.parts:
        yield body[at : at + part.length].toreadonly()
        at += part.length
