"""Time as training sees it: passed in, so that a script's can stand in for this machine's."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


class Clock(NamedTuple):
    """`now` in seconds from any origin, never backwards; `sleep` lets so many of them pass."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


REAL = Clock()


# How the learning rate moves over a run, step by step, whatever number of steps each round makes on a device.
#
# A run's position goes from 0 to 1: round k of n takes it from (k - 1) / n to k / n, and a device divides its part
# by its own steps. So a device that makes ten times the steps of another is at the same rate at the same time.


@dataclass(frozen=True)
class Schedule:
    """`kind` is constant, linear or cosine (Loshchilov and Hutter 2017, without restarts).

    `warmup` is the share of the run over which the factor rises from 0 to 1; over the rest it falls from 1 to `end`.
    `begin` and `until` are the positions at which this round begins and is over.

    >>> Schedule("linear", begin=0.5, until=1.0).factor(0, 1)
    0.25
    """

    kind: str = "constant"
    warmup: float = 0.0
    end: float = 0.0
    begin: float = 0.0
    until: float = 0.0

    @property
    def moves(self) -> bool:
        return self.kind != "constant" or self.warmup > 0

    def factor(self, step: int, steps: int) -> float:
        """By what the learning rate is multiplied in one step, of `steps` this round (0: not known).

        It is taken in the step's middle, so the first one of a run is not made at a rate of 0.
        """
        within = (step + 0.5) / steps if steps else 0.5
        position = min(1.0, self.begin + (self.until - self.begin) * min(1.0, within))
        if position < self.warmup:
            return position / self.warmup
        if self.kind == "constant":
            return 1.0
        gone = (position - self.warmup) / (1.0 - self.warmup)
        left = 1.0 - gone if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * gone))
        return self.end + (1.0 - self.end) * left


CONSTANT = Schedule()


# Partial work: training ends while there is still time to send what was done.
#
# What was not trained on is not counted: an example weighs by the share of the work that was done with it, and the
# normaliser is of the steps really made, so that a device that was stopped is averaged with the others as it should be.


@dataclass(frozen=True)
class Partial:
    """When training has to be over. `least` steps are made whatever it takes.

    >>> Partial(until=10.0, least=2, clock=Clock(now=lambda: 9.5)).over(steps=3, step_s=1.0)
    True
    """

    until: float  # on the clock
    least: int = 1
    clock: Clock = REAL

    def over(self, steps: int, step_s: float) -> bool:
        """Whether another step, which will take as long as the last one did, would end too late."""
        now = self.clock.now()
        return steps >= self.least and (now >= self.until or now + step_s > self.until)


def weight(examples: int, share: float) -> int:
    """The examples that weigh a change, of those here, when this share of the work was done with them.

    >>> weight(1000, 0.5), weight(3, 0.1)
    (500, 1)
    """
    return max(1, min(examples, round(examples * share)))


# By how much a device's change is divided, so that devices that did different work can be averaged (FedNova).
#
# The change of t plain SGD steps is a weighted sum of t gradients; `a` is the sum of the weights (Wang et al. 2020).
# One recurrence over the steps really done covers momentum m, FedProx's mu, and a learning rate that moves:
#
#     v = m v + 1 - mu lr A;    A += (lr_k / lr) v
#
# With m = mu = 0 it is t; with momentum alone (t - m (1 - m^t) / (1 - m)) / (1 - m). Adam's steps do not scale with the
# gradient: there a = t, which is a convention and not a law.


@dataclass
class Normaliser:
    """`lr` is the plan's; each step is counted as it is made.

    >>> counted = Normaliser(momentum=0.9); counted.step(); counted.step(); counted.a
    2.9
    """

    momentum: float = 0.0
    mu: float = 0.0
    lr: float = 1.0
    a: float = 0.0
    velocity: float = 0.0

    def step(self, lr_now: float | None = None) -> None:
        self.velocity = self.momentum * self.velocity + 1.0 - self.mu * self.lr * self.a
        self.a += (lr_now / self.lr if lr_now is not None else 1.0) * self.velocity
