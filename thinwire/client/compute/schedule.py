"""How the learning rate moves over a run, step by step, whatever number of steps each round makes on a device.

A run's position goes from 0 to 1: round k of n takes it from (k - 1) / n to k / n, and a device divides its part
by its own steps. So a device that makes ten times the steps of another is at the same rate at the same time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


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
