"""The most that one client counts for in a round: its examples, its normaliser, and the norm of its update.

The mean of the updates is multiplied by the mean of all normalisers (FedNova, Wang et al. 2020). A client that reported
a normaliser of 10^9 would thus change the model a million times too far, in the direction of the other updates. So a
normaliser is bounded by the steps, and `WeightCaps` limits the weight of each client.

Invariant: no honest device's normaliser is above `largest_a` of its steps. A learning rate that a schedule lowers and
the mu of FedProx only make the normaliser smaller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from thinwire.aggregation.control_variates import algorithm_of
from thinwire.core.errors import BadPayload
from thinwire.core.formatting import Capped
from thinwire.core.plan import RunPlan
from thinwire.core.types import ReplyHeader

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


def require_a(plan: RunPlan, header: ReplyHeader, assigned: int) -> None:
    """Raise `BadPayload` for more steps than were assigned, or for a larger normaliser than the steps can have.

    `assigned` = 0 means that the plan leaves the number of steps to the device.
    """
    if assigned and header.steps > assigned:
        raise BadPayload(f"an update of {header.steps} steps", why=f"{assigned} were assigned")
    most = largest_a(plan, header.steps)
    if not 0 < header.a <= most * (1 + ROUNDING):
        raise BadPayload(f"an update with a = {header.a:g}", why=f"{header.steps} steps come to at most {most:g}")


@dataclass(frozen=True)
class WeightCaps:
    """Holds the most examples, the largest normaliser and the largest norm that one client counts for in a round, and
    the medians behind the first two.
    """

    examples: float = math.inf
    a: float = math.inf
    norm: float = math.inf
    median_examples: float = 0.0
    median_a: float = 0.0

    def counted(self, header: ReplyHeader) -> ReplyHeader:
        """Return the reply's header with its examples and normaliser limited to the caps."""
        if header.examples <= self.examples and header.a <= self.a:
            return header
        return replace(header, examples=int(min(header.examples, self.examples)), a=min(header.a, self.a))

    def capped(self, header: ReplyHeader, by_examples: bool) -> Capped | None:
        """Return what a client counts less for; None if it counts in full. `by_examples`: True if its examples are its
        weight.
        """
        found, own = Capped(), self.counted(header)
        if by_examples and own.examples < header.examples:
            found |= {"examples": header.examples, "counted": own.examples, "median": self.median_examples}
        if own.a < header.a:
            found |= {"a": header.a, "a_counted": own.a, "a_median": self.median_a}
        return found or None


def caps_of(plan: RunPlan, headers: Sequence[ReplyHeader]) -> WeightCaps:
    """Return the caps of a round: `[cohort] max_weight` times the medians of its updates, from three clients on.

    If the plan counts passes, the number of steps depends on the device's own data, so its normaliser has a cap too.
    """
    most = plan.cohort.max_weight
    if most == "none" or len({header.update_id.device for header in headers}) < FEWEST:
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
