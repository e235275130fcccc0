"""Selects the clients of a round that evaluate the model, if `[run] fraction_evaluate` lets only a share of them do so.

Of the clients that a round selects when it opens, the share evaluates, rounded up, so there is one at least. A client
that is selected later evaluates with a probability of the share. The journal has the decision (`ClientSelected`).
"""

from __future__ import annotations

import math
from collections.abc import Collection

from thinwire.core.plan import RunPlan
from thinwire.core.prng import Key, derive, seed63


def share_of(plan: RunPlan, clients: int) -> int:
    """Return how many of so many clients the plan lets evaluate.

    >>> plan = RunPlan.from_json({"run": {"task": "t", "fraction_evaluate": 0.1}, "local": {"lr": 1}})
    >>> share_of(plan, 30), share_of(plan, 31), share_of(plan, 0)
    (3, 4, 0)
    """
    return math.ceil(round(plan.run.fraction_evaluate * clients, 9))  # 0.1 * 30 is 3.0000000000000004 in floats


def evaluators(plan: RunPlan, number: int, selected: Collection[str]) -> frozenset[str]:
    """Return the clients that evaluate, of those that round `number` selects when it opens.

    Invariant: they depend on the seed, the round and the selected clients alone.
    """
    if plan.run.fraction_evaluate == 1:
        return frozenset(selected)
    order = sorted(selected, key=lambda device: _drawn(plan, number, device))
    return frozenset(order[: share_of(plan, len(order))])


def evaluates(plan: RunPlan, number: int, device: str) -> bool:
    """Return True if a client evaluates that round `number` selects after its opening."""
    return plan.run.fraction_evaluate == 1 or _drawn(plan, number, device) < plan.run.fraction_evaluate


def _drawn(plan: RunPlan, number: int, device: str) -> float:
    """Return a number in [0, 1) of the seed, the round and the device."""
    return seed63(derive(Key(plan.run.seed), "evaluate", number, device)) / 2**63
