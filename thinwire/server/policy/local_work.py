"""Decides how much each device trains, and limits how much one client counts.

With `[local] steps = "auto"`, a device's speed decides its local steps and their examples. An update is divided by the
normaliser of its own steps, so that few steps and many can be averaged (FedNova, Wang et al. 2020). So a small device
takes part with few steps, and no other device waits for it.

The mean of the updates is then multiplied by the mean of all normalisers (FedNova). A client that reported 10^9 would
thus change the model a million times too far, in the direction of the other updates. So a normaliser is bounded by the
steps, and `WeightCaps` limits the weight of each client.

Invariant: no honest device's normaliser is above `largest_a` of its steps. A learning rate that a schedule lowers and
the mu of FedProx only make the normaliser smaller.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from thinwire.aggregation.control_variates import algorithm_of
from thinwire.core.errors import BadPayload
from thinwire.core.events import Capped, ClientAsked, UpdateAccepted
from thinwire.core.formatting import p90
from thinwire.core.plan import RunPlan
from thinwire.core.plan_schema import LocalSection
from thinwire.core.types import ReplyHeader, Work

KEPT = 16  # last replies, and last assignments, of a device
FIRST_STEPS = 8  # while a device's speed is unknown
SHARE = 0.9  # of the deadline: the rest is a reserve
HALVINGS = 3  # of the batch, if even the fewest steps would take too long
LEAST_BATCH = 2  # a normalization layer needs two examples


@dataclass(frozen=True)
class DeviceSpeed:
    """Holds the speed of one device at this run's work: the p90 of its last replies."""

    example_s: float  # seconds of a step for each example of its batch
    rest_s: float  # seconds of all else: download, waiting, evaluation, encoding, upload
    examples: int  # training examples, as far as the device has reported them


@dataclass(frozen=True)
class LocalWork:
    """Holds the work of one device, and the reason for it."""

    steps: int
    batch: int
    why: str


def given(local: LocalSection, pace: DeviceSpeed | None, deadline_s: float) -> LocalWork:
    """Return the steps and batch whose p90 fits the deadline: at least `min_steps`, at most one pass over the device's
    data.

    >>> local = LocalSection(lr=1, steps="auto", batch=10)
    >>> given(local, DeviceSpeed(example_s=0.1, rest_s=4.0, examples=1000), 60.0)
    LocalWork(steps=50, batch=10, why='50 of the 100 steps of a pass fit into 50.0 s, at 1.00 s each')
    """
    if pace is None:
        steps = max(FIRST_STEPS, local.min_steps)
        return LocalWork(steps, local.batch, f"{steps} steps, since nothing is known of its speed yet")
    left_s = SHARE * deadline_s - pace.rest_s
    for halvings in range(HALVINGS + 1):
        batch = max(min(LEAST_BATCH, local.batch), local.batch >> halvings)
        step_s = pace.example_s * batch
        whole = max(local.min_steps, math.ceil(pace.examples / (batch * local.accumulate)))
        fit = whole if step_s * whole <= left_s else math.floor(max(0.0, left_s) / step_s) if step_s else 0
        if fit >= local.min_steps:
            return LocalWork(fit, batch, _said(fit, whole, left_s, step_s, batch, local.batch))
    late = f"even {local.min_steps} steps of {batch} examples take longer than the {max(0.0, left_s):.1f} s that it has"
    return LocalWork(local.min_steps, batch, late)


def _said(fit: int, whole: int, left_s: float, step_s: float, batch: int, planned: int) -> str:
    smaller = f" (of {batch} examples)" if batch != planned else ""
    if fit == whole:
        return f"a whole pass, {whole} steps{smaller}, fits into {left_s:.1f} s"
    return f"{fit} of the {whole} steps{smaller} of a pass fit into {left_s:.1f} s, at {step_s:.2f} s each"


@dataclass(frozen=True)
class SpeedSample:
    """Holds the speed that one reply shows."""

    example_s: float
    rest_s: float
    examples: int


@dataclass
class DeviceSpeeds:
    """Holds the speed of each device in this run, rebuilt from its journal, so that a resumed run knows the same."""

    _given: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)  # device -> id -> (steps, batch)
    _seen: dict[str, deque[SpeedSample]] = field(default_factory=dict)

    def asked(self, event: ClientAsked) -> None:
        """Record the steps and batch of an assignment that has its own."""
        if event.steps:
            given = self._given.setdefault(event.device, {})
            given[event.ask_id] = event.steps, event.batch
            if len(given) > KEPT:
                del given[next(iter(given))]

    def work(self, device: str, ask_id: str) -> tuple[int, int] | None:
        """Return (steps, batch) of an assignment that has its own; None if it has none, or is too old."""
        return self._given.get(device, {}).get(ask_id)

    def answered(self, event: UpdateAccepted) -> None:
        """Record the speed that a reply shows. A reply whose work or times are unknown changes nothing."""
        asked, seen = self.work(event.device, event.ask_id), _durations(event.head)
        if asked is None or seen is None:
            return
        (_, batch), (steps, train_s, rest_s) = asked, seen
        known = self._seen.setdefault(event.device, deque(maxlen=KEPT))
        known.append(SpeedSample(train_s / (steps * batch), rest_s, int(event.head.get("examples", 0))))

    def of(self, device: str) -> DeviceSpeed | None:
        """Return the speed of a device; None before its first reply that shows it."""
        seen = self._seen.get(device)
        return None if not seen else _pace(seen)


def _pace(seen: Iterable[SpeedSample]) -> DeviceSpeed:
    all_seen = list(seen)
    # A device whose training was stopped early reports fewer examples than it has.
    examples = max(one.examples for one in all_seen)
    return DeviceSpeed(p90(one.example_s for one in all_seen), p90(one.rest_s for one in all_seen), examples)


def _durations(head: Mapping[str, object]) -> tuple[int, float, float] | None:
    """Return (steps, seconds of training, seconds of all else), each a duration by one clock; None if they were not
    measured.
    """
    timings, transfer, steps = head.get("timings"), head.get("transfer"), head.get("steps")
    if not isinstance(timings, Mapping) or not isinstance(transfer, Mapping) or not isinstance(steps, int) or not steps:
        return None
    train_s = float(timings.get("train_s", 0.0))
    out_s = float(transfer["arrived_at"]) - float(transfer["pulled_at"])
    return steps, train_s, max(0.0, out_s - train_s)


def work_of(plan: RunPlan, devices: int, own: tuple[int, int] | None = None) -> Work:
    """Return the work of a device in a round of `devices` clients; `own` are its own steps and batch, if it has any.

    dgc clips where a gradient is accumulated, on each device for itself (Lin et al. 2018, "Deep gradient compression").
    N gradients add up to an L2 norm of about the threshold if each is clipped to N^(-1/2) times the threshold. The
    reason is that the norm of a sum of independent gradients grows as the root of N.

    >>> plan = RunPlan.parse('[run]\\ntask="t"\\n[local]\\nlr=1\\nclip_grad=2\\nsteps=1\\n[uplink]\\ncodec="dgc(0.1)"')
    >>> work_of(plan, 16)
    Work(steps=1, batch=32, clip=0.5)
    """
    local = plan.local
    clip = local.clip_grad / math.sqrt(devices) if plan.uplink.dgc and local.clip_grad and devices else 0.0
    steps, batch = own or (local.steps if isinstance(local.steps, int) else 0, local.batch)
    return Work(steps, batch, clip)


ROUNDING = 1e-6  # devices add up a normaliser step by step, here it is one formula
FEWEST = 3  # clients from which on a median is meaningful


def largest_a(plan: RunPlan, steps: int) -> float:
    """Return the largest normaliser of so many steps at the plan's learning rate; 1 if a task's own `train()` counts no
    steps.

    >>> plan = RunPlan.parse('[run]\\ntask="t"\\n[local]\\nlr=1\\nmomentum=0.9')
    >>> round(largest_a(plan, 2), 9), largest_a(plan, 0)
    (2.9, 1.0)
    """
    algorithm = algorithm_of(plan)
    if not steps or (algorithm is not None and algorithm.whole):
        return 1.0
    m = plan.local.momentum if plan.local.optimizer == "sgd" else 0.0
    return float((steps - m * (1.0 - m**steps) / (1.0 - m)) / (1.0 - m))


def require_a(plan: RunPlan, head: ReplyHeader, assigned: int) -> None:
    """Raise `BadPayload` for more steps than were assigned, or for a larger normaliser than the steps can have.

    `assigned` = 0 means that the plan leaves the number of steps to the device.
    """
    if assigned and head.steps > assigned:
        raise BadPayload(f"an update of {head.steps} steps", why=f"{assigned} were assigned")
    most = largest_a(plan, head.steps)
    if not 0 < head.a <= most * (1 + ROUNDING):
        raise BadPayload(f"an update with a = {head.a:g}", why=f"{head.steps} steps come to at most {most:g}")


@dataclass(frozen=True)
class WeightCaps:
    """Holds the most examples and the largest normaliser that one client counts for in a round, and the medians behind
    them.
    """

    examples: float = math.inf
    a: float = math.inf
    median_examples: float = 0.0
    median_a: float = 0.0

    def counted(self, head: ReplyHeader) -> ReplyHeader:
        """Return the reply's header with its examples and normaliser limited to the caps."""
        return replace(head, examples=int(min(head.examples, self.examples)), a=min(head.a, self.a))

    def capped(self, head: ReplyHeader, by_examples: bool) -> Capped | None:
        """Return what a client counts less for; None if it counts in full. `by_examples`: True if its examples are its
        weight.
        """
        found, own = Capped(), self.counted(head)
        if by_examples and own.examples < head.examples:
            found |= {"examples": head.examples, "counted": own.examples, "median": self.median_examples}
        if own.a < head.a:
            found |= {"a": head.a, "a_counted": own.a, "a_median": self.median_a}
        return found or None


def caps_of(plan: RunPlan, heads: Sequence[ReplyHeader]) -> WeightCaps:
    """Return the caps of a round: `[cohort] max_weight` times the medians of its updates, from three clients on.

    If the plan counts passes, the number of steps depends on the device's own data, so its normaliser has a cap too.
    """
    most = plan.cohort.max_weight
    if most == "none" or len({head.update_id.device for head in heads}) < FEWEST:
        return WeightCaps()
    examples, a = median(head.examples for head in heads), median(head.a for head in heads)
    by_passes = plan.local.steps is None
    return WeightCaps(max(1, int(most * examples)), most * a if by_passes else math.inf, examples, a)
