"""Algorithms in which a device's gradient is corrected by what is remembered of it, on both ends.

Device i keeps own_i, the sum of all that it sent of one vector and that was not dropped. The aggregator keeps `common`,
the mean of own_i over all devices that ever counted, by their weights, which moves by the very frames that moved own_i.
So the corrections of all devices sum to what the paper says they sum to, whatever codec the frames are in. A device
that is not in the mean yet is not corrected by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from thinwire.aggregation.algorithms.feddyn import FedDyn
from thinwire.aggregation.algorithms.scaffold import Scaffold

if TYPE_CHECKING:
    from thinwire.core.layout import Layout, Segment
    from thinwire.core.plan import RunPlan
    from thinwire.core.types import Vector


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
