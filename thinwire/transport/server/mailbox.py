"""Outstanding assignments and arrived replies of all devices.

`Mailbox` is the only state that the fleet's thread and the thread of the device API share; it locks itself. It keeps
the assignments of each device until they are settled, and queues replies and other arrivals for the fleet. `MessageLog`
is the interface to the engine (`thinwire/flower`), which has a record of each message too.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from thinwire.core.fleet import Arrival, Delivered, Envelope, NodeLeft
from thinwire.core.serialization import ask_to_bytes, reply_to_bytes
from thinwire.core.types import Failure, ReplyHeader, UpdateId

K = TypeVar("K")
V = TypeVar("V")
REMEMBERED = 65_536  # ids of withdrawn assignments, and digests of replies that left the spool


@dataclass(frozen=True)
class ArrivedReply:
    """A reply as it was parsed on arrival, and the handle of its message, which holds the bytes as they came.

    The bytes are never parsed a second time, so a poll cannot fail on them.
    """

    message: Any
    reply: ReplyHeader | Failure


class Mailbox:
    """The mailbox of all devices: assignments in the order sent, arrivals in the order they came.

    `wake` is called with the names of devices for which something changed. Two groups of methods follow: one for the
    fleet's thread, one for the thread of the device API.

    Invariant: an assignment stays until it is replied to or cancelled, or its device is revoked, whatever happens to
    connections and processes. A stop, which gets no reply, stays until its device reports that it has it.
    """

    def __init__(self, messages: MessageLog, wake: Callable[[Iterable[str]], None]) -> None:
        self._messages, self._wake = messages, wake
        self._changed = threading.Condition()
        self._nodes: dict[str, int] = {}
        self._processes: dict[str, str] = {}  # device -> the process that registered last
        self._asks: dict[str, dict[str, Outstanding]] = {}
        self._asked: dict[str, str] = {}  # ask_id -> device
        self._withdrawn: OrderedDict[str, None] = OrderedDict()
        self._answers: OrderedDict[UpdateId, bytes] = OrderedDict()
        self._arrivals: deque[Arrival | ArrivedReply] = deque()
        self._waiting: dict[str, set[UpdateId]] = {}  # device -> its replies without an ack
        self._taken: list[Delivered] = []

    # The fleet's thread

    def send(self, envelopes: Sequence[Envelope]) -> None:
        """Store the assignments and wake their devices; an unknown device yields a `Failure` at once."""
        with self._changed:
            for envelope in envelopes:
                device, ask = envelope.device, envelope.ask
                if (node_id := self._nodes.get(device)) is None:
                    self._arrived(Failure("left", "no such device", ask.ask_id, device))
                    continue
                self._settle(ask.ask_id, device)
                self._withdrawn.pop(ask.ask_id, None)
                data = ask_to_bytes(ask)
                message = self._messages.ask(node_id, data, group=f"{ask.run}/{ask.round}")
                outstanding = Outstanding(envelope, message, data, self._processes.get(device, ""))
                self._asks.setdefault(device, {})[ask.ask_id] = outstanding
                self._asked[ask.ask_id] = device
        self._wake({envelope.device for envelope in envelopes})

    def cancel(self, ask_ids: Sequence[str]) -> None:
        """Withdraw assignments, and wake the devices that may have them."""
        with self._changed:
            known = all(ask_id in self._asked for ask_id in ask_ids)  # else a device may have it from before a restart
            devices = {self._asked[ask_id] for ask_id in ask_ids} if known else set(self._nodes)
            for ask_id in ask_ids:
                self._settle(ask_id, self._asked.get(ask_id, ""))
                _remember(self._withdrawn, ask_id, None)
        self._wake(devices)

    def acked(self, update_id: UpdateId) -> None:
        """Note that a reply left the spool, so that it no longer counts in `waiting`."""
        with self._changed:
            self._waiting.get(update_id.device, set()).discard(update_id)

    def poll(self, wait_s: float) -> list[Arrival]:
        """Return all arrivals since the last call; wait up to `wait_s` seconds for the first one."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._arrivals), wait_s)
            came, self._arrivals = list(self._arrivals), deque()
        self._messages.collect([entry.message for entry in came if isinstance(entry, ArrivedReply)])
        return [entry.reply if isinstance(entry, ArrivedReply) else entry for entry in came]

    def taken_up(self) -> list[Delivered]:
        """Return the deliveries of assignments to devices since the last call."""
        with self._changed:
            taken, self._taken = self._taken, []
            return taken

    # The thread of the device API

    def register(self, device: str, node_id: int) -> None:
        """Record the node id of a device in the engine."""
        with self._changed:
            self._nodes[device] = node_id

    def greeted(self, device: str, process: str) -> None:
        """Record the process of a device that registered last."""
        with self._changed:
            self._processes[device] = process

    def node_of(self, device: str) -> int:
        """Return the node id of a device, 0 if it has none."""
        with self._changed:
            return self._nodes.get(device, 0)

    def names_of(self, node_id: int) -> list[str]:
        """Return the names that the device of a node has had since the start."""
        with self._changed:
            return [name for name, other in self._nodes.items() if other == node_id and node_id]

    def next_for(self, device: str, held: set[str], at: float) -> Outstanding | None:
        """Return the oldest assignment that the device does not have yet, or None.

        `held` are the ids of the assignments that the device has, `at` is the wall clock. A stop among them is settled:
        no device replies to a stop, so its delivery is all that can be known.
        """
        with self._changed:
            asks = self._asks.get(device, {})
            for ask_id in [a for a in held if a in asks and asks[a].envelope.ask.kind == "stop"]:
                self._take(asks[ask_id], at)  # it may have been sent while this pull waited
                self._settle(ask_id, device)
            return next((asks[ask_id] for ask_id in asks if ask_id not in held), None)

    def withdrawn(self, held: set[str]) -> list[str]:
        """Return the ids of `held` that were withdrawn."""
        with self._changed:
            return [ask_id for ask_id in held if ask_id in self._withdrawn]

    def pulled(self, outstanding: Outstanding, at: float) -> None:
        """Note that an assignment was sent to its device at the wall-clock time `at`."""
        self._messages.delivered(outstanding.message)
        outstanding.pulled_at = at
        if outstanding.envelope.ask.kind != "stop":  # a stop may be lost on the way unnoticed
            with self._changed:
                self._take(outstanding, at)

    def holds(self, device: str, held: set[str], at: float) -> None:
        """Record the assignments that the device reports as received.

        After an aggregator restart this is the only evidence that they were delivered.
        """
        with self._changed:
            for outstanding in [one for id_, one in self._asks.get(device, {}).items() if id_ in held]:
                self._take(outstanding, at)

    def _take(self, outstanding: Outstanding, at: float) -> None:
        if not outstanding.taken:
            outstanding.taken = True
            self._taken.append(Delivered(outstanding.envelope.device, outstanding.envelope.ask, at))

    def pulled_at(self, device: str, ask_id: str) -> float:
        """Return the wall-clock time at which the device last pulled an assignment, 0 if it did not."""
        with self._changed:
            outstanding = self._asks.get(device, {}).get(ask_id)
            return outstanding.pulled_at if outstanding else 0.0

    def answered(self, device: str, reply: ReplyHeader | Failure, received: bytes = b"") -> bool:
        """Settle the assignment of a durable reply, and queue the reply for the fleet.

        `received` are the bytes that the reply was parsed from, if a device sent it. Return False if the device was
        revoked. A reply to an assignment that this process never sent (it was restarted) gets a request record of its
        own in the engine.
        """
        with self._changed:
            if device not in self._nodes:
                return False
            outstanding = self._asks.get(device, {}).get(reply.ask_id)
            message = outstanding.message if outstanding else self._messages.ask(self._nodes[device], b"")
            self._settle(reply.ask_id, device, forget=False)
            if isinstance(reply, ReplyHeader):
                self._remember(reply)
            self._arrived(ArrivedReply(self._messages.reply(message, received or reply_to_bytes(reply)), reply))
            return True

    def outstanding(self, device: str, ask_id: str) -> Outstanding | None:
        """Return an assignment that the device has not replied to, or None."""
        with self._changed:
            return self._asks.get(device, {}).get(ask_id)

    def shut_out(self, device: str) -> list[UpdateId]:
        """Fail all assignments of a revoked device, and remove its replies that were not polled; return their ids."""
        with self._changed:
            taken, kept = list[UpdateId](), deque[Arrival | ArrivedReply]()
            for arrival in self._arrivals:
                head = arrival.reply if isinstance(arrival, ArrivedReply) else arrival
                if not isinstance(head, ReplyHeader) or head.update_id.device != device:
                    kept.append(arrival)
                else:
                    taken.append(head.update_id)
                    if isinstance(arrival, ArrivedReply):
                        self._messages.collect([arrival.message])
            self._arrivals = kept
            for ask_id in list(self._asks.get(device, {})):
                self._settle(ask_id, device)
                self._arrived(Failure("refused", "revoked", ask_id, device))
            if self._nodes.pop(device, None) is not None:
                self._arrived(NodeLeft(device, "revoked"))
            return taken

    def settle(self, device: str, ask_id: str) -> None:
        """Settle the assignment of a reply that arrived before."""
        with self._changed:
            self._settle(ask_id, device)

    def waiting(self, device: str) -> int:
        """Return how many replies of a device lie in the spool without an ack."""
        with self._changed:
            return len(self._waiting.get(device, ()))

    def seen(self, update_id: UpdateId) -> bytes | None:
        """Return the digest of the reply that arrived under this id, also after its ack; None if none arrived."""
        with self._changed:
            return self._answers.get(update_id)

    def arrived(self, arrival: Arrival) -> None:
        """Queue an arrival that is not the reply to a message of the engine."""
        with self._changed:
            if isinstance(arrival, ReplyHeader):
                self._remember(arrival)
            self._arrived(arrival)

    def _arrived(self, arrival: Arrival | ArrivedReply) -> None:
        self._arrivals.append(arrival)
        self._changed.notify_all()

    def _remember(self, head: ReplyHeader) -> None:
        _remember(self._answers, head.update_id, answer_digest(head))
        self._waiting.setdefault(head.update_id.device, set()).add(head.update_id)

    def _settle(self, ask_id: str, device: str, forget: bool = True) -> None:
        """Remove an assignment of this device. An assignment of another device is left alone."""
        outstanding = self._asks.get(device, {}).pop(ask_id, None)
        if outstanding is not None:
            del self._asked[ask_id]
            if forget:
                self._messages.forget(outstanding.message)


def answer_digest(head: ReplyHeader) -> bytes:
    """Return the digest that identifies a reply: two replies under one update id with equal digests are the same.

    It covers the parts, base version, examples, steps, normalizer, codec and metrics, but not the timings.
    """
    said = (head.parts, head.base_version, head.examples, head.steps, head.a, head.codec, sorted(head.metrics.items()))
    return hashlib.sha256(repr(said).encode()).digest()


def _remember(memory: OrderedDict[K, V], key: K, value: V) -> None:
    memory[key] = value
    while len(memory) > REMEMBERED:
        memory.popitem(last=False)


class MessageLog(Protocol):
    """The engine's record of messages. It returns an opaque handle for each message."""

    def ask(self, node_id: int, data: bytes, group: str = "") -> Any:
        """Record a request to a node, and return its handle."""

    def delivered(self, message: Any) -> None:
        """Note that a request was delivered to its node."""

    def reply(self, ask: Any, data: bytes) -> Any:
        """Record a reply to a request, and return its handle."""

    def collect(self, replies: Sequence[Any]) -> list[bytes]:
        """Return the bytes of replies, and delete their records."""

    def forget(self, message: Any) -> None:
        """Delete a request that gets no reply."""


@dataclass
class Outstanding:
    """An assignment without a reply yet, and the engine's record of it.

    `data` is the encoded assignment. `message` is the handle that a `MessageLog` gave for it. `process` is the device's
    process that was registered when the assignment was sent. `pulled_at` is the wall clock at the last pull, 0 before
    the first one. `taken` is True once the delivery was reported.
    """

    envelope: Envelope
    message: Any
    data: bytes
    process: str
    pulled_at: float = 0.0
    taken: bool = False

    @property
    def length(self) -> int:
        """Return the length of the assignment's parts in bytes."""
        return sum(part.length for part in self.envelope.ask.parts)

    def spoken(self, protocol: int, process: str) -> bytes:
        """Return the assignment encoded for one client process.

        It lowers the assignment's protocol version to the negotiated one, because a client rejects a newer one. It sets
        `farewell` on a stop if the process registered after the stop was sent.
        """
        ask = self.envelope.ask
        farewell = ask.farewell or (ask.kind == "stop" and process != self.process)
        if ask.protocol <= protocol and farewell == ask.farewell:
            return self.data
        return ask_to_bytes(replace(ask, protocol=min(ask.protocol, protocol), farewell=farewell))
