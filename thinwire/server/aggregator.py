"""From accepted updates to the next model: fold each as it comes, then step once."""

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
from thinwire.core.types import Arrived, ReplyHead, State, UpdateId, Vector
from thinwire.server.policy.local_work import Caps, require_a

if TYPE_CHECKING:
    from thinwire.aggregation.control_variates import Algorithm


Frames = Callable[[], Iterator[Arrived]]
MAX_VALUE = 2.0**96  # of a model: codecs keep their laws up to 2^100, and the downlink encodes differences of two
# Of what a round's updates come to on average, a step's worth each: times 2^30 steps and 2^37 rounds it is a float32,
# and so are what an optimizer makes of its sum and what ef21, SCAFFOLD and FedDyn remember of all rounds.
MAX_MEAN = 2.0**60


def largest(values: Vector) -> float:
    """The largest magnitude; NaN where one value is."""
    return float(max(values.max(), -values.min())) if values.size else 0.0


def require_values(params: Vector) -> None:
    """`TaskError` where a model's values are not finite, or larger than what codecs and sums can take."""
    if not (found := largest(params)) <= MAX_VALUE:
        raise TaskError(
            f"the first model holds {found:g}",
            why=f"its values are finite and at most {MAX_VALUE:g}",
            hint="look at the task's model(), or at the file of [run] init",
        )


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


class RoundAggregator:
    """One round's tally: takes updates in the journal's order, one at a time, each wholly or not at all."""

    def __init__(
        self,
        plan: RunPlan,
        layout: Layout,
        codec: str,
        weights: Mapping[str, int] | None = None,
        codec_of: Callable[[ReplyHead], str] | None = None,
        counters: Mapping[str, int] | None = None,
        steps_of: Callable[[ReplyHead], int] | None = None,
        caps: Caps | None = None,
    ) -> None:
        """`counters`: the integer buffers of the model that is stepped from; `steps_of`: what a reply's device was
        assigned, 0 where the plan leaves that to it; `caps`: where the round's other updates are known.
        """
        self.plan, self.layout, self.before = plan, layout, counters or {}
        self.steps_of, self.caps = steps_of or (lambda head: 0), caps or Caps()
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

    def capped(self, caps: Caps, heads: Iterable[ReplyHead]) -> dict[str, Capped]:
        """Which of these updates count less under the caps. The examples of one whose device has a weight already, or
        in a buffer, where each change counts alike, weigh its statistics alone.
        """
        statistics = self.plan.local.buffers == "average" and self.buffers.layout.size > 0
        buffered, known = self.plan.cohort.mode == "buffered", self.weights.known if self.weights is not None else {}
        found = {
            str(head.update_id): caps.capped(head, statistics or not (buffered or head.update_id.device in known))
            for head in heads
        }
        return {update_id: one for update_id, one in found.items() if one is not None}

    def copy(self) -> RoundAggregator:
        """The same tally, which goes on by itself."""
        made = copy(self)
        made.changes, made.buffers, made.weights = self.changes.copy(), self.buffers.copy(), deepcopy(self.weights)
        return made

    def fits(self) -> bool:
        """Whether a model can be made of the sum so far; NaN is no sum."""
        return largest(self.changes.total) <= MAX_MEAN * self.changes.examples

    def step(self, model: Model) -> None:
        """Move the model by what was folded, of which one can be made; `model.params` is overwritten."""
        with np.errstate(over="ignore", invalid="ignore"):  # what is beyond the largest value is cut there
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
        own = {name: array for name, array in model.state.items() if name not in (SHARES, COMMON)}
        if self.algorithm is not None and self.algorithm.control:
            moved, own = stepped(self.plan.server, model.params[: change.size], change, own)
            model.params = np.concatenate([moved, kept.pop(COMMON)])
        else:
            model.params, own = stepped(self.plan.server, model.params, change, own)
        model.state = {**own, **kept}

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


# Folding off the poll thread: one worker, first in first out, so that the order of folding is the journal's.


T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """One update's fold: done in `seconds`, or refused with the reason."""

    update_id: UpdateId
    seconds: float
    refused: str = ""


class AtOnce(Executor):
    """Work is done when it is given."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Folds:
    """Folds that were begun and are not yet reported.

    A BadPayload refuses its update; anything else is our own defect and is raised where the driver looks. `at_once`:
    where nothing waits meanwhile a thread costs more than a small fold.
    """

    def __init__(self, at_once: bool = False) -> None:
        self._worker = AtOnce() if at_once else ThreadPoolExecutor(max_workers=1, thread_name_prefix="fold")
        self._begun: list[Future[Outcome]] = []
        self._of: dict[UpdateId, Future[Outcome]] = {}

    def begin(self, update_id: UpdateId, fold: Callable[[], None]) -> None:
        def timed() -> Outcome:
            start = time.perf_counter()
            try:
                fold()
            except BadPayload as error:
                return Outcome(update_id, time.perf_counter() - start, refused=f"bad-payload: {error}")
            return Outcome(update_id, time.perf_counter() - start)

        self._of[update_id] = self._worker.submit(timed)
        self._begun.append(self._of[update_id])

    def withdraw(self, update_id: UpdateId) -> bool:
        """Whether a fold that was begun here could still be kept from happening; it is not reported then."""
        future = self._of.get(update_id)
        if future is None or not future.cancel():
            return False
        self._begun.remove(future)
        return True

    def finished(self, wait_s: float = 0.0) -> list[Outcome]:
        """The folds that ended, in their order; waits up to `wait_s` for the first of them."""
        if self._begun and wait_s:
            wait(self._begun[:1], timeout=wait_s)
        done = []
        while self._begun and self._begun[0].done():
            done.append(self._begun.pop(0).result())
        return done

    @property
    def running(self) -> bool:
        return bool(self._begun)

    def close(self) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)


# A device's weight in means over all devices: its number of examples when first counted, fixed from then on.
#
# Law: a device's weight never changes, else a mean that is moved on by differences would not be the mean any more.


@dataclass
class Weights:
    """The devices' weights as one round counts them. `known` are the weights of devices of earlier rounds."""

    known: Mapping[str, int]
    new: dict[str, int] = field(default_factory=dict)

    def of(self, device: str, examples: int) -> int:
        """A device's weight: its examples when it was counted first."""
        return self.known.get(device) or self.new.get(device) or examples

    def count(self, device: str, examples: int) -> None:
        self.new.setdefault(device, self.of(device, examples))

    @property
    def before(self) -> int:
        """All devices of earlier rounds; 0 where all begin anew."""
        return sum(self.known.values())

    @property
    def everyone(self) -> int:
        return sum({**self.known, **self.new}.values())


# The mean of what all devices keep under SCAFFOLD or FedDyn, moved on by each round's frames.
#
#     common' = (W common + sum of w_i q_i) / W'
#
# q_i is what device i's update decodes to, of the vector that it keeps the sum of; W and W' are the weights of all
# devices that had counted before and that have now. So `common` is the mean of the sums that the devices hold
# themselves, over all that ever counted, of whom most may be in no round for long. Where all begin anew (one was shut
# out) W is 0: the mean before that still goes out with the model until the next step, but no device corrects itself by
# it, since none is in it any more.
#
# Under SCAFFOLD it stands behind the model, in the version's file and on its way to the devices; under FedDyn in the
# version's state, which never leaves the aggregator.


COMMON = "common"  # in the run's state


def moved_on(algorithm: Algorithm, travels: Layout, held: Vector | None, tally: WeightedMean, by: Weights) -> Vector:
    """The new mean; of the tally nothing is changed."""
    start = followed(algorithm, travels)[0].start
    made: Vector = tally.total[start:] * np.float32(1.0 / by.everyone)
    if held is not None and by.before:
        made += held * np.float32(by.before / by.everyone)
    return made


def held(algorithm: Algorithm, travels: Layout, params: Vector, state: State) -> Vector | None:
    """The mean as it was at a version; None before any device counted."""
    return params[travels.model_size :] if algorithm.control else state.get(COMMON)


# What devices have sent so far, under ef21: one sum for all of them, which each round moves on.
#
# Each device's reference g_i is the sum of what was decoded of its updates, so S = sum w_i g_i is the sum of all
# updates with the device's weight, and (1 / sum w_i) S what the paper's server averages from its g_i, client by
# client. A device that is not in a round counts with its last g_i, as in EF21-PP (Fatkhullin et al. 2021). Law: w_i
# is what it was in the first round that counted the device, and no update is discounted, else S would not be the sum
# of w_i g_i any more.
#
# One device's part cannot be taken out of S: its g_i stands nowhere but on its own disk. So when a device that is in
# S was shut out, the next round begins anew for all: S and every g_i are 0 again, and what was asked for before does
# not count. That costs the other devices what a first round costs, and keeps none of the one that was shut out.


SHARES = "shares"  # in the run's state


def moved_by(tally: WeightedMean, state: State, weights: Weights) -> tuple[Vector, State]:
    """(the change of all devices that ever sent, the new sum); the tally's own memory is given away."""
    total = tally.total
    if SHARES in state and weights.before:  # nobody known: all begin anew
        total += state[SHARES]
    return total * np.float32(tally.normaliser / tally.examples / weights.everyone), {SHARES: total}
