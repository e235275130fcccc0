"""Updates without training: small, real frames, so that journal, spool, fold and close have all of their work."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from thinwire.aggregation import parse
from thinwire.core.ask_ids import within_run
from thinwire.core.fleet import Delivery
from thinwire.core.keys import Key, derive
from thinwire.core.layout import Layout
from thinwire.core.types import Ask, Failure, Metrics, Part, ReplyHead, UpdateId, Vector
from thinwire.simulation.turns import Turn

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
