"""Learning rate schedule, time budget and FedNova normalizer of local training, and the clock that they use.

The learning rate depends on the position in the run, from 0 to 1, whatever number of steps each round makes on a
device. Round k of n takes the position from (k - 1) / n to k / n, and a device divides its part by its own steps. So
two devices of different speed have the same rate at the same time.

With partial work, training ends while there is still time to send the update. An example then weighs by the share of
the work that was done with it, and the normalizer counts only the steps made. The share keeps one noisy step from
counting as twenty, so the model leans to the data of devices that finish. FedNova's own weights (Wang et al. 2020) are
the data alone; `steps = "auto"` has those.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


class Clock(NamedTuple):
    """Time as training sees it, passed in so that tests can replace this machine's clock.

    `now` returns seconds from any origin and never goes backwards; `sleep` waits for so many seconds.
    """

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


REAL = Clock()


@dataclass(frozen=True)
class Schedule:
    """A learning rate schedule: `kind` is constant, linear or cosine (Loshchilov and Hutter 2017, without restarts).

    `warmup` is the share of the run over which the factor rises from 0 to 1; over the rest it falls from 1 to `end`.
    `begin` and `until` are the positions in the run at which this round begins and ends.

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
        """Return True if the learning rate changes during the run."""
        return self.kind != "constant" or self.warmup > 0

    def factor(self, step: int, steps: int) -> float:
        """Return the factor of the learning rate at one step, of `steps` in this round (0: unknown).

        It is computed for the middle of the step, so the first step of a run does not have a rate of 0.
        """
        return self.at(min(1.0, (step + 0.5) / steps) if steps else 0.5)

    def at(self, within: float) -> float:
        """Return the factor of the learning rate at a position within this round's training, from 0 to 1."""
        position = min(1.0, self.begin + (self.until - self.begin) * within)
        if position < self.warmup:
            return position / self.warmup
        if self.kind == "constant":
            return 1.0
        gone = (position - self.warmup) / (1.0 - self.warmup)
        left = 1.0 - gone if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * gone))
        return self.end + (1.0 - self.end) * left


CONSTANT = Schedule()


@dataclass(frozen=True)
class TimeBudget:
    """A time budget: the time at which training must end. At least `least` steps are made in any case.

    >>> TimeBudget(until=10.0, least=2, clock=Clock(now=lambda: 9.5)).over(steps=3, step_s=1.0)
    True
    """

    until: float  # seconds on `clock`
    least: int = 1
    clock: Clock = REAL

    def over(self, steps: int, step_s: float) -> bool:
        """Return True if another step would end too late, assuming that it takes as long as the last one."""
        now = self.clock.now()
        return steps >= self.least and (now >= self.until or now + step_s > self.until)


def weight(examples: int, share: float) -> int:
    """Return the number of examples by which an update is weighted; `share` is the share of the work that was done.

    >>> weight(1000, 0.5), weight(3, 0.1)
    (500, 1)
    """
    return max(1, min(examples, round(examples * share)))


@dataclass
class Normaliser:
    """The FedNova normalizer `a`: updates of devices that did different work are divided by it before averaging.

    A raw update of t plain SGD steps is a weighted sum of t gradients; `a` is the sum of the weights. One recurrence
    over the steps made covers momentum m, FedProx's mu, and a learning rate that changes:

        v = m v + 1 - mu lr A;    A += (lr_k / lr) v

    With m = mu = 0 it is t; with momentum alone (t - m (1 - m^t) / (1 - m)) / (1 - m). Adam's steps do not scale with
    the gradient: for Adam a = t, which is a convention and not a law. `lr` is the plan's learning rate.

    Wang et al. 2020, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization".

    >>> counted = Normaliser(momentum=0.9); counted.step(); counted.step(); counted.a
    2.9
    """

    momentum: float = 0.0
    mu: float = 0.0
    lr: float = 1.0
    a: float = 0.0
    velocity: float = 0.0

    def step(self, lr_now: float | None = None) -> None:
        """Count one step, made at the learning rate `lr_now` (None: the plan's)."""
        self.velocity = self.momentum * self.velocity + 1.0 - self.mu * self.lr * self.a
        self.a += (lr_now / self.lr if lr_now is not None else 1.0) * self.velocity
