"""From accepted updates to the next model: fold each as it comes, then step once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from thinwire.aggregation import BoundCodec, BufferMean, WeightedMean, parse
from thinwire.aggregation.algorithms import algorithm_of
from thinwire.aggregation.native.threads import planned_threads
from thinwire.aggregation.optimizers import stepped
from thinwire.core.errors import BadPayload, ThinwireError
from thinwire.core.layout import Layout
from thinwire.core.plan import RunPlan
from thinwire.core.types import Arrived, ReplyHead, State, Vector
from thinwire.server.model.control_mean import COMMON, held, moved_on
from thinwire.server.model.device_weights import Weights
from thinwire.server.model.shares import SHARES, moved_by

Frames = Callable[[], Iterator[Arrived]]


class Overflowed(ThinwireError):
    """The sum of a round's updates is not finite."""


@dataclass
class Model:
    """What the aggregator trains: `params` and `buffers` are flat float32 vectors of the layout.

    The layout is of all that travels: under SCAFFOLD `params` has the control variate behind the model.
    """

    layout: Layout
    params: Vector
    buffers: Vector
    counters: dict[str, int]
    state: State = field(default_factory=dict)  # the server optimizer's, ef21's sum, FedDyn's mean


class Fold:
    """One round's tally: takes updates in the journal's order, one at a time, each wholly or not at all."""

    def __init__(
        self,
        plan: RunPlan,
        layout: Layout,
        codec: str,
        weights: Mapping[str, int] | None = None,
        codec_of: Callable[[ReplyHead], str] | None = None,
    ) -> None:
        self.plan, self.layout = plan, layout
        self.codec_of = codec_of or (lambda head: codec)
        self._bound: dict[str, BoundCodec] = {}
        self.algorithm = algorithm_of(plan)
        self.weights = Weights(weights or {}) if plan.remembered else None
        self.changes = WeightedMean(parse(codec).bind(layout), layout)
        self.buffers = BufferMean(layout)

    def add(self, head: ReplyHead, frames: Frames, discount: float) -> None:
        """Fold one update; BadPayload leaves the tally as it was."""
        with planned_threads(self.plan.server.threads or 1):
            self._add(head, frames, discount)

    def _add(self, head: ReplyHead, frames: Frames, discount: float) -> None:
        segments = len(self.layout.segments)
        expected = [f"frame/{i}" for i in range(segments)]
        names = [part.name for part in head.parts]
        if names not in (expected, [*expected, "buffers"]):
            raise BadPayload(f"an update with the parts {', '.join(names)[:80]}", why=f"expected {segments} frames")
        if not (head.examples > 0 and head.a > 0):
            raise BadPayload(f"an update of {head.examples} examples with a = {head.a}", why="both must be positive")
        statistics = deque(frames(), maxlen=1).pop() if len(names) > segments else None
        if statistics is not None:
            self.buffers.check(statistics)
        self.changes.codec = self._codec(head)
        self.changes.fold(lambda: _first(frames(), segments), *self._counting(head, discount))
        if self.weights is not None:
            self.weights.count(head.update_id.device, head.examples)
        if statistics is not None:
            self.buffers.fold(statistics, head.examples * discount)
        self.buffers.count(head.counters)

    def _counting(self, head: ReplyHead, discount: float) -> tuple[int, float, float]:
        """What an update counts: its examples, discount and a. Of a buffer each change counts alike, and as a whole, so
        that the mean of n is 1/n of the sum of discount * a * d.
        """
        if self.plan.cohort.mode == "buffered":
            return 1, discount * head.a, 1.0
        if self.weights is not None:
            return self.weights.of(head.update_id.device, head.examples), discount, head.a
        return head.examples, discount, head.a

    def _codec(self, head: ReplyHead) -> BoundCodec:
        """The codec that this update was asked for in."""
        spec = self.codec_of(head)
        if spec not in self._bound:
            self._bound[spec] = parse(spec).bind(self.layout)
        return self._bound[spec]

    def step(self, model: Model) -> None:
        """Move the model by what was folded; `model.params` is overwritten."""
        change, kept = self._change(model)
        if change is None or not np.isfinite(sum(a.sum(dtype=np.float64) for a in (change, *kept.values()))):
            raise Overflowed(
                "the updates of this round add up to NaN or infinity",
                why="one client's training diverged",
                hint="a smaller [local] lr, or [local] clip_grad = 1.0",
            )
        own = {name: array for name, array in model.state.items() if name not in (SHARES, COMMON)}
        if self.algorithm is not None and self.algorithm.control:
            moved, own = stepped(self.plan.server, model.params[: change.size], change, own)
            model.params = np.concatenate([moved, kept.pop(COMMON)])
        else:
            model.params, own = stepped(self.plan.server, model.params, change, own)
        model.state = {**own, **kept}
        if self.plan.local.buffers == "average":
            model.buffers = self.buffers.close(model.buffers)
            model.counters |= self.buffers.counters

    def _change(self, model: Model) -> tuple[Vector | None, State]:
        """What the optimizer is given, and what the aggregator keeps of all devices; the tally is used up."""
        if self.weights is None or not self.changes.count:
            return self.changes.close(), {}
        if self.algorithm is None:
            return moved_by(self.changes, model.state, self.weights)
        before = held(self.algorithm, self.layout, model.params, model.state)
        common = moved_on(self.algorithm, self.layout, before, self.changes, self.weights)
        change = self.changes.close()
        assert change is not None
        return self.algorithm.step(change[: self.layout.model_size], common), {COMMON: common}


def _first(frames: Iterator[Arrived], count: int) -> Iterator[Arrived]:
    for _, frame in zip(range(count), frames, strict=False):
        yield frame
