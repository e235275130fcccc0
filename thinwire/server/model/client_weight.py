"""How much one client counts in a round: the largest normaliser that it can honestly have, and the cap on its weight.

A change is divided by its normaliser, and their mean is multiplied by that of all normalisers (FedNova): who says 10^9
would move the model by the others' changes a million times over. Law: no honest device's normaliser is above
`largest_a` of the steps that it made. A learning rate that a schedule lowers and FedProx's mu only make it smaller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from thinwire.aggregation.algorithms import algorithm_of
from thinwire.core.errors import BadPayload
from thinwire.core.events import Capped
from thinwire.core.plan import RunPlan
from thinwire.core.types import ReplyHead

ROUNDING = 1e-6  # a normaliser is a sum over the steps, here it is one formula
FEWEST = 3  # clients of which there is a typical one


def largest_a(plan: RunPlan, steps: int) -> float:
    """The normaliser of so many steps at the plan's learning rate; 1 where a task's own `train()` counts none.

    >>> plan = RunPlan.parse('[run]\\ntask="t"\\n[local]\\nlr=1\\nmomentum=0.9')
    >>> round(largest_a(plan, 2), 9), largest_a(plan, 0)
    (2.9, 1.0)
    """
    algorithm = algorithm_of(plan)
    if not steps or (algorithm is not None and algorithm.whole):
        return 1.0
    m = plan.local.momentum if plan.local.optimizer == "sgd" else 0.0
    return float((steps - m * (1.0 - m**steps) / (1.0 - m)) / (1.0 - m))


def require_a(plan: RunPlan, head: ReplyHead, assigned: int) -> None:
    """BadPayload for more steps than were assigned (0: the plan leaves them to the device), or a larger normaliser
    than they can have.
    """
    if assigned and head.steps > assigned:
        raise BadPayload(f"an update of {head.steps} steps", why=f"{assigned} were assigned")
    most = largest_a(plan, head.steps)
    if not 0 < head.a <= most * (1 + ROUNDING):
        raise BadPayload(f"an update with a = {head.a:g}", why=f"{head.steps} steps come to at most {most:g}")


@dataclass(frozen=True)
class Caps:
    """The most that one client counts in a round; the medians that it follows from."""

    examples: float = math.inf
    a: float = math.inf
    median_examples: float = 0.0
    median_a: float = 0.0

    def counted(self, head: ReplyHead) -> ReplyHead:
        """The head as it counts."""
        return replace(head, examples=int(min(head.examples, self.examples)), a=min(head.a, self.a))

    def capped(self, head: ReplyHead, by_examples: bool) -> Capped | None:
        """What a client counts less for; None where nothing. `by_examples`: whether its examples are its weight."""
        found, own = Capped(), self.counted(head)
        if by_examples and own.examples < head.examples:
            found |= {"examples": head.examples, "counted": own.examples, "median": self.median_examples}
        if own.a < head.a:
            found |= {"a": head.a, "a_counted": own.a, "a_median": self.median_a}
        return found or None


def caps_of(plan: RunPlan, heads: Sequence[ReplyHead]) -> Caps:
    """The caps of a round of these updates: `[cohort] max_weight` times their medians, from three clients on.

    Where the plan counts passes, a device's own data say how many steps these are: then the normaliser is capped too.
    """
    most = plan.cohort.max_weight
    if most == "none" or len({head.update_id.device for head in heads}) < FEWEST:
        return Caps()
    examples, a = median(head.examples for head in heads), median(head.a for head in heads)
    by_passes = plan.local.steps is None
    return Caps(max(1, int(most * examples)), most * a if by_passes else math.inf, examples, a)
