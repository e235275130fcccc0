"""A device of a scripted fleet: who it is, what it knows, and what it keeps through its deaths."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import numpy as np

from thinwire.compression import parse
from thinwire.core.fleet import Delivery
from thinwire.core.layout import Layout
from thinwire.core.plan import digest_of
from thinwire.core.prng import Key, derive, seed63
from thinwire.core.types import Ask, Failure, Metrics, Part, ReplyHead, UpdateId, Vector, Verdict, within_run
from thinwire.simulation.local_fleet import LocalLink


@dataclass
class Kept:
    """An answer that a device has made, until a verdict on it comes."""

    delivery: Delivery
    turn: Turn
    head: ReplyHead
    body: bytes
    more: list[tuple[ReplyHead, bytes]] = field(default_factory=list)  # what is sent beside it
    pushed: bool = False

    @property
    def ask_id(self) -> str:
        return self.delivery.ask.ask_id

    @property
    def upload_s(self) -> float:
        return self.turn.sending_s(len(self.body))


@dataclass
class ScriptedDevice:
    """A device that does `work` as its `script` says, one ask after the other, and is `away` from and until such times.

    It comes at the first poll, or, where it is away from 0 on, later. What it has made it keeps through a death, as a
    device's outbox does; what it was working on begins anew. `told` is every verdict that it heard. One that `overlaps`
    works on its next ask while it sends; answers leave one after the other.
    """

    name: str
    work: Work
    script: Script = field(default=lambda ask: Turn())
    away: Sequence[tuple[float, float]] = ()
    overlaps: bool = False
    told: dict[UpdateId, Verdict] = field(default_factory=dict)
    outbox: dict[str, Kept] = field(default_factory=dict)  # by ask_id
    plans: set[str] = field(default_factory=set)  # digests of those that it holds
    life: int = 0  # what was scheduled in an earlier one does not happen
    link: LocalLink | None = None  # while it is there
    busy: bool = False
    sent_by: float = 0.0  # when what it is sending has all left
    _taken_up: set[str] = field(default_factory=set)

    def turn(self, ask: Ask) -> Turn:
        """What the script says; what is lost is lost once, since it is there again when the device is."""
        again = ask.ask_id in self._taken_up
        self._taken_up.add(ask.ask_id)
        turn = self.script(ask)
        return replace(turn, lost="") if again else turn

    def hear(self, ask: Ask) -> bool:
        """Verdicts and the plan of an ask; False when the plan is only named and not here."""
        for verdict in ask.verdicts:
            self.told[verdict.update_id] = verdict
        settled = {update_id for update_id, verdict in self.told.items() if verdict.outcome != "unknown"}
        self.outbox = {a: kept for a, kept in self.outbox.items() if kept.head.update_id not in settled}
        if isinstance(ask.plan, str):
            return ask.plan in self.plans
        self.plans.add(digest_of(ask.plan))
        return True


# What a scripted device does with an ask: how long each stage takes on the virtual clock, and what goes wrong.


Again = Literal["same", "new", "changed"]


@dataclass(frozen=True)
class Turn:
    """One ask on one device, in seconds; `upload_s` may follow from the bytes of the answer.

    `lost`: the ask does not get there, or the answer does not, until the device has been away and is back: then it
    begins anew, or sends the same bytes. `failure` (kind, text) is the answer instead of an update. `garbage`: frames
    that cannot be folded. `held` = n: the answer is sent when the asks of a round at least n later go
    out. `again`: what it sends once more: the same bytes, a second update for the same ask, or other bytes under the
    same id.
    """

    download_s: float = 0.0
    compute_s: float = 1.0
    encode_s: float = 0.0
    upload_s: float | Callable[[int], float] = 0.0
    lost: Literal["", "ask", "answer"] = ""
    failure: tuple[str, str] | None = None
    garbage: bool = False
    held: int = 0
    again: tuple[Again, ...] = ()

    def sending_s(self, size: int) -> float:
        """How long an answer of so many bytes is on its way."""
        return self.upload_s(size) if callable(self.upload_s) else self.upload_s


Script = Callable[[Ask], Turn]


@dataclass(frozen=True)
class LogNormal:
    """Seconds whose logarithm is normal: half of the draws are under `median_s`.

    >>> LogNormal(10.0, sigma=0.0).at(Key(1))
    10.0
    """

    median_s: float
    sigma: float

    def at(self, key: Key) -> float:
        return self.median_s * math.exp(self.sigma * random.Random(seed63(key)).gauss(0.0, 1.0))


Duration = float | LogNormal


@dataclass(frozen=True)
class Paced:
    """Draws a turn for each ask from the seed, the round and the device, whatever the run is called.

    Sizes of `down_bytes_s` and `up_bytes_s` (0: no limit) add to the time of the stages: the wire of the device.
    `lost_asks`, `lost_answers` and `failing` are probabilities.
    """

    seed: int = 0
    download: Duration = 0.0
    compute: Duration = 1.0
    encode: Duration = 0.0
    upload: Duration = 0.0
    down_bytes_s: float = 0.0
    up_bytes_s: float = 0.0
    lost_asks: float = 0.0
    lost_answers: float = 0.0
    failing: float = 0.0

    def __call__(self, ask: Ask) -> Turn:
        key = derive(Key(self.seed), "turn", within_run(ask.ask_id))
        upload_s = _drawn(self.upload, derive(key, "upload"))
        luck = random.Random(seed63(derive(key, "luck"))).random()
        return Turn(
            download_s=_drawn(self.download, derive(key, "download"))
            + over(self.down_bytes_s, sum(part.length for part in ask.parts)),
            compute_s=_drawn(self.compute, derive(key, "compute")),
            encode_s=_drawn(self.encode, derive(key, "encode")),
            upload_s=lambda size: upload_s + over(self.up_bytes_s, size),
            lost="ask" if luck < self.lost_asks else "answer" if luck < self.lost_asks + self.lost_answers else "",
            failure=("task-error", "scripted") if luck >= 1.0 - self.failing else None,
        )


def over(bytes_s: float, size: int) -> float:
    """Seconds for so many bytes on a wire of this speed; one of 0 is no limit."""
    return size / bytes_s if bytes_s else 0.0


def _drawn(duration: Duration, key: Key) -> float:
    return duration.at(key) if isinstance(duration, LogNormal) else duration


# Updates without training: small, real frames, so that journal, spool, fold and close have all of their work.


Answer = tuple[ReplyHead | Failure, bytes]  # and the parts, one after the other


class Work(Protocol):
    """Who makes a scripted device's answers: `begin` when an ask is taken up, which may say that the work will take
    another time than the script says, `answer` when its virtual work is over, in the clock's order.

    An ask is given to it once, unless the device died before it was done.
    """

    def begin(self, delivery: Delivery, turn: Turn) -> Turn: ...
    def answer(self, delivery: Delivery, turn: Turn) -> Answer: ...


@dataclass
class MadeUp:
    """Answers with a change that is a constant, or what `change` says; encoded in the ask's codec, without
    feedback. It makes `steps`, or as many as it is asked for, where that is fewer. Each answer also measures the model:
    its loss is `loss(ask)`.
    """

    name: str
    layout: Layout
    change: float | Callable[[Ask], Vector] = 0.0
    examples: int = 10
    steps: int = 1
    loss: Callable[[Ask], float] = lambda ask: 1.0 / (1.0 + ask.base_version)
    sequence: int = 0
    _payloads: dict[tuple[str, int], bytes] = field(default_factory=dict)

    def begin(self, delivery: Delivery, turn: Turn) -> Turn:
        return turn

    def answer(self, delivery: Delivery, turn: Turn) -> Answer:
        ask = delivery.ask
        self.sequence += 1
        update_id = UpdateId(ask.run, self.name, self.sequence)
        metrics: Metrics = {} if ask.further else {"eval/loss": (self.loss(ask), 1.0)}
        if ask.kind != "train":
            head = ReplyHead(ask.ask_id, update_id, ask.base_version, self.examples, metrics=metrics)
            return replace(head, identity=ask.identity), b""
        frames = [self._frame(ask, segment.index) for segment in self.layout.segments]
        if turn.garbage:
            frames = [frame[:-1] + bytes([frame[-1] ^ 0x5A]) + b"?" for frame in frames]
        steps = min(self.steps, ask.work.steps or self.steps)
        head = ReplyHead(
            ask.ask_id, update_id, ask.base_version, self.examples, steps, float(steps), metrics=metrics,
            parts=parts_of(frames), codec=ask.codec, identity=ask.identity,
        )  # fmt: skip
        return head, b"".join(frames)

    def _frame(self, ask: Ask, segment: int) -> bytes:
        span = self.layout.segments[segment].span
        if callable(self.change):
            return self.encoded(ask, segment, self.change(ask)[span])
        if (ask.codec, segment) not in self._payloads:
            constant = np.full(span.stop - span.start, self.change, np.float32)
            self._payloads[ask.codec, segment] = self.encoded(ask, segment, constant)
        return self._payloads[ask.codec, segment]

    def encoded(self, ask: Ask, segment: int, change: Vector) -> bytes:
        """The frame of a segment; for a device that remembers what it sent, or trains from what it was sent."""
        codec = parse(ask.codec).bind(self.layout)
        key = derive(Key(0), self.name, within_run(ask.ask_id))
        return codec.encode(change.copy(), codec.init(segment), key, segment).payload


def parts_of(frames: list[bytes]) -> tuple[Part, ...]:
    """Frames as the parts of an answer, with their digests."""
    return tuple(
        Part(f"frame/{index}", len(frame), hashlib.sha256(frame).hexdigest()) for index, frame in enumerate(frames)
    )
