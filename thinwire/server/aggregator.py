"""Aggregation of a round: each accepted update is added as it comes, then the server optimizer makes one step.

`RoundAggregator` holds the running sum of a round, so memory does not grow with the number of clients.
`AggregationQueue` (round_close.py) runs the additions outside the poll thread.

`WeightCaps` holds the most that one client counts for: its examples, its normaliser, and the norm of its update. The
mean of the updates is multiplied by the mean of all normalisers (FedNova, Wang et al. 2020). A client that reported a
normaliser of 10^9 would thus change the model a million times too far, in the direction of the other updates. So a
normaliser is bounded by the steps, and the weight of each client by its caps.

Invariants: updates are added in the order of the journal, one at a time. Therefore a resumed round gives the same bits.
No honest device's normaliser is above `max_normaliser` of its steps. A learning rate that a schedule lowers and the mu
of FedProx only make the normaliser smaller.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from itertools import islice
from statistics import median

import numpy as np

from thinwire.aggregation import BufferMean, WeightedMean
from thinwire.aggregation.control_variates import (
    COMMON,
    SHARES,
    Weights,
    algorithm_of,
    common_at,
    ef21_change,
    next_common,
)
from thinwire.aggregation.mean import Frames
from thinwire.aggregation.server_optimizers import apply_optimizer, server_section_at
from thinwire.compression import BoundCodec, parse
from thinwire.compression.native import planned_threads
from thinwire.compression.vector_ops import bucket_sums, in_order
from thinwire.core.errors import BadPayload, CodecError, TaskError
from thinwire.core.formatting import Capped
from thinwire.core.layout import Layout
from thinwire.core.plan import RunPlan
from thinwire.core.plan_schema import ServerSection
from thinwire.core.types import Metrics, ReplyHeader, State, Vector

NORMALISER_TOLERANCE = 1e-6  # relative: devices add up a normaliser step by step, this module has one formula
MIN_CLIENTS_FOR_MEDIAN = 3  # the median of fewer clients limits nobody


def max_normaliser(plan: RunPlan, steps: int) -> float:
    """Return the largest normaliser of so many steps at the plan's learning rate; 1 without a count of steps.

    A task's own `train()` may count no steps.

    >>> plan = RunPlan.parse('[run]\\ntask="t"\\n[local]\\nlr=1\\nmomentum=0.9')
    >>> round(max_normaliser(plan, 2), 9), max_normaliser(plan, 0)
    (2.9, 1.0)
    """
    algorithm = algorithm_of(plan)
    if not steps or (algorithm is not None and algorithm.sends_undivided):
        return 1.0
    m = plan.local.momentum if plan.local.optimizer == "sgd" else 0.0
    return float((steps - m * (1.0 - m**steps) / (1.0 - m)) / (1.0 - m))


def require_normaliser(plan: RunPlan, header: ReplyHeader, assigned: int) -> None:
    """Raise `BadPayload` for more steps than were assigned, or for a larger normaliser than the steps can have.

    `assigned` = 0 means that the plan leaves the number of steps to the device.
    """
    if assigned and header.steps > assigned:
        raise BadPayload(f"an update of {header.steps} steps", why=f"{assigned} were assigned")
    most = max_normaliser(plan, header.steps)
    if not 0 < header.a <= most * (1 + NORMALISER_TOLERANCE):
        raise BadPayload(f"an update with a = {header.a:g}", why=f"{header.steps} steps come to at most {most:g}")


@dataclass(frozen=True)
class WeightCaps:
    """Holds the most that one client counts for in a round: its examples, its normaliser and its norm.

    The medians are those of the round, from which the first two follow.
    """

    examples: float = math.inf
    a: float = math.inf
    norm: float = math.inf
    median_examples: float = 0.0
    median_a: float = 0.0

    def limited(self, header: ReplyHeader) -> ReplyHeader:
        """Return the reply's header with its examples and normaliser limited to the caps."""
        if header.examples <= self.examples and header.a <= self.a:
            return header
        return replace(header, examples=int(min(header.examples, self.examples)), a=min(header.a, self.a))

    def capped(self, header: ReplyHeader, by_examples: bool) -> Capped | None:
        """Return what a client counts less for; None if it counts in full.

        `by_examples` is True if its examples are its weight.
        """
        capped, own = Capped(), self.limited(header)
        if by_examples and own.examples < header.examples:
            capped |= {"examples": header.examples, "counted": own.examples, "median": self.median_examples}
        if own.a < header.a:
            capped |= {"a": header.a, "a_counted": own.a, "a_median": self.median_a}
        return capped or None


def caps_of(plan: RunPlan, headers: Sequence[ReplyHeader]) -> WeightCaps:
    """Return the caps of a round: `[cohort] max_weight` times the medians of its updates, from three clients on.

    If the plan counts passes, the number of steps depends on the device's own data, so its normaliser has a cap too.
    """
    most = plan.cohort.max_weight
    if most == "none" or len({header.update_id.device for header in headers}) < MIN_CLIENTS_FOR_MEDIAN:
        return WeightCaps()
    examples, a = median(header.examples for header in headers), median(header.a for header in headers)
    by_passes = plan.local.steps is None
    return WeightCaps(
        max(1, int(most * examples)), most * a if by_passes else math.inf, median_examples=examples, median_a=a
    )


def largest_norm(plan: RunPlan, norms: Sequence[float]) -> float:
    """Return the bound on the norm of an update: the plan's, or its quantile of these norms; infinity without one.

    The quantile is one of the norms, the lower of two: a value between would follow a hostile norm beside it.

    >>> plan = RunPlan.parse('[run]\\ntask="t"\\n[local]\\nlr=1\\n[server]\\nmax_norm="q0.5"')
    >>> largest_norm(plan, [1.0, 3.0, 9.0]), largest_norm(plan, [])
    (3.0, inf)
    >>> largest_norm(plan, [1.0, 2.0, 3.0, 2.0**60])
    2.0
    """
    given = plan.server.max_norm
    if not isinstance(given, str):
        return math.inf if given is None else given
    return float(np.quantile(norms, float(given.removeprefix("q")), method="lower")) if norms else math.inf


MAX_VALUE = 2.0**96  # of a model: codecs keep their invariants up to 2^100; the downlink encodes differences of two
# The largest mean of a round's updates per step. Multiplied by 2^30 steps and 2^37 rounds it is still a float32. So are
# the results of an optimizer, and the sums that EF21, SCAFFOLD and FedDyn keep over all rounds.
MAX_MEAN = 2.0**60


def max_magnitude(values: Vector) -> float:
    """Return the largest magnitude of the values; NaN if one value is NaN, 0 if there are none."""
    return float(max(values.max(), -values.min())) if values.size else 0.0


def require_values(params: Vector) -> None:
    """Raise `TaskError` if a model's values are not finite, or larger than codecs and sums can take."""
    if not (magnitude := max_magnitude(params)) <= MAX_VALUE:
        raise TaskError(
            f"the first model holds {magnitude:g}",
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


@dataclass(frozen=True)
class SumConfig:
    """Configures how the sum of a round reads and counts its updates.

    `weights`: the examples of devices that earlier rounds counted, for means over all devices. `codec_of`: the codec of
    a reply, if devices have different ones. `counters`: the integer buffers of the base model. `steps_of`: the steps
    that were assigned for a reply, 0 if the plan counts epochs. `caps`: limits on weights, if the round's other updates
    are known already. `counts_alike`: each update counts alike and as a whole, whatever its examples.
    """

    weights: Mapping[str, int] = field(default_factory=dict)
    codec_of: Callable[[ReplyHeader], str] | None = None
    counters: Mapping[str, int] = field(default_factory=dict)
    steps_of: Callable[[ReplyHeader], int] = lambda header: 0
    caps: WeightCaps = WeightCaps()
    counts_alike: bool = False


class RoundAggregator:
    """The running sum of one round, to which updates are added one at a time in the order of the journal.

    Invariant: an update is added completely or not at all.
    """

    steps_in_thread = False  # True: a step takes so long that other runs must be able to work meanwhile
    metrics: Metrics = {}  # the metrics of a masked sum, whose updates have none  # noqa: RUF012  # never changed

    def __init__(self, plan: RunPlan, layout: Layout, codec: str, config: SumConfig = SumConfig()) -> None:  # frozen
        """Start an empty sum of updates in this codec, unless `config` names another one for a reply."""
        self.plan, self.layout, self.config, self.caps = plan, layout, config, config.caps
        self.codec_of = config.codec_of or (lambda header: codec)
        self._bound: dict[str, BoundCodec] = {}
        self.norms: dict[str, float] = {}  # update id -> norm of its decoded values, in a run that bounds it
        self.algorithm = algorithm_of(plan)
        self.weights = Weights(config.weights) if plan.has_client_state else None
        self.changes = WeightedMean(parse(codec).bind(layout), layout)
        self.buffers = BufferMean(layout)

    def add(self, header: ReplyHeader, frames: Frames, discount: float) -> None:
        """Add one update to the sum; raise `BadPayload` and leave the sum as it was if that is not possible."""
        with planned_threads(self.plan.server.threads or 1):
            self._add(header, frames, discount)

    def _add(self, header: ReplyHeader, frames: Frames, discount: float) -> None:
        """Check an update completely, then add it."""
        segments = len(self.layout.segments)
        expected = [f"frame/{i}" for i in range(segments)]
        names = [part.name for part in header.parts]
        if names not in (expected, [*expected, "buffers"]):
            raise BadPayload(f"an update with the parts {', '.join(names)[:80]}", why=f"expected {segments} frames")
        if not (header.examples > 0 and header.a > 0):
            raise BadPayload(
                f"an update of {header.examples} examples with a = {header.a}", why="both must be positive"
            )
        require_normaliser(self.plan, header, self.config.steps_of(header))
        header = self.caps.limited(header)
        statistics = deque(frames(), maxlen=1).pop() if len(names) > segments else None
        if statistics is not None:
            self.buffers.check(statistics)
        self.buffers.check_counters(header.counters, self.config.counters)
        model: Frames = lambda: islice(frames(), segments)  # noqa: E731  # without the buffers
        if self.plan.server.max_norm is None:
            self._add_frames(header, model, discount)
        else:
            norm = self._norm(header, model)
            self._add_frames(header, model, discount * min(1.0, self.caps.norm / norm) if norm else discount)
            self.norms[str(header.update_id)] = norm
        if self.weights is not None:
            self.weights.count(header.update_id.device, header.examples)
        if statistics is not None:
            self.buffers.fold(statistics, discount * (1 if self.config.counts_alike else header.examples))
        self.buffers.count(header.counters)

    def _add_frames(self, header: ReplyHeader, frames: Frames, discount: float) -> None:
        """Add the frames of an update that was checked but for them."""
        self.changes.codec = self._codec(header)
        self.changes.fold(frames, *self._weighting(header, discount))

    def _norm(self, header: ReplyHeader, frames: Frames) -> float:
        """Return the norm of an update, of its decoded values."""
        codec, squares = self._codec(header), 0.0
        for segment, payload in zip(self.layout.segments, frames(), strict=False):
            squares += in_order(bucket_sums(codec.decode(payload, segment.index), 2))
        return math.sqrt(squares)

    def _weighting(self, header: ReplyHeader, discount: float) -> tuple[int, float, float]:
        """Return the examples, the discount and the normaliser a with which an update counts.

        If updates count alike, the mean of n is 1/n of the sum of discount * a * d.
        """
        if self.config.counts_alike:
            return 1, discount * header.a, 1.0
        if self.weights is not None:
            return self.weights.of(header.update_id.device, header.examples), discount, header.a
        return header.examples, discount, header.a

    def _codec(self, header: ReplyHeader) -> BoundCodec:
        """Return the codec that was assigned for this update."""
        spec = self.codec_of(header)
        if spec not in self._bound:
            self._bound[spec] = parse(spec).bind(self.layout)
        return self._bound[spec]

    def capped(self, caps: WeightCaps, headers: Iterable[ReplyHeader]) -> dict[str, Capped]:
        """Return the updates that count less under these caps.

        Some updates do not count by their examples: when all count alike, and when the device has a fixed weight
        already. In the second case its examples weigh only its statistics.
        """
        statistics = self.plan.local.buffers == "average" and self.buffers.layout.size > 0
        known = self.weights.known if self.weights is not None else {}
        lighter = self.bounded(caps)
        for header in headers:
            name, by_examples = str(header.update_id), statistics or header.update_id.device not in known
            if (capped := caps.capped(header, by_examples and not self.config.counts_alike)) is not None:
                lighter[name] = capped | lighter.get(name, Capped())
        return lighter

    def bounded(self, caps: WeightCaps) -> dict[str, Capped]:
        """Return the updates whose norm is above the bound."""
        over = {name: norm for name, norm in self.norms.items() if norm > caps.norm}
        return {name: {"norm": norm, "norm_counted": caps.norm} for name, norm in over.items()}

    @property
    def chosen(self) -> list[str]:
        """Return the ids of the updates that were chosen; none, since a mean does not choose."""
        return []

    def copy(self) -> RoundAggregator:
        """Return an independent copy of the sum."""
        made = copy(self)
        made.changes, made.buffers, made.weights = self.changes.copy(), self.buffers.copy(), deepcopy(self.weights)
        return made

    def reserve(self, updates: int) -> None:
        """Reserve disk space for so many updates; a sum needs none, since it is in memory."""

    def replaced(self, new: Callable[[], RoundAggregator]) -> RoundAggregator:
        """Return a new, empty aggregator for the same updates; this one is used up."""
        return new()

    def close(self) -> None:
        """Free what the aggregator holds outside memory: nothing, since a sum is in memory."""

    def fits(self) -> bool:
        """Return True if a model can be made of the sum so far; False if the sum is too large or has a NaN."""
        return max_magnitude(self.changes.total) <= MAX_MEAN * self.changes.examples

    def step(self, model: Model, steps_made: int = 0) -> None:
        """Move the model by the aggregated updates, of which there must be one; `model.params` is overwritten.

        `steps_made` are the steps of the run before this one, from which the server's learning rate follows. Raise
        `CodecError` if the server optimizer gives NaN.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # values beyond the largest one are clipped to it
            change, kept = self._change(model)
            assert change is not None, "a step is made of one update at least"
            self._move(model, change, kept, server_section_at(self.plan, steps_made))
        if math.isnan(magnitude := max_magnitude(model.params)):
            raise CodecError(
                f"the step of the server optimizer {self.plan.server.optimizer!r} gives NaN",
                why="the model and the mean change that it was given are finite",
                hint="a smaller [server] lr",
            )
        if magnitude > MAX_VALUE:
            np.clip(model.params, -MAX_VALUE, MAX_VALUE, out=model.params)
        if self.plan.local.buffers == "average":
            model.buffers = self.buffers.close(model.buffers)
            model.counters |= self.buffers.counters

    def _move(self, model: Model, change: Vector, kept: State, server: ServerSection) -> None:
        """Apply the server optimizer's step to the model, and keep the state over all devices."""
        own = {name: array for name, array in model.state.items() if name not in (SHARES, COMMON)}
        if self.algorithm is not None and self.algorithm.has_control_variate:
            moved, own = apply_optimizer(server, model.params[: change.size], change, own)
            model.params = np.concatenate([moved, kept.pop(COMMON)])
        else:
            model.params, own = apply_optimizer(server, model.params, change, own)
        model.state = {**own, **kept}

    def _change(self, model: Model) -> tuple[Vector | None, State]:
        """Return the change for the server optimizer, and the state of all devices; the sum is used up."""
        if self.weights is None or not self.changes.count:
            return self.changes.close(), {}
        if self.algorithm is None:
            return ef21_change(self.changes, model.state, self.weights)
        before = common_at(self.algorithm, self.layout, model.params, model.state)
        common = next_common(self.algorithm, self.layout, before, self.changes, self.weights)
        change = self.changes.close()
        assert change is not None
        return self.algorithm.step(change[: self.layout.model_size], common), {COMMON: common}
