"""A `Fleet` (core/fleet.py) without a network: it connects an aggregator with the devices of the same process.

Devices reach the aggregator through `LocalLink`. Their replies are spooled and checked as by the device API. So the
aggregator runs the same code as with real devices. Sockets, keys and Flower are missing, and wire bytes are None.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from thinwire.core.clock import Clock, RealClock, VirtualClock
from thinwire.core.errors import Refused, Unreachable
from thinwire.core.fleet import (
    Arrival,
    ClientConnected,
    ClientDisconnected,
    Delivered,
    Delivery,
    Envelope,
    Hello,
    Spool,
    Welcome,
)
from thinwire.core.protocol import ends, reply_digest, same_reply, withdrawn
from thinwire.core.types import Arrived, Failure, PhaseReply, Reply, ReplyHeader, Transfer, UpdateId
from thinwire.simulation.storage import spool_reply

REMEMBERED = 65_536  # digests of replies, and withdrawn assignments of a device


class LocalFleet:
    """Holds the assignments and replies between an aggregator and the devices of this process.

    `poll` calls `pump` while nothing has arrived: `pump` lets simulated devices work, and returns True if any did. With
    a `VirtualClock`, a poll that finds nothing moves the clock by its waiting time. The methods of `Fleet` keep the
    invariants that core/fleet.py states.
    """

    def __init__(self, spool: Spool, clock: Clock | None = None, pump: Callable[[], bool] | None = None) -> None:
        self.spool, self.clock, self.pump = spool, clock or RealClock(), pump
        self.on_send: Callable[[str], None] = lambda device: None  # called for each assignment that is sent
        self.changed = threading.Condition()
        self._inbox: list[Arrival] = list(spool.headers())
        self._assignments: dict[str, dict[str, Envelope]] = {}  # device -> id -> unanswered assignment, oldest first
        self._device_of: dict[str, str] = {}  # id of an unanswered assignment -> device
        self.sent_at: dict[str, float] = {}  # id -> time on the fleet's clock, until it is answered or withdrawn
        self._links: dict[str, LocalLink] = {}
        self._stopped: list[Delivered] = []
        self._digests: OrderedDict[UpdateId, bytes] = OrderedDict()  # the digests of the latest replies
        self._sequences: dict[str, dict[str, int]] = {}  # device -> run -> highest sequence number that arrived
        self._spooled: dict[UpdateId, str] = {}  # updates of an earlier process -> id of the assignment
        for arrival in self._inbox:
            if isinstance(arrival, ReplyHeader):
                self._remember(arrival)
                self._spooled[arrival.update_id] = arrival.assignment_id

    # Methods of `Fleet`, called by the aggregator.

    def send(self, assignments: Sequence[Envelope]) -> None:
        """Send assignments; a device with an open link finds its own at its next pull."""
        with self.changed:
            for envelope in assignments:
                if self._spooled and envelope.assignment.assignment_id in self._spooled.values():
                    continue  # after a restart: the reply is in the spool already
                self._assignments.setdefault(envelope.device, {})[envelope.assignment.assignment_id] = envelope
                self._device_of[envelope.assignment.assignment_id] = envelope.device
                self.on_send(envelope.device)
                self.sent_at[envelope.assignment.assignment_id] = self.clock.now()
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
            self._spooled.pop(update_id, None)

    def cancel(self, assignment_ids: Sequence[str]) -> None:
        """Withdraw assignments."""
        with self.changed:
            devices = {self._device_of.get(assignment_id, "") for assignment_id in assignment_ids}
            if "" in devices:  # a device may hold an assignment from before a restart
                devices = set(self._links)
            for device in devices:
                if (link := self._links.get(device)) is not None:
                    link.withdraw(frozenset(assignment_ids))
            for assignment_id in assignment_ids:
                self._remove_answered(self._device_of.get(assignment_id, ""), assignment_id)
            self.changed.notify_all()

    def drop_uploads(self, run_id: str) -> None:
        """Delete what is left of a run in the spool: replies that were not readable."""
        self.spool.drop_unused(run_id)

    def drop_replies(self, run_id: str) -> None:
        """Delete all replies of a run that is over, and what `drop_uploads` deletes."""
        self.drop_uploads(run_id)
        self.ack([header.update_id for header in self.spool.headers() if header.update_id.run == run_id])

    def revoke_access(self, devices: Sequence[str]) -> None:
        """Revoke devices: drop their replies that were not polled, fail their assignments, and close their links."""
        with self.changed:
            for device in devices:
                dropped = [h for h in self._inbox if isinstance(h, ReplyHeader) and h.update_id.device == device]
                self._inbox = [arrival for arrival in self._inbox if arrival not in dropped]
                self.ack([header.update_id for header in dropped])
                for assignment_id in list(self._assignments.get(device, {})):
                    self._arrived(device, Failure("refused", "revoked", assignment_id, device))
                if (link := self._links.pop(device, None)) is not None:
                    link.closed = True
                    self._inbox.append(ClientDisconnected(device, "revoked"))
            self.changed.notify_all()

    def delivered(self) -> Sequence[Delivered]:
        """Return the stop assignments that were delivered since the last call."""
        with self.changed:
            stopped, self._stopped = self._stopped, []
            return stopped

    def close(self) -> None:
        """Do nothing, because a local fleet holds no resources."""

    # Methods for devices, called by their links.

    def connect_link(self, link: LocalLink, hello: Hello) -> Welcome:
        """Connect a device; return a `Welcome` with the highest sequence number seen from it for each run.

        Raise `Refused` if a device of this name is connected already.
        """
        with self.changed:
            live = self._links.get(link.name)
            if live is not None and live is not link:
                raise Refused(
                    f"{link.name} is already connected", why="one name is one process", hint="stop the other one"
                )
            self._links[link.name] = link
            self._inbox.append(ClientConnected(link.name, hello))
            self.changed.notify_all()
            sequences = dict(self._sequences.get(link.name, {}))
        return Welcome(link.name, sequences, server_time=self.clock.wall())

    def disconnect_link(self, link: LocalLink) -> None:
        """Disconnect a device."""
        with self.changed:
            if self._links.get(link.name) is link:
                del self._links[link.name]
                self._inbox.append(ClientDisconnected(link.name, "the link was closed"))
                self.changed.notify_all()

    def next_assignment(self, link: LocalLink, wait_s: float) -> Envelope | None:
        """Deliver the oldest assignment that this link does not have yet; wait up to `wait_s` seconds for one.

        No device replies to a stop: its delivery removes it.
        """

        def undelivered() -> Envelope | None:
            assignments = self._assignments.get(link.name, {})
            return next((one for key, one in assignments.items() if key not in link.in_flight), None)

        with self.changed:
            if wait_s > 0:
                self.changed.wait_for(lambda: link.closed or undelivered() is not None, wait_s)
            envelope = undelivered()
            if envelope is not None:
                if isinstance(link.clock, VirtualClock):  # a device with its own clock waits for its assignment
                    link.clock.advance(max(0.0, self.sent_at[envelope.assignment.assignment_id] - link.clock.now()))
                link.mark_delivered(envelope.assignment.assignment_id)
                if envelope.assignment.kind == "stop":
                    self._remove_answered(link.name, envelope.assignment.assignment_id)
                    self._stopped.append(Delivered(link.name, envelope.assignment, self.clock.wall()))
            return envelope

    def is_assigned(self, device: str) -> bool:
        """Return True if a device has an unanswered assignment."""
        with self.changed:
            return bool(self._assignments.get(device))

    def receive(self, link: LocalLink, reply: Reply, bundle: Path | bytes | None, upload_s: float = 0.0) -> None:
        """Receive and spool a reply whose upload took `upload_s` seconds until now; a repeated reply is spooled once.

        Raise `Refused` for an update in another device's name. Another update under a known id fails with `state-lost`.
        """
        began = link.clock.wall() - upload_s
        pulled = link.in_flight.get(reply.assignment_id, 0.0)
        if isinstance(reply, Failure):
            return self._arrived(link.name, Failure(reply.kind, reply.text, reply.assignment_id, link.name))
        if isinstance(reply, PhaseReply):
            return self._arrived(link.name, replace(reply, device=link.name))
        if reply.update_id.device != link.name:
            raise Refused("a reply in another device's name", why=f"this link is {link.name}'s")
        if (known := self._digests.get(reply.update_id)) is None:
            header = spool_reply(self.spool, reply, bundle, lambda: Transfer(pulled, began, link.clock.wall()))
            self._remember(header)
            return self._arrived(link.name, header)
        if not same_reply(known, reply):
            failure = Failure("state-lost", "another update under a known id", reply.assignment_id, link.name)
            return self._arrived(link.name, failure)
        with self.changed:
            return self._remove_answered(link.name, reply.assignment_id)

    def _arrived(self, device: str, arrival: Reply) -> None:
        with self.changed:
            self._remove(device, arrival.assignment_id)
            link = self._links.get(device)
            for other in {*self._assignments.get(device, ()), *(link.in_flight if link is not None else ())}:
                if ends(arrival, other):
                    self._remove_answered(device, other)
            self._inbox.append(arrival)
            self.changed.notify_all()

    def _remove_answered(self, device: str, assignment_id: str) -> None:
        """Remove an assignment of this device that is no longer in flight, so that it can be delivered again."""
        self._remove(device, assignment_id)
        if (link := self._links.get(device)) is not None:
            link.in_flight.pop(assignment_id, None)

    def _remove(self, device: str, assignment_id: str) -> None:
        """Remove an assignment of this device, although the device may still work on it."""
        if self._assignments.get(device, {}).pop(assignment_id, None) is not None:
            del self._device_of[assignment_id], self.sent_at[assignment_id]

    def _remember(self, header: ReplyHeader) -> None:
        update_id = header.update_id
        self._digests[update_id] = reply_digest(header)
        if len(self._digests) > REMEMBERED:
            self._digests.popitem(last=False)
        sequences = self._sequences.setdefault(update_id.device, {})
        sequences[update_id.run] = max(update_id.sequence, sequences.get(update_id.run, 0))


class LocalLink:
    """The link of one device to a `LocalFleet`.

    `in_flight` maps the id of each assignment on which this process works to the time of its delivery, by the link's
    own `clock`. The parts of an assignment stay in the aggregator's file, or are copied to the folder `downloads`.
    """

    def __init__(self, fleet: LocalFleet, name: str, clock: Clock | None = None, downloads: Path | None = None) -> None:
        self.fleet, self.name, self.clock, self.downloads = fleet, name, clock or fleet.clock, downloads
        self.in_flight: dict[str, float] = {}
        self.closed = False
        self._withdrawn: OrderedDict[str, None] = OrderedDict()

    def hello(self, hello: Hello) -> Welcome:
        """Connect to the fleet."""
        return self.fleet.connect_link(self, hello)

    def pull(self, wait_s: float) -> Delivery | None:
        """Return the next assignment; None if there is none within `wait_s` seconds.

        Raise `Unreachable` if the link is closed.
        """
        if self.closed:
            raise Unreachable("this link is closed")
        envelope = self.fleet.next_assignment(self, wait_s)
        if self.closed:
            raise Unreachable("this link is closed")
        if envelope is None:
            return None
        bundle = envelope.bundle
        if bundle is not None and self.downloads is not None:
            name = hashlib.sha256(envelope.assignment.assignment_id.encode()).hexdigest()
            bundle = Path(shutil.copyfile(bundle, self.downloads / name))
        return Delivery(envelope.assignment, bundle)

    def push(self, reply: Reply, bundle: Path | bytes | None = None) -> None:
        """Send a reply with its parts; return once the spool holds it."""
        self.fleet.receive(self, reply, bundle)

    def answer(self, reply: PhaseReply | Failure, wait_s: float) -> Delivery | None:
        """Send a message of a phase of secure aggregation, and pull."""
        self.push(reply)
        return self.pull(wait_s)

    def cancelled(self) -> frozenset[str]:
        """Return the ids of the latest withdrawn assignments."""
        return frozenset(self._withdrawn)

    def mark_delivered(self, assignment_id: str) -> None:
        """Record an assignment as delivered, also one that was withdrawn before and sent again."""
        self.in_flight[assignment_id] = self.clock.wall()
        self._withdrawn.pop(assignment_id, None)

    def withdraw(self, cancelled: frozenset[str]) -> None:
        """Withdraw those of the cancelled assignments that are in flight in this process."""
        for assignment_id in withdrawn(self.in_flight, cancelled):
            del self.in_flight[assignment_id]
            self._withdrawn[assignment_id] = None
            if len(self._withdrawn) > REMEMBERED:
                self._withdrawn.popitem(last=False)

    def close(self) -> None:
        """Disconnect from the fleet."""
        self.closed = True
        self.fleet.disconnect_link(self)
