"""What is asked of whom and what came back: the one thing that the fleet's thread and the door's thread share."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from thinwire.core.fleet import Arrival, Envelope, NodeLeft, TakenUp
from thinwire.core.serialization import ask_to_bytes, reply_to_bytes
from thinwire.core.types import Failure, ReplyHead, UpdateId

K = TypeVar("K")
V = TypeVar("V")
REMEMBERED = 65_536  # withdrawn asks, and answers that left the spool


@dataclass(frozen=True)
class Replied:
    """A reply as it was read when it came, and its Flower message, which holds the bytes that came: they are never
    read a second time, so a poll cannot fail on them.
    """

    message: Any
    reply: ReplyHead | Failure


class Exchange:
    """Asks by device, in the order sent; arrivals in the order they came.

    Law: an ask stays until it is answered or cancelled, whatever becomes of connections and processes.
    """

    def __init__(self, messages: MessageLog, wake: Callable[[Iterable[str]], None]) -> None:
        self._messages, self._wake = messages, wake
        self._changed = threading.Condition()
        self._nodes: dict[str, int] = {}
        self._processes: dict[str, str] = {}  # device -> the one that said hello last
        self._asks: dict[str, dict[str, Outstanding]] = {}
        self._asked: dict[str, str] = {}  # ask_id -> device
        self._withdrawn: OrderedDict[str, None] = OrderedDict()
        self._answers: OrderedDict[UpdateId, bytes] = OrderedDict()
        self._arrivals: deque[Arrival | Replied] = deque()
        self._waiting: dict[str, set[UpdateId]] = {}  # device -> its answers that are not acked
        self._taken: list[TakenUp] = []

    # The fleet's thread

    def send(self, envelopes: Sequence[Envelope]) -> None:
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
        with self._changed:
            known = all(ask_id in self._asked for ask_id in ask_ids)  # else a device may hold it from before a restart
            devices = {self._asked[ask_id] for ask_id in ask_ids} if known else set(self._nodes)
            for ask_id in ask_ids:
                self._settle(ask_id, self._asked.get(ask_id, ""))
                _remember(self._withdrawn, ask_id, None)
        self._wake(devices)

    def acked(self, update_id: UpdateId) -> None:
        with self._changed:
            self._waiting.get(update_id.device, set()).discard(update_id)

    def poll(self, wait_s: float) -> list[Arrival]:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._arrivals), wait_s)
            came, self._arrivals = list(self._arrivals), deque()
        self._messages.collect([entry.message for entry in came if isinstance(entry, Replied)])
        return [entry.reply if isinstance(entry, Replied) else entry for entry in came]

    def taken_up(self) -> list[TakenUp]:
        """What devices took up since the last call."""
        with self._changed:
            taken, self._taken = self._taken, []
            return taken

    # The door's thread

    def register(self, device: str, node_id: int) -> None:
        with self._changed:
            self._nodes[device] = node_id

    def greeted(self, device: str, process: str) -> None:
        with self._changed:
            self._processes[device] = process

    def node_of(self, device: str) -> int:
        with self._changed:
            return self._nodes.get(device, 0)

    def names_of(self, node_id: int) -> list[str]:
        """What the device of a node was called since the start."""
        with self._changed:
            return [name for name, other in self._nodes.items() if other == node_id and node_id]

    def next_for(self, device: str, held: set[str], at: float) -> Outstanding | None:
        """The oldest ask that the device does not hold."""
        with self._changed:
            asks = self._asks.get(device, {})
            for ask_id in [a for a in held if a in asks and asks[a].envelope.ask.kind == "stop"]:
                self._take(asks[ask_id], at)  # it may have been sent while the device waited
                self._settle(ask_id, device)  # nobody answers a stop: that it is held is all there is to know
            return next((asks[ask_id] for ask_id in asks if ask_id not in held), None)

    def withdrawn(self, held: set[str]) -> list[str]:
        with self._changed:
            return [ask_id for ask_id in held if ask_id in self._withdrawn]

    def pulled(self, outstanding: Outstanding, at: float) -> None:
        self._messages.delivered(outstanding.message)
        outstanding.pulled_at = at
        if outstanding.envelope.ask.kind != "stop":  # it may be lost on the way, and nothing would say so
            with self._changed:
                self._take(outstanding, at)

    def holds(self, device: str, held: set[str], at: float) -> None:
        """What a device says that it has: of an ask that another aggregator handed out nobody else tells."""
        with self._changed:
            for outstanding in [one for id_, one in self._asks.get(device, {}).items() if id_ in held]:
                self._take(outstanding, at)

    def _take(self, outstanding: Outstanding, at: float) -> None:
        if not outstanding.taken:
            outstanding.taken = True
            self._taken.append(TakenUp(outstanding.envelope.device, outstanding.envelope.ask, at))

    def pulled_at(self, device: str, ask_id: str) -> float:
        with self._changed:
            outstanding = self._asks.get(device, {}).get(ask_id)
            return outstanding.pulled_at if outstanding else 0.0

    def answered(self, device: str, reply: ReplyHead | Failure, received: bytes = b"") -> bool:
        """An answer is durable: its ask is settled, and the fleet polls it as a Flower reply. False: it was shut out.

        `received` are the bytes that it was read from, where a device sent it.
        An answer to an ask that this process never sent (it was restarted) gets an ask of its own in Flower's state.
        """
        with self._changed:
            if device not in self._nodes:
                return False
            outstanding = self._asks.get(device, {}).get(reply.ask_id)
            message = outstanding.message if outstanding else self._messages.ask(self._nodes[device], b"")
            self._settle(reply.ask_id, device, forget=False)
            if isinstance(reply, ReplyHead):
                self._remember(reply)
            self._arrived(Replied(self._messages.reply(message, received or reply_to_bytes(reply)), reply))
            return True

    def outstanding(self, device: str, ask_id: str) -> Outstanding | None:
        """An ask that the device has not answered."""
        with self._changed:
            return self._asks.get(device, {}).get(ask_id)

    def shut_out(self, device: str) -> list[UpdateId]:
        """Refuse what the device was asked, and take back what it sent and nobody has polled; gives those answers."""
        with self._changed:
            taken, kept = list[UpdateId](), deque[Arrival | Replied]()
            for arrival in self._arrivals:
                head = arrival.reply if isinstance(arrival, Replied) else arrival
                if not isinstance(head, ReplyHead) or head.update_id.device != device:
                    kept.append(arrival)
                else:
                    taken.append(head.update_id)
                    if isinstance(arrival, Replied):
                        self._messages.collect([arrival.message])
            self._arrivals = kept
            for ask_id in list(self._asks.get(device, {})):
                self._settle(ask_id, device)
                self._arrived(Failure("refused", "revoked", ask_id, device))
            if self._nodes.pop(device, None) is not None:
                self._arrived(NodeLeft(device, "revoked"))
            return taken

    def settle(self, device: str, ask_id: str) -> None:
        """The device's answer was here before."""
        with self._changed:
            self._settle(ask_id, device)

    def waiting(self, device: str) -> int:
        """How many answers of a device lie in the spool and are not acked."""
        with self._changed:
            return len(self._waiting.get(device, ()))

    def seen(self, update_id: UpdateId) -> bytes | None:
        """The digest of the answer that came under this id, also after it was acked."""
        with self._changed:
            return self._answers.get(update_id)

    def arrived(self, arrival: Arrival) -> None:
        """Something to poll that is no answer to a Flower message."""
        with self._changed:
            if isinstance(arrival, ReplyHead):
                self._remember(arrival)
            self._arrived(arrival)

    def _arrived(self, arrival: Arrival | Replied) -> None:
        self._arrivals.append(arrival)
        self._changed.notify_all()

    def _remember(self, head: ReplyHead) -> None:
        _remember(self._answers, head.update_id, answer_digest(head))
        self._waiting.setdefault(head.update_id.device, set()).add(head.update_id)

    def _settle(self, ask_id: str, device: str, forget: bool = True) -> None:
        """An ask is over for the device it went to; whoever else names it settles nothing."""
        outstanding = self._asks.get(device, {}).pop(ask_id, None)
        if outstanding is not None:
            del self._asked[ask_id]
            if forget:
                self._messages.forget(outstanding.message)


def answer_digest(head: ReplyHead) -> bytes:
    """What two answers under one update_id must share to be one answer: all but the times they took."""
    said = (head.parts, head.base_version, head.examples, head.steps, head.a, head.codec, sorted(head.metrics.items()))
    return hashlib.sha256(repr(said).encode()).digest()


def _remember(memory: OrderedDict[K, V], key: K, value: V) -> None:
    memory[key] = value
    while len(memory) > REMEMBERED:
        memory.popitem(last=False)


# An ask that has no answer yet, as it goes to the device that it is for.


class MessageLog(Protocol):
    """Where the engine keeps its messages. It gives a handle for each one, which only it can read."""

    def ask(self, node_id: int, data: bytes, group: str = "") -> Any: ...
    def delivered(self, message: Any) -> None: ...
    def reply(self, ask: Any, data: bytes) -> Any: ...
    def collect(self, replies: Sequence[Any]) -> list[bytes]: ...
    def forget(self, message: Any) -> None: ...


@dataclass
class Outstanding:
    """An ask without an answer yet, and its Flower message. `process`: of the device, that was there when it was sent.
    `pulled_at` is wall-clock, 0 before the first pull.
    """

    envelope: Envelope
    message: Any  # the handle that a `MessageLog` gave for it
    data: bytes
    process: str
    pulled_at: float = 0.0
    taken: bool = False  # whether it was said that the device has it

    @property
    def length(self) -> int:
        """Of its parts, in bytes."""
        return sum(part.length for part in self.envelope.ask.parts)

    def spoken(self, protocol: int, process: str) -> bytes:
        """The ask as it goes to a process that speaks this version with us: one that says a newer one is not taken, and
        a stop is a farewell to one that came after it was sent.
        """
        ask = self.envelope.ask
        farewell = ask.farewell or (ask.kind == "stop" and process != self.process)
        if ask.protocol <= protocol and farewell == ask.farewell:
            return self.data
        return ask_to_bytes(replace(ask, protocol=min(ask.protocol, protocol), farewell=farewell))
