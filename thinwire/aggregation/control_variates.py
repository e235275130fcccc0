"""What is done about devices whose data differ: SCAFFOLD and FedDyn, a short file each over one protocol."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from thinwire.core.types import Vector

if TYPE_CHECKING:
    from thinwire.core.layout import Layout, Segment
    from thinwire.core.plan import RunPlan

__all__ = [
    "Algorithm",
    "algorithm_of",
    "algorithms",
    "carried",
    "followed",
]


# Algorithms in which a device's gradient is corrected by what is remembered of it, on both ends.
#
# Device i keeps own_i, the sum of all that it sent of one vector and that was not dropped. The aggregator keeps
# `common`, the mean of own_i over all devices that ever counted, by their weights, which moves by the very frames
# that moved own_i. So the corrections of all devices sum to what the paper says they sum to, whatever codec the
# frames are in. A device that is not in the mean yet is not corrected by it.


class Algorithm(Protocol):
    """The device's step and the server's. Vectors are flat float32 of the model's size and are only read.

    `control`: own_i is of a vector that travels behind the model, both ways; else of the model's own frames, and
    `common` stays with the aggregator (devices are given none). `prox` is added to the loss as FedProx's mu is.
    `whole`: changes are sent and averaged as they are, not divided by the steps that they took.
    """

    @property
    def control(self) -> bool: ...
    @property
    def prox(self) -> float: ...
    @property
    def whole(self) -> bool: ...

    def shift(self, own: Vector, common: Vector | None) -> Vector:
        """What is added to the gradient at every local step. `common` None: none came, or own_i is not in it yet."""

    def wanted(self, own: Vector, common: Vector | None, change: Vector) -> Vector | None:
        """What own_i shall become after a change (divided by its normaliser) that was made with the shift of these two;
        None: it follows the model's frames.
        """

    def step(self, change: Vector, common: Vector) -> Vector:
        """What the model moves by, of the round's mean change and the new `common`; `change` is donated."""


algorithms: Mapping[str, Callable[[RunPlan], Algorithm]] = {
    "scaffold": lambda plan: Scaffold(plan.local.lr),
    "feddyn": lambda plan: FedDyn(plan.run.alpha),
}


def algorithm_of(plan: RunPlan) -> Algorithm | None:
    """The plan's; None for fedavg, with which nothing is remembered and nothing travels but the model."""
    return None if plan.run.algorithm == "fedavg" else algorithms[plan.run.algorithm](plan)


def carried(algorithm: Algorithm | None, layout: Layout) -> Layout:
    """The layout of what travels for a model of `layout`."""
    return layout.with_control if algorithm is not None and algorithm.control else layout


def followed(algorithm: Algorithm, travels: Layout) -> tuple[Segment, ...]:
    """The segments of what travels whose frames own_i is the sum of."""
    return travels.control_segments if algorithm.control else travels.segments


# SCAFFOLD, option II (Karimireddy et al. 2020, "Stochastic controlled averaging for federated learning").
#
# Each local step goes by  g - c_i + c,  so that a device whose data differ walks where all of them would:
#
#     y <- y - lr (g(y) - c_i + c);    c_i+ = c_i - c + (x - y) / (lr a);    c <- c + mean of (c_i+ - c_i)
#
# a is the sum of the weights with which the gradients of the local steps are in y (the number of steps, where there
# is no momentum and no schedule), so c_i+ is the mean of the device's own gradients whatever the optimizer did with
# them. What travels is c_i+ - c_i, in a codec; c_i moves by what it decodes to, so that c is the mean of what the
# devices really hold. What the codec left out is still missing from c_i, and is part of the next difference.
#
# A device whose c_i is not in c yet goes by g alone, and its c_i+ is the mean of its gradients like any other's. In
# the paper it goes by g + c with c_i = 0, and c is divided by the number of all devices, so that those never asked
# are in it as zeros. Here c is the mean of those that counted: g + c would be about two gradients, a step of twice
# the length. Either way the corrections of all devices, by their weights, sum to zero.


@dataclass(frozen=True)
class Scaffold:
    """See `Algorithm`; own_i is c_i, `common` is c.

    Law: a change of -lr (g + shift) makes `wanted` g, whatever the shift was.

    >>> Scaffold(lr=0.5).wanted(np.float32([1]), np.float32([3]), np.float32([-2]))
    array([2.], dtype=float32)
    """

    lr: float
    control: bool = True
    prox: float = 0.0
    whole: bool = False

    def shift(self, own: Vector, common: Vector | None) -> Vector:
        return np.zeros_like(own) if common is None else common - own

    def wanted(self, own: Vector, common: Vector | None, change: Vector) -> Vector | None:
        made: Vector = change * np.float32(-1.0 / self.lr)
        if common is not None:
            made += own
            made -= common
        return made

    def step(self, change: Vector, common: Vector) -> Vector:
        del common
        return change


# FedDyn (Acar et al. 2021, "Federated learning based on dynamic regularization", algorithm 1).
#
# Each device's loss gets a term by which all of them agree where the mean loss is least:
#
#     y_i = argmin L_i(y) - <l_i, y> + alpha/2 |y - x|^2;    l_i <- l_i - alpha (y_i - x)
#     h <- h - alpha mean of (y_i - x);                      x <- mean of y_i - h / alpha
#
# l_i is -alpha times the sum of what device i sent, and h is -alpha times the mean of these sums over all devices: so
# neither travels, and both move by the decoded frames of the model's own changes.


@dataclass(frozen=True)
class FedDyn:
    """See `Algorithm`; own_i is -l_i / alpha, `common` is -h / alpha.

    >>> FedDyn(alpha=0.5).step(np.float32([1]), np.float32([3]))
    array([4.], dtype=float32)
    """

    alpha: float
    control: bool = False
    whole: bool = True

    @property
    def prox(self) -> float:
        return self.alpha

    def shift(self, own: Vector, common: Vector | None) -> Vector:
        del common
        return own * np.float32(self.alpha)

    def wanted(self, own: Vector, common: Vector | None, change: Vector) -> Vector | None:
        del own, common, change
        return None

    def step(self, change: Vector, common: Vector) -> Vector:
        change += common
        return change
