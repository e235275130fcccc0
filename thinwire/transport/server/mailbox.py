"""Assignments on their way to devices, and replies on their way to the aggregator.

`Mailbox` is what the fleet's thread and the thread of the device API share; it locks itself. The assignments in flight
lie in the table that core/link_state.py describes, which is Flower's. The mailbox adds the queue of arrivals and the
withdrawn assignments.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from thinwire.core.fleet import Arrival, ClientDisconnected, Delivered, Envelope
from thinwire.core.link_state import LinkState, Outstanding
from thinwire.core.protocol import ends, reply_digest, withdrawn
from thinwire.core.serialization import assignment_to_bytes, reply_to_bytes
from thinwire.core.types import Failure, PhaseReply, Reply, ReplyHeader, UpdateId

K = TypeVar("K")
V = TypeVar("V")
REMEMBERED = 65_536  # ids of withdrawn assignments, and digests of replies that left the spool


@dataclass(frozen=True)
class ArrivedReply:
    """A reply as it was parsed on arrival, and the handle of its message, which holds the bytes as they came.

    The bytes are never parsed a second time, so a poll cannot fail on them.
    """

    message: Any
    reply: Reply


class Mailbox:
    """The mailbox of all devices: assignments in the order sent, arrivals in the order they came.

    Two groups of methods follow: one for the fleet's thread, one for the thread of the device API.

    Invariant: an assignment stays until it is replied to or cancelled, or its device is revoked, whatever happens to
    connections and processes. A stop, which gets no reply, stays until its device reports that it has it.
    """

    def __init__(self, state: LinkState) -> None:
        self._state = state
        self._changed = threading.Condition()
        self._processes: dict[str, str] = {}  # device -> the process that registered last
        self._withdrawn: OrderedDict[str, None] = OrderedDict()
        self._digests: OrderedDict[UpdateId, bytes] = OrderedDict()
        self._arrivals: deque[Arrival | ArrivedReply] = deque()
        self._waiting: dict[str, set[UpdateId]] = {}  # device -> its replies without an ack
        self._deliveries: list[Delivered] = []

    # The fleet's thread

    def send(self, envelopes: Sequence[Envelope]) -> None:
        """Store the assignments and wake their devices; an unknown device yields a `Failure` at once."""
        with self._changed:
            for envelope in envelopes:
                device, assignment = envelope.device, envelope.assignment
                if not self._state.knows(device):
                    self._arrived(Failure("offline", "no such device", assignment.assignment_id, device))
                    continue
                self._withdrawn.pop(assignment.assignment_id, None)
                self._state.store(Outstanding(envelope, assignment_to_bytes(assignment)))
        self._state.wake({envelope.device for envelope in envelopes})

    def cancel(self, assignment_ids: Sequence[str]) -> None:
        """Withdraw assignments, and wake the devices that may have them."""
        with self._changed:
            devices = {assignment_id: self._state.device_of(assignment_id) for assignment_id in assignment_ids}
            for assignment_id in assignment_ids:
                self._remove(devices[assignment_id], assignment_id)
                _remember(self._withdrawn, assignment_id, None)
        known = all(devices.values())  # else a device may have it from before a restart
        self._state.wake(set(devices.values()) if known else self._state.devices())

    def mark_acked(self, update_id: UpdateId) -> None:
        """Record that a reply left the spool, so that it no longer counts in `waiting`."""
        with self._changed:
            self._waiting.get(update_id.device, set()).discard(update_id)

    def poll(self, wait_s: float) -> list[Arrival]:
        """Return all arrivals since the last call; wait up to `wait_s` seconds for the first one."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._arrivals), wait_s)
            came, self._arrivals = list(self._arrivals), deque()
        self._state.collect([entry.message for entry in came if isinstance(entry, ArrivedReply)])
        return [entry.reply if isinstance(entry, ArrivedReply) else entry for entry in came]

    def delivered(self) -> list[Delivered]:
        """Return the deliveries of assignments to devices since the last call."""
        with self._changed:
            deliveries, self._deliveries = self._deliveries, []
            return deliveries

    # The thread of the device API

    def register_process(self, device: str, process: str) -> None:
        """Record the process that a device registered last.

        A new process does not get the stops of the one before: the aggregator's welcome has named the runs that ended.
        """
        with self._changed:
            if self._processes.get(device) != process:
                for one in self._state.outstanding(device):
                    if one.envelope.assignment.kind == "stop":
                        self._state.remove(one)
            self._processes[device] = process

    def next_for(self, device: str, at: float) -> Outstanding | None:
        """Return the oldest assignment that the device does not have yet, or None; `at` is the wall clock.

        A stop that the device has is removed: no device replies to a stop, so its delivery is all that can be known.
        """
        with self._changed:
            for one in self._held(device):
                if one.envelope.assignment.kind == "stop":
                    self._note_delivered(one, at)  # the stop may have been sent while this pull waited
                    self._state.remove(one)
            return self._state.next_for(device)

    def withdrawn(self, device: str) -> list[str]:
        """Return the ids that the device has and that were withdrawn."""
        with self._changed:
            return withdrawn(self._state.held(device), self._withdrawn)

    def mark_delivered(self, outstanding: Outstanding, at: float) -> None:
        """Record that an assignment was sent to its device at the wall-clock time `at`."""
        self._state.deliver(outstanding, at)
        if outstanding.envelope.assignment.kind != "stop":  # a device reports that it has a stop at its next pull
            with self._changed:
                self._note_delivered(outstanding, at)

    def record_in_flight(self, device: str, held: Collection[str], at: float) -> None:
        """Record the assignments that the device reports as received.

        After an aggregator restart this is the only evidence that they were delivered.
        """
        with self._changed:
            self._state.set_held(device, held)
            for one in self._held(device):
                self._note_delivered(one, at)

    def pulled_at(self, device: str, assignment_id: str) -> float:
        """Return the wall-clock time at which the device last pulled an assignment, 0 if it did not."""
        outstanding = self._state.find(device, assignment_id)
        return outstanding.pulled_at if outstanding else 0.0

    def receive(self, device: str, reply: Reply, received: bytes = b"") -> bool:
        """Receive a durable reply: remove its assignment, and queue the reply for the fleet.

        `received` are the bytes that the reply was parsed from, if a device sent it. Return False if the device was
        revoked. A reply to an assignment that is not in flight here (the aggregator was restarted) is queued alone.
        """
        with self._changed:
            if not self._state.knows(device):
                return False
            outstanding = self._state.find(device, reply.assignment_id)
            for held in [held for held in self._state.held(device) if ends(reply, held)]:
                self._state.release(device, held)
            for one in self._state.outstanding(device):
                if one is not outstanding and ends(reply, one.assignment_id):
                    self._state.remove(one)
            if isinstance(reply, ReplyHeader):
                self._remember(reply)
            if outstanding is None:
                self._arrived(reply)
            else:
                self._arrived(ArrivedReply(self._state.reply(outstanding, received or reply_to_bytes(reply)), reply))
            return True

    def expects(self, device: str) -> bool:
        """Return True if the device is registered; a revoked device is not."""
        return self._state.knows(device)

    def outstanding(self, device: str, assignment_id: str) -> Outstanding | None:
        """Return an assignment that the device has not replied to, or None."""
        return self._state.find(device, assignment_id)

    def revoke_access(self, device: str) -> list[UpdateId]:
        """Fail all assignments of a revoked device, and remove its replies that were not polled; return their ids."""
        with self._changed:
            taken, kept = list[UpdateId](), deque[Arrival | ArrivedReply]()
            for arrival in self._arrivals:
                header = arrival.reply if isinstance(arrival, ArrivedReply) else arrival
                if not isinstance(header, ReplyHeader) or header.update_id.device != device:
                    kept.append(arrival)
                else:
                    taken.append(header.update_id)
                    if isinstance(arrival, ArrivedReply):
                        self._state.collect([arrival.message])
            self._arrivals = kept
            for outstanding in self._state.outstanding(device):
                self._state.remove(outstanding)
                self._arrived(Failure("refused", "revoked", outstanding.assignment_id, device))
            if self._state.forget(device):
                self._arrived(ClientDisconnected(device, "revoked"))
            return taken

    def remove_answered(self, device: str, assignment_id: str) -> None:
        """Remove the assignment of a reply that arrived before."""
        with self._changed:
            self._remove(device, assignment_id)
            self._state.release(device, assignment_id)

    def waiting(self, device: str) -> int:
        """Return how many replies of a device lie in the spool without an ack."""
        with self._changed:
            return len(self._waiting.get(device, ()))

    def unread_messages(self, device: str) -> int:
        """Return how many messages of phases of the device wait for the next poll."""
        with self._changed:
            came = (entry.reply if isinstance(entry, ArrivedReply) else entry for entry in self._arrivals)
            return sum(isinstance(reply, PhaseReply) and reply.device == device for reply in came)

    def known_digest(self, update_id: UpdateId) -> bytes | None:
        """Return the digest of the reply that arrived with this id, also after its ack; None if none arrived."""
        with self._changed:
            return self._digests.get(update_id)

    def add_arrival(self, arrival: Arrival) -> None:
        """Queue an arrival that is not the reply to an assignment in flight."""
        with self._changed:
            if isinstance(arrival, ReplyHeader):
                self._remember(arrival)
            self._arrived(arrival)

    def _arrived(self, arrival: Arrival | ArrivedReply) -> None:
        self._arrivals.append(arrival)
        self._changed.notify_all()

    def _held(self, device: str) -> list[Outstanding]:
        """Return the assignments in flight that the device reported to have."""
        found = (self._state.find(device, assignment_id) for assignment_id in self._state.held(device))
        return [one for one in found if one is not None]

    def _note_delivered(self, outstanding: Outstanding, at: float) -> None:
        if not outstanding.is_delivered:
            outstanding.is_delivered = True
            self._deliveries.append(Delivered(outstanding.envelope.device, outstanding.envelope.assignment, at))

    def _remember(self, header: ReplyHeader) -> None:
        _remember(self._digests, header.update_id, reply_digest(header))
        self._waiting.setdefault(header.update_id.device, set()).add(header.update_id)

    def _remove(self, device: str, assignment_id: str) -> None:
        """Remove an assignment of this device. An assignment of another device is left alone."""
        if outstanding := self._state.find(device, assignment_id):
            self._state.remove(outstanding)


def _remember(memory: OrderedDict[K, V], key: K, value: V) -> None:
    memory[key] = value
    while len(memory) > REMEMBERED:
        memory.popitem(last=False)
