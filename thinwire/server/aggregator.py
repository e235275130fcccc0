"""Aggregation of a round: each accepted update is added as it comes, then the server optimizer makes one step.

`RoundAggregator` holds the running sum of a round, so memory does not grow with the number of clients. `FoldQueue` runs
the additions outside the poll thread. `Weights` and the functions after it keep the means over all devices, which EF21,
SCAFFOLD and FedDyn need.

Invariant: updates are added in the order of the journal, one at a time. Therefore a resumed round gives the same bits.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from copy import copy, deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from thinwire.aggregation import BufferMean, WeightedMean
from thinwire.aggregation.control_variates import algorithm_of, followed
from thinwire.aggregation.server_optimizers import stepped
from thinwire.compression import BoundCodec, parse
from thinwire.compression.native.threads import planned_threads
from thinwire.core.errors import BadPayload, CodecError, TaskError
from thinwire.core.events import Capped
from thinwire.core.layout import Layout
from thinwire.core.plan import RunPlan
from thinwire.core.types import Arrived, ReplyHeader, State, UpdateId, Vector
from thinwire.server.policy.local_work import WeightCaps, require_a

if TYPE_CHECKING:
    from thinwire.aggregation.control_variates import Algorithm


Frames = Callable[[], Iterator[Arrived]]
MAX_VALUE = 2.0**96  # of a model: codecs keep their invariants up to 2^100; the downlink encodes differences of two
# The largest mean of a round's updates per step. Multiplied by 2^30 steps and 2^37 rounds it is still a float32. So are
# the results of an optimizer, and the sums that EF21, SCAFFOLD and FedDyn keep over all rounds.
MAX_MEAN = 2.0**60


def largest(values: Vector) -> float:
    """Return the largest magnitude of the values; NaN if one value is NaN, 0 if there are none."""
    return float(max(values.max(), -values.min())) if values.size else 0.0


def require_values(params: Vector) -> None:
    """Raise `TaskError` if a model's values are not finite, or larger than codecs and sums can take."""
    if not (found := largest(params)) <= MAX_VALUE:
        raise TaskError(
            f"the first model holds {found:g}",
            why=f"its values are finite and at most {MAX_VALUE:g}",
            hint="look at the task's model(), or at the file of [run] init",
        )


@dataclass
class Model:
    """The model that the run trains: `params` and `buffers` are flat float32 vectors of the layout.

    The layout covers every vector that is sent. Under SCAFFOLD `params` holds the control variate after the model.
    """

    layout: Layout
    params: Vector
    buffers: Vector
    counters: dict[str, int]
    state: State = field(default_factory=dict)  # of the server optimizer; EF21's sum, FedDyn's mean


class RoundAggregator:
    """The running sum of one round, to which updates are added one at a time in the order of the journal.

    Invariant: an update is added completely or not at all.
    """

    def __init__(
        self,
        plan: RunPlan,
        layout: Layout,
        codec: str,
        weights: Mapping[str, int] | None = None,
        codec_of: Callable[[ReplyHeader], str] | None = None,
        counters: Mapping[str, int] | None = None,
        steps_of: Callable[[ReplyHeader], int] | None = None,
        caps: WeightCaps | None = None,
    ) -> None:
        """Start an empty sum.

        `counters`: the integer buffers of the base model. `steps_of`: the steps that were assigned for a reply, 0 if
        the plan counts epochs. `caps`: limits on weights, if the round's other updates are known already.
        """
        self.plan, self.layout, self.before = plan, layout, counters or {}
        self.steps_of, self.caps = steps_of or (lambda head: 0), caps or WeightCaps()
        self.codec_of = codec_of or (lambda head: codec)
        self._bound: dict[str, BoundCodec] = {}
        self.algorithm = algorithm_of(plan)
        self.weights = Weights(weights or {}) if plan.remembered else None
        self.changes = WeightedMean(parse(codec).bind(layout), layout)
        self.buffers = BufferMean(layout)

    def add(self, head: ReplyHeader, frames: Frames, discount: float) -> None:
        """Add one update to the sum; raise `BadPayload` and leave the sum as it was if that is not possible."""
        with planned_threads(self.plan.server.threads or 1):
            self._add(head, frames, discount)

    def _add(self, head: ReplyHeader, frames: Frames, discount: float) -> None:
        """Check an update completely, then add it."""
        segments = len(self.layout.segments)
        expected = [f"frame/{i}" for i in range(segments)]
        names = [part.name for part in head.parts]
        if names not in (expected, [*expected, "buffers"]):
            raise BadPayload(f"an update with the parts {', '.join(names)[:80]}", why=f"expected {segments} frames")
        if not (head.examples > 0 and head.a > 0):
            raise BadPayload(f"an update of {head.examples} examples with a = {head.a}", why="both must be positive")
        require_a(self.plan, head, self.steps_of(head))
        head = self.caps.counted(head)
        statistics = deque(frames(), maxlen=1).pop() if len(names) > segments else None
        if statistics is not None:
            self.buffers.check(statistics, head.examples * discount)
        self.buffers.check_counters(head.counters, self.before)
        self.changes.codec = self._codec(head)
        self.changes.fold(lambda: _first(frames(), segments), *self._counting(head, discount))
        if self.weights is not None:
            self.weights.count(head.update_id.device, head.examples)
        if statistics is not None:
            self.buffers.fold(statistics, head.examples * discount)
        self.buffers.count(head.counters)

    def _counting(self, head: ReplyHeader, discount: float) -> tuple[int, float, float]:
        """Return the examples, the discount and the normaliser a with which an update counts.

        In a buffered round each update counts alike and as a whole: the mean of n is 1/n of the sum of discount
        * a * d.
        """
        if self.plan.cohort.mode == "buffered":
            return 1, discount * head.a, 1.0
        if self.weights is not None:
            return self.weights.of(head.update_id.device, head.examples), discount, head.a
        return head.examples, discount, head.a

    def _codec(self, head: ReplyHeader) -> BoundCodec:
        """Return the codec that was assigned for this update."""
        spec = self.codec_of(head)
        if spec not in self._bound:
            self._bound[spec] = parse(spec).bind(self.layout)
        return self._bound[spec]

    def capped(self, caps: WeightCaps, heads: Iterable[ReplyHeader]) -> dict[str, Capped]:
        """Return the updates that count less under these caps.

        Some updates do not count by their examples: in a buffered round, and when the device has a fixed weight
        already. Their examples then weigh only their statistics.
        """
        statistics = self.plan.local.buffers == "average" and self.buffers.layout.size > 0
        buffered, known = self.plan.cohort.mode == "buffered", self.weights.known if self.weights is not None else {}
        found = {
            str(head.update_id): caps.capped(head, statistics or not (buffered or head.update_id.device in known))
            for head in heads
        }
        return {update_id: one for update_id, one in found.items() if one is not None}

    def copy(self) -> RoundAggregator:
        """Return an independent copy of the sum."""
        made = copy(self)
        made.changes, made.buffers, made.weights = self.changes.copy(), self.buffers.copy(), deepcopy(self.weights)
        return made

    def fits(self) -> bool:
        """Return True if a model can be made of the sum so far; False if the sum is too large or has a NaN."""
        return largest(self.changes.total) <= MAX_MEAN * self.changes.examples

    def step(self, model: Model) -> None:
        """Move the model by the aggregated updates, of which there must be one; `model.params` is overwritten.

        Raise `CodecError` if the server optimizer gives NaN.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # values beyond the largest one are clipped to it
            change, kept = self._change(model)
            assert change is not None, "a step is made of one update at least"
            self._move(model, change, kept)
        if math.isnan(found := largest(model.params)):
            raise CodecError(
                f"the step of the server optimizer {self.plan.server.optimizer!r} gives NaN",
                why="the model and the mean change that it was given are finite",
                hint="a smaller [server] lr",
            )
        if found > MAX_VALUE:
            np.clip(model.params, -MAX_VALUE, MAX_VALUE, out=model.params)
        if self.plan.local.buffers == "average":
            model.buffers = self.buffers.close(model.buffers)
            model.counters |= self.buffers.counters

    def _move(self, model: Model, change: Vector, kept: State) -> None:
        """Apply the server optimizer's step to the model, and keep the state over all devices."""
        own = {name: array for name, array in model.state.items() if name not in (SHARES, COMMON)}
        if self.algorithm is not None and self.algorithm.control:
            moved, own = stepped(self.plan.server, model.params[: change.size], change, own)
            model.params = np.concatenate([moved, kept.pop(COMMON)])
        else:
            model.params, own = stepped(self.plan.server, model.params, change, own)
        model.state = {**own, **kept}

    def _change(self, model: Model) -> tuple[Vector | None, State]:
        """Return the change for the server optimizer, and the state that is kept over all devices; the sum
        is used up.
        """
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
    """Yield the first `count` frames."""
    for _, frame in zip(range(count), frames, strict=False):
        yield frame


T = TypeVar("T")


@dataclass(frozen=True)
class FoldResult:
    """The result of one addition: done in `seconds`, or rejected for the reason `refused`."""

    update_id: UpdateId
    seconds: float
    refused: str = ""


class InlineExecutor(Executor):
    """An executor that runs each function inside `submit`, in the calling thread."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Call the function now, and return a future that is done."""
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class FoldQueue:
    """Additions that were started and are not reported yet, on one worker thread, first in, first out.

    One worker keeps the order of the journal. With `at_once` additions run in the calling thread, since a thread costs
    more than a small addition if nothing else waits. `BadPayload` rejects the update; any other exception is a defect
    of Thinwire and is raised by `finished`.
    """

    def __init__(self, at_once: bool = False) -> None:
        self._worker = InlineExecutor() if at_once else ThreadPoolExecutor(max_workers=1, thread_name_prefix="fold")
        self._begun: list[Future[FoldResult]] = []
        self._of: dict[UpdateId, Future[FoldResult]] = {}

    def begin(self, update_id: UpdateId, fold: Callable[[], None]) -> None:
        """Start an addition, and time it."""

        def timed() -> FoldResult:
            start = time.perf_counter()
            try:
                fold()
            except BadPayload as error:
                return FoldResult(update_id, time.perf_counter() - start, refused=f"bad-payload: {error}")
            return FoldResult(update_id, time.perf_counter() - start)

        self._of[update_id] = self._worker.submit(timed)
        self._begun.append(self._of[update_id])

    def withdraw(self, update_id: UpdateId) -> bool:
        """Return True if an addition could be cancelled before it began; it is not reported then."""
        future = self._of.get(update_id)
        if future is None or not future.cancel():
            return False
        self._begun.remove(future)
        return True

    def finished(self, wait_s: float = 0.0) -> list[FoldResult]:
        """Return the results of finished additions in their order, after waiting up to `wait_s` for the first."""
        if self._begun and wait_s:
            wait(self._begun[:1], timeout=wait_s)
        done = []
        while self._begun and self._begun[0].done():
            done.append(self._begun.pop(0).result())
        return done

    @property
    def running(self) -> bool:
        """Return True if an addition is not reported yet."""
        return bool(self._begun)

    def close(self) -> None:
        """Cancel the additions that have not begun, and wait for the running one."""
        self._worker.shutdown(wait=True, cancel_futures=True)


@dataclass
class Weights:
    """The weights of devices in means over all devices, as one round counts them.

    A device's weight is its number of examples when it was counted first. `known` holds the weights of devices of
    earlier rounds.

    Invariant: a device's weight never changes. Otherwise a mean that is updated by differences would not be the mean
    any more.
    """

    known: Mapping[str, int]
    new: dict[str, int] = field(default_factory=dict)

    def of(self, device: str, examples: int) -> int:
        """Return a device's weight: its examples when it was counted first."""
        return self.known.get(device) or self.new.get(device) or examples

    def count(self, device: str, examples: int) -> None:
        """Note that the device counts in this round."""
        self.new.setdefault(device, self.of(device, examples))

    @property
    def before(self) -> int:
        """Return the sum of the weights of earlier rounds; 0 if all devices start again."""
        return sum(self.known.values())

    @property
    def everyone(self) -> int:
        """Return the sum of all weights, including the devices that are new in this round."""
        return sum({**self.known, **self.new}.values())


COMMON = "common"  # name in `Model.state`


def moved_on(algorithm: Algorithm, travels: Layout, held: Vector | None, tally: WeightedMean, by: Weights) -> Vector:
    """Return the new mean of the vectors that all devices keep under SCAFFOLD or FedDyn; the sum is not changed.

        common' = (W common + sum of w_i q_i) / W'

    q_i is the decoded update of device i's vector. W is the weight of all devices that counted before, and W' of all
    that count now. So `common` is the mean of the sums that the devices hold themselves, over all devices that ever
    counted. Most of these may be in no round for a long time.

    If all devices start again because one was revoked, W is 0. The old mean is still sent with the model until the next
    step. But no device corrects itself by it, because no device is part of it any more.

    Under SCAFFOLD the mean follows the model, in the version's file and on the downlink. Under FedDyn it is in
    the version's state, which never leaves the aggregator.
    """
    start = followed(algorithm, travels)[0].start
    made: Vector = tally.total[start:] * np.float32(1.0 / by.everyone)
    if held is not None and by.before:
        made += held * np.float32(by.before / by.everyone)
    return made


def held(algorithm: Algorithm, travels: Layout, params: Vector, state: State) -> Vector | None:
    """Return the mean over all devices at a model version, or None before any device counted."""
    return params[travels.model_size :] if algorithm.control else state.get(COMMON)


SHARES = "shares"  # name in `Model.state`


def moved_by(tally: WeightedMean, state: State, weights: Weights) -> tuple[Vector, State]:
    """Return EF21's change over all devices, and its new sum; the memory of `tally` is donated.

    Each device's reference g_i is the sum of its decoded updates, so S = sum w_i g_i is the weighted sum of all
    updates. Then (1 / sum w_i) S is the average that the paper's server forms of its g_i, client by client. A device
    that is not in a round counts with its last g_i, as in EF21-PP (Fatkhullin et al. 2021).

    Invariant: w_i never changes after the first round that counts the device, and no update is discounted. Otherwise S
    would not be the sum of w_i g_i any more.

    No operation removes one device's part from S, because its g_i is stored only on its own disk. When a device in S is
    revoked, the next round therefore starts again for all: S and every g_i are 0, and replies to earlier assignments do
    not count. This costs the other devices as much as a first round, and keeps nothing of the revoked device.
    """
    total = tally.total
    if SHARES in state and weights.before:  # without known devices all start again from zero
        total += state[SHARES]
    return total * np.float32(tally.normaliser / tally.examples / weights.everyone), {SHARES: total}
