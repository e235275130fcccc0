"""A fleet on a virtual clock: each device answers as its script says; nothing sleeps and nothing is random."""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from thinwire.aggregation import feedback, parse
from thinwire.core import Key, Layout, VirtualClock
from thinwire.core.fleet import Arrival, Envelope, Hello, NodeJoined, NodeLeft, TaskReport
from thinwire.core.plan import digest_of
from thinwire.core.types import Ask, Failure, Part, ReplyHead, Transfer, UpdateId, Vector

LAYOUT = Layout.of({"w": (30, 20), "b": (20,)})
REPORT = TaskReport("toy", layout_digest=LAYOUT.digest)

Script = Callable[[Ask], float | Failure | None]  # seconds until the answer; None: never; a Failure: at once


@dataclass
class Device:
    """Answers an ask after `script(ask)` seconds with a change that depends on its name and the round only."""

    name: str
    script: Script = lambda ask: 1.0
    sequence: int = 0
    examples: int = 10
    answered: dict[str, tuple[ReplyHead, list[bytes]]] = field(default_factory=dict)  # its outbox
    plans: set[str] = field(default_factory=set)  # digests of those that it holds
    bundle: Path | None = None  # of the ask that it was given last

    def take(self, ask: Ask) -> float | Failure | None:
        """As the script says, once the plan is known: a whole one is kept, one that is only named must be there."""
        if isinstance(ask.plan, str):
            if ask.plan not in self.plans:
                return Failure("need-plan", "", ask.ask_id)
        else:
            self.plans.add(digest_of(ask.plan))
        return self.script(ask)

    def answer(self, ask: Ask) -> tuple[ReplyHead, list[bytes]]:
        """An ask that was answered gets the same bytes again."""
        if ask.ask_id not in self.answered:
            self.answered[ask.ask_id] = self.reply(ask)
        return self.answered[ask.ask_id]

    def reply(self, ask: Ask) -> tuple[ReplyHead, list[bytes]]:
        self.sequence += 1
        update_id = UpdateId(ask.run, self.name, self.sequence)
        metrics = {"eval/loss": (float(ask.base_version), 1.0), "eval/accuracy": (1.0, 2.0)}
        if ask.kind != "train":
            return ReplyHead(ask.ask_id, update_id, ask.base_version, self.examples, metrics=metrics), []
        payload = self.encoded(ask, made_change(self.name, ask.round))
        part = Part("frame/0", len(payload), hashlib.sha256(payload).hexdigest())
        head = ReplyHead(
            ask.ask_id, update_id, ask.base_version, self.examples, steps=5, a=5.0, metrics=metrics, parts=(part,)
        )
        return head, [payload]

    def encoded(self, ask: Ask, change: Vector) -> bytes:
        codec = feedback(parse(ask.codec)).bind(LAYOUT)
        return codec.encode(change, codec.init(), Key(seed_of(self.name, ask.round))).payload


def seed_of(name: str, round_number: int) -> int:
    return int(hashlib.sha256(f"{name}/{round_number}".encode()).hexdigest()[:8], 16)


def made_change(name: str, round_number: int) -> Vector:
    drawn: Vector = np.random.default_rng(seed_of(name, round_number)).standard_normal(LAYOUT.size).astype(np.float32)
    return drawn


@dataclass
class ScriptedFleet:
    """Keeps core/fleet.py's laws; `spooled` outlives a driver's death as the spool's folder does."""

    clock: VirtualClock
    devices: list[Device]
    spooled: dict[UpdateId, tuple[ReplyHead, list[bytes]]] = field(default_factory=dict)
    asked: dict[str, Envelope] = field(default_factory=dict)
    bodies: dict[UpdateId, list[bytes]] = field(default_factory=dict)
    sent: list[Envelope] = field(default_factory=list)
    acked: list[UpdateId] = field(default_factory=list)
    pulled: dict[str, float] = field(default_factory=dict)  # ask_id -> when its device took it
    _due: list[tuple[float, int, Arrival]] = field(default_factory=list)
    _count: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        for device in self.devices:
            self.later(0.0, NodeJoined(device.name, self.hello(device)))

    def hello(self, device: Device) -> Hello:
        return Hello(device.name, "p1", (REPORT,), plans=tuple(device.plans))

    def later(self, seconds: float, arrival: Arrival) -> None:
        heapq.heappush(self._due, (self.clock.now() + seconds, next(self._count), arrival))

    def restart(self) -> ScriptedFleet:
        """The same devices and spool in front of a new aggregator: all come back, un-acked heads come again."""
        again = ScriptedFleet(
            self.clock, self.devices, self.spooled, bodies=self.bodies, sent=self.sent, pulled=self.pulled
        )
        for head, _ in self.spooled.values():
            again.later(0.0, head)
        pending = {a.ask_id for _, _, a in self._due if isinstance(a, ReplyHead)}
        for at, _, arrival in sorted(self._due, key=lambda due: due[:2]):
            if isinstance(arrival, ReplyHead) and arrival.update_id not in self.spooled:
                again.later(max(0.0, at - self.clock.now()), arrival)
        again.asked = {ask_id: e for ask_id, e in self.asked.items() if ask_id in pending}
        return again

    def send(self, asks: Sequence[Envelope]) -> None:
        for envelope in asks:
            self.sent.append(envelope)
            if envelope.ask.ask_id in self.asked or envelope.ask.kind == "stop":
                continue
            self.asked[envelope.ask.ask_id] = envelope
            device = next(d for d in self.devices if d.name == envelope.device)
            device.bundle = envelope.bundle
            self.pulled.setdefault(envelope.ask.ask_id, self.clock.wall())
            answer = device.take(envelope.ask)
            if isinstance(answer, Failure):
                del self.asked[envelope.ask.ask_id]  # it is over, and may be asked again
                self.later(0.0, replace(answer, ask_id=envelope.ask.ask_id, device=device.name))
            elif answer is not None:
                head, frames = device.answer(envelope.ask)
                self.bodies[head.update_id] = frames
                self.later(answer, head)

    def poll(self, wait_s: float) -> Sequence[Arrival]:
        if not self._due or self._due[0][0] > self.clock.now() + wait_s:
            self.clock.advance(wait_s)
            return []
        at, _, arrival = heapq.heappop(self._due)
        self.clock.advance(max(0.0, at - self.clock.now()))
        if isinstance(arrival, ReplyHead):
            wall = self.clock.wall()
            pulled = self.pulled.get(arrival.ask_id, wall)
            arrival = arrival.arrived(Transfer(pulled, wall, wall, 1000, 500, 2))
            self.spooled.setdefault(arrival.update_id, (arrival, self.bodies.get(arrival.update_id, [])))
        return [arrival]

    def open(self, update_id: UpdateId) -> Iterator[bytes]:
        return iter(self.spooled[update_id][1])

    def ack(self, update_ids: Sequence[UpdateId]) -> None:
        for update_id in update_ids:
            self.acked.append(update_id)
            self.spooled.pop(update_id, None)

    def cancel(self, ask_ids: Sequence[str]) -> None:
        for ask_id in ask_ids:
            self.asked.pop(ask_id, None)
        self._due = [due for due in self._due if getattr(due[2], "ask_id", None) not in ask_ids]
        heapq.heapify(self._due)

    def shut_out(self, devices: Sequence[str]) -> None:
        """What is on its way from them never comes; what they were asked is refused."""
        for device in devices:
            self._due = [due for due in self._due if _sender(due[2]) != device]
            heapq.heapify(self._due)
            for ask_id in [ask_id for ask_id, envelope in self.asked.items() if envelope.device == device]:
                if not any(head.ask_id == ask_id for head, _ in self.spooled.values()):
                    self.later(0.0, Failure("refused", "revoked", ask_id, device))
            self.later(0.0, NodeLeft(device, "revoked"))

    def close(self) -> None:
        """Nothing is held."""

    def lose(self, device: str, after_s: float = 0.0) -> None:
        self.later(after_s, NodeLeft(device, "the connection was lost"))

    def arrive(self, name: str, after_s: float) -> None:
        """A device that was not there comes."""
        device = next(d for d in self.devices if d.name == name)
        self.later(after_s, NodeJoined(name, self.hello(device)))


def _sender(arrival: Arrival) -> str:
    return arrival.update_id.device if isinstance(arrival, ReplyHead) else arrival.device
