"""Server optimizers: from the mean change of a round to the next model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from thinwire.aggregation.codec import blocks
from thinwire.core.registry import Registry
from thinwire.core.types import State, Vector


class ServerOptimizer(Protocol):
    """`params`, `change` and `state` are donated: they may be overwritten."""

    def step(self, params: Vector, change: Vector, state: State) -> tuple[Vector, State]: ...


@dataclass(frozen=True)
class FedAvg:
    """x' = x + lr * change (McMahan et al. 2017); lr = 1 is plain averaging.

    >>> FedAvg(lr=0.5).step(np.float32([1, 2]), np.float32([2, 2]), {})[0]
    array([2., 3.], dtype=float32)
    """

    lr: float = 1.0

    def step(self, params: Vector, change: Vector, state: State) -> tuple[Vector, State]:
        rate = np.float32(self.lr)
        for start, stop in blocks(params.size):
            params[start:stop] += rate * change[start:stop]
        return params, state


optimizers: Registry[type[FedAvg]] = Registry("server optimizer", group="thinwire.optimizers")
optimizers.add("fedavg", FedAvg)
