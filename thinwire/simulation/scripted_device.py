"""Simulates a device that follows a script: its timing, its failures, and its state that survives a crash.

A script returns a `Turn` for each assignment: how long each stage takes on the virtual clock, and what goes wrong.
`Paced` is a random script. A `Work` makes the replies. `SyntheticUpdates` makes them without training: small, real
frames, so that journal, spool and aggregation do all of their work.
"""

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
from thinwire.core.types import Ask, Failure, Metrics, Part, ReplyHeader, UpdateId, Vector, Verdict, within_run
from thinwire.simulation.local_fleet import LocalLink


@dataclass
class Kept:
    """Holds a reply of a device until the outcome of its update is known."""

    delivery: Delivery
    turn: Turn
    head: ReplyHeader
    body: bytes
    more: list[tuple[ReplyHeader, bytes]] = field(default_factory=list)  # further replies that are sent with it
    pushed: bool = False

    @property
    def ask_id(self) -> str:
        """Return the id of the assignment that the reply answers."""
        return self.delivery.ask.ask_id

    @property
    def upload_s(self) -> float:
        """Return the seconds of the reply's upload."""
        return self.turn.sending_s(len(self.body))


@dataclass
class ScriptedDevice:
    """Simulates a device that does `work` as its `script` says, one assignment after the other.

    The device connects at the first poll, or later if it is `away` from time 0. `away` lists (from, until) in seconds.
    Its outbox survives a crash, but work in progress begins again. `told` holds all outcomes that the device was
    informed of. With `overlaps`, the device works on its next assignment while it uploads; replies leave one after the
    other.
    """

    name: str
    work: Work
    script: Script = field(default=lambda ask: Turn())
    away: Sequence[tuple[float, float]] = ()
    overlaps: bool = False
    told: dict[UpdateId, Verdict] = field(default_factory=dict)
    outbox: dict[str, Kept] = field(default_factory=dict)  # by id of the assignment
    plans: set[str] = field(default_factory=set)  # digests of the plans that it has
    life: int = 0  # number of restarts: events scheduled before the last one do not happen
    link: LocalLink | None = None  # while it is connected
    busy: bool = False
    sent_by: float = 0.0  # when all its uploads will have ended
    _taken_up: set[str] = field(default_factory=set)

    def turn(self, ask: Ask) -> Turn:
        """Return what the script says. A loss happens once, since a lost message arrives when the device has
        reconnected.
        """
        again = ask.ask_id in self._taken_up
        self._taken_up.add(ask.ask_id)
        turn = self.script(ask)
        return replace(turn, lost="") if again else turn

    def hear(self, ask: Ask) -> bool:
        """Take in an assignment's outcomes and plan; return False if only the plan's digest is given and the plan is
        not known.
        """
        for verdict in ask.verdicts:
            self.told[verdict.update_id] = verdict
        settled = {update_id for update_id, verdict in self.told.items() if verdict.outcome != "unknown"}
        self.outbox = {a: kept for a, kept in self.outbox.items() if kept.head.update_id not in settled}
        if isinstance(ask.plan, str):
            return ask.plan in self.plans
        self.plans.add(digest_of(ask.plan))
        return True


Again = Literal["same", "new", "changed"]


@dataclass(frozen=True)
class Turn:
    """Holds the course of one assignment on one device, in seconds; `upload_s` may depend on the bytes of the reply.

    - `lost`: the assignment or the reply does not arrive until the device has reconnected. Then the device begins
      again, or sends the same bytes.
    - `failure`: (kind, text) of the reply, which has no update then.
    - `garbage`: the frames are damaged, so their aggregation fails.
    - `held` = n: the reply is sent when the assignments of a round at least n later are sent.
    - `again`: what else the device sends: the same bytes, a second update for the same assignment, or other bytes
      under the same id.
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
        """Return how many seconds the upload of `size` bytes takes."""
        return self.upload_s(size) if callable(self.upload_s) else self.upload_s


Script = Callable[[Ask], Turn]


@dataclass(frozen=True)
class LogNormal:
    """Samples seconds whose logarithm is normally distributed: half of the samples are below `median_s`.

    >>> LogNormal(10.0, sigma=0.0).at(Key(1))
    10.0
    """

    median_s: float
    sigma: float

    def at(self, key: Key) -> float:
        """Return the sample that this key gives."""
        return self.median_s * math.exp(self.sigma * random.Random(seed63(key)).gauss(0.0, 1.0))


Duration = float | LogNormal


@dataclass(frozen=True)
class Paced:
    """Samples a turn for each assignment from the seed, the round and the device; the run's id does not matter.

    The bytes on the device's link add to the time of the stages, at `down_bytes_s` and `up_bytes_s` (0: no limit).
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
    """Return the seconds for `size` bytes on a link of `bytes_s` bytes per second; 0 means no limit."""
    return size / bytes_s if bytes_s else 0.0


def _drawn(duration: Duration, key: Key) -> float:
    return duration.at(key) if isinstance(duration, LogNormal) else duration


Answer = tuple[ReplyHeader | Failure, bytes]  # header, and the parts one after the other


class Work(Protocol):
    """Makes the replies of a scripted device.

    Each assignment begins once, unless the device crashes before its work is done.
    """

    def begin(self, delivery: Delivery, turn: Turn) -> Turn:
        """Begin to work on an assignment that was delivered; return its turn, in which the work may take another
        time.
        """

    def answer(self, delivery: Delivery, turn: Turn) -> Answer:
        """Return the reply when its virtual work is done; calls come in the order of the clock."""


@dataclass
class SyntheticUpdates:
    """Makes replies without training: the update is a constant, or what `change` returns for an assignment.

    It is encoded in the assignment's codec, without error feedback. The device makes `steps` steps, or fewer if the
    assignment says so. Each reply also evaluates the model: its loss is `loss` of the assignment.
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
        """Return the turn unchanged."""
        return turn

    def answer(self, delivery: Delivery, turn: Turn) -> Answer:
        """Return a reply with one frame for each segment, or with an evaluation alone."""
        ask = delivery.ask
        self.sequence += 1
        update_id = UpdateId(ask.run, self.name, self.sequence)
        metrics: Metrics = {} if ask.further else {"eval/loss": (self.loss(ask), 1.0)}
        if ask.kind != "train":
            head = ReplyHeader(ask.ask_id, update_id, ask.base_version, self.examples, metrics=metrics)
            return replace(head, identity=ask.identity), b""
        frames = [self._frame(ask, segment.index) for segment in self.layout.segments]
        if turn.garbage:
            frames = [frame[:-1] + bytes([frame[-1] ^ 0x5A]) + b"?" for frame in frames]
        steps = min(self.steps, ask.work.steps or self.steps)
        head = ReplyHeader(
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
        """Return the frame of a segment. Subclasses override it for a device with memory, or one that trains from what
        it gets.
        """
        codec = parse(ask.codec).bind(self.layout)
        key = derive(Key(0), self.name, within_run(ask.ask_id))
        return codec.encode(change.copy(), codec.init(segment), key, segment).payload


def parts_of(frames: list[bytes]) -> tuple[Part, ...]:
    """Return frames as the parts of a reply, with their digests."""
    return tuple(
        Part(f"frame/{index}", len(frame), hashlib.sha256(frame).hexdigest()) for index, frame in enumerate(frames)
    )
