"""Algorithms for clients with different data: SCAFFOLD and FedDyn, which correct gradients by control variates.

Device i keeps own_i, the sum of its updates of one vector, without dropped updates. The aggregator keeps `common`, the
weighted mean of own_i over all devices that ever counted. Device and aggregator add the same decoded frames. So the
corrections of all devices sum to the paper's value, whatever codec the frames use. A device that is not in the mean yet
gets no correction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from thinwire.core.types import State, Vector

if TYPE_CHECKING:
    from thinwire.aggregation.mean import WeightedMean
    from thinwire.core.layout import Layout, Segment
    from thinwire.core.plan import RunPlan


class Algorithm(Protocol):
    """The device's correction and the server's step. Vectors are flat float32 of the model's size and are only read."""

    @property
    def has_control_variate(self) -> bool:
        """Return True if a control variate follows the model in updates and on the downlink, and own_i is its sum.

        Otherwise own_i is the sum of the model's own updates, and `common` stays on the aggregator.
        """

    @property
    def prox(self) -> float:
        """Return the weight of a proximal term in the loss, as FedProx's mu."""

    @property
    def sends_undivided(self) -> bool:
        """Return True if devices send updates that are not divided by the normaliser of their steps."""

    def shift(self, own: Vector, common: Vector | None) -> Vector:
        """Return the vector that is added to the gradient at every local step.

        `common` is None if none came, or if own_i is not in it yet.
        """

    def next_own(self, own: Vector, common: Vector | None, change: Vector) -> Vector | None:
        """Return the value of own_i after `change`, or None if own_i is the sum of the model's frames.

        `change` is divided by its normaliser; it was made with the `shift` of these two vectors.
        """

    def step(self, change: Vector, common: Vector) -> Vector:
        """Return the model's step for the round's mean change and the new `common`; `change` is donated."""


algorithms: Mapping[str, Callable[[RunPlan], Algorithm]] = {
    "scaffold": lambda plan: Scaffold(plan.local.lr),
    "feddyn": lambda plan: FedDyn(plan.run.alpha),
}


def algorithm_of(plan: RunPlan) -> Algorithm | None:
    """Return the plan's algorithm; None for fedavg, which keeps nothing and sends only the model."""
    return None if plan.run.algorithm == "fedavg" else algorithms[plan.run.algorithm](plan)


def transmitted_layout(algorithm: Algorithm | None, layout: Layout) -> Layout:
    """Return the layout of all that is sent for a model of `layout`: the model, then a control variate if any."""
    return layout.with_control if algorithm is not None and algorithm.has_control_variate else layout


def own_segments(algorithm: Algorithm, travels: Layout) -> tuple[Segment, ...]:
    """Return the segments of `travels` whose decoded frames sum to own_i."""
    return travels.control_segments if algorithm.has_control_variate else travels.segments


@dataclass(frozen=True)
class Scaffold:
    """SCAFFOLD, option II ("Stochastic controlled averaging for federated learning", Karimireddy et al. 2020).

    See `Algorithm`; own_i is c_i, `common` is c. Each local step uses g - c_i + c, so that a device whose data differ
    moves as all devices together would:

        y <- y - lr (g(y) - c_i + c);    c_i+ = c_i - c + (x - y) / (lr a)
        c <- c + sum over the round of w_i (c_i+ - c_i) / sum over all devices of w_i

    w_i is a device's weight, and "all devices" are those that ever counted (`next_common`: also one that is new). a is
    the sum of the weights with which the gradients of the local steps are in y: the number of steps without momentum
    and schedule. So c_i+ is the mean of the device's own gradients, whatever the optimizer did with them. The
    device sends c_i+ - c_i, encoded. c_i moves by the decoded difference, so that c is the mean of the vectors that the
    devices really hold. The part that the codec left out is still missing from c_i, and goes with the next difference.

    A device whose c_i is not in c yet steps by g alone, and its c_i+ is the mean of its gradients like any other's. In
    the paper it steps by g + c with c_i = 0. The paper also divides c by the number of all devices, so that devices
    never selected count as zeros. Here c is the mean of the devices that counted: g + c would be about two gradients, a
    step of twice the length. Either way the corrections of all devices, by their weights, sum to zero.

    Invariant: a change of -lr (g + shift) makes `next_own` g, whatever the shift was.

    >>> Scaffold(lr=0.5).next_own(np.float32([1]), np.float32([3]), np.float32([-2]))
    array([2.], dtype=float32)
    """

    lr: float
    has_control_variate: bool = True
    prox: float = 0.0
    sends_undivided: bool = False

    def shift(self, own: Vector, common: Vector | None) -> Vector:
        """Return c - c_i, or zeros if c_i is not in c yet."""
        return np.zeros_like(own) if common is None else common - own

    def next_own(self, own: Vector, common: Vector | None, change: Vector) -> Vector | None:
        """Return c_i+, the mean of the device's gradients."""
        made: Vector = change * np.float32(-1.0 / self.lr)
        if common is not None:
            made += own
            made -= common
        return made

    def step(self, change: Vector, common: Vector) -> Vector:
        """Return the mean change as it is."""
        del common
        return change


@dataclass(frozen=True)
class FedDyn:
    """FedDyn ("Federated learning based on dynamic regularization", algorithm 1, Acar et al. 2021).

    See `Algorithm`; own_i is -l_i / alpha, `common` is -h / alpha. Each device's loss gets a term with which all
    devices agree where the mean loss is smallest:

        y_i = argmin L_i(y) - <l_i, y> + alpha/2 |y - x|^2;    l_i <- l_i - alpha (y_i - x)
        h <- h - alpha sum over the round of w_i (y_i - x) / sum over all devices of w_i
        x <- the round's mean of y_i, minus h / alpha

    w_i is a device's weight, and "all devices" are those that ever counted (`next_common`: also one that is new). l_i
    is -alpha times the sum of device i's updates, and h is -alpha times the mean of these sums over all devices. So
    neither travels, and both move by the decoded frames of the model's own changes.

    >>> FedDyn(alpha=0.5).step(np.float32([1]), np.float32([3]))
    array([4.], dtype=float32)
    """

    alpha: float
    has_control_variate: bool = False
    sends_undivided: bool = True

    @property
    def prox(self) -> float:
        """Return the weight of the proximal term, alpha."""
        return self.alpha

    def shift(self, own: Vector, common: Vector | None) -> Vector:
        """Return -l_i, which is alpha times own_i."""
        del common
        return own * np.float32(self.alpha)

    def next_own(self, own: Vector, common: Vector | None, change: Vector) -> Vector | None:
        """Return None: own_i is the sum of the model's frames."""
        del own, common, change
        return None

    def step(self, change: Vector, common: Vector) -> Vector:
        """Return the mean change minus h / alpha."""
        change += common
        return change


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
        """Record that the device counts in this round."""
        self.new.setdefault(device, self.of(device, examples))

    @property
    def earlier_sum(self) -> int:
        """Return the sum of the weights that earlier rounds counted; 0 if all devices start again."""
        return sum(self.known.values())

    @property
    def total_sum(self) -> int:
        """Return the sum of all weights, including the devices that are new in this round."""
        return sum({**self.known, **self.new}.values())


COMMON = "common"  # name in a model's state


def next_common(
    algorithm: Algorithm, travels: Layout, common: Vector | None, tally: WeightedMean, by: Weights
) -> Vector:
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
    start = own_segments(algorithm, travels)[0].start
    made: Vector = tally.total[start:] * np.float32(1.0 / by.total_sum)
    if common is not None and by.earlier_sum:
        made += common * np.float32(by.earlier_sum / by.total_sum)
    return made


def common_at(algorithm: Algorithm, travels: Layout, params: Vector, state: State) -> Vector | None:
    """Return the mean over all devices at a model version, or None before any device counted."""
    return params[travels.model_size :] if algorithm.has_control_variate else state.get(COMMON)


SHARES = "shares"  # name in a model's state


def ef21_change(tally: WeightedMean, state: State, weights: Weights) -> tuple[Vector, State]:
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
    if SHARES in state and weights.earlier_sum:  # without known devices all start again from zero
        total += state[SHARES]
    return total * np.float32(tally.normaliser / tally.examples / weights.total_sum), {SHARES: total}
