"""Learning rate of the server's step: the plan's `[server] lr` times the factor of its schedule.

The factor depends on the position in the run, from 0 to 1: the middle of the step, (steps made + 1/2) / rounds. The
steps that a run has made follow from its journal, so a resumed run steps at the same rates. `factor` computes the same
values as `Schedule` of `client/train/schedule.py`, which a worker without `core` imports. A test holds both equal.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thinwire.core.plan import RunPlan
    from thinwire.core.plan_schema import ServerSection


def factor(kind: str, warmup: float, end: float, position: float) -> float:
    """Return the factor of the learning rate at a position in the run, from 0 to 1.

    `kind` is constant, linear or cosine (Loshchilov and Hutter 2017, without restarts). Over the share `warmup` of the
    run the factor rises from 0 to 1; over the rest it falls from 1 to `end`.

    >>> factor("linear", 0.0, 0.0, 0.75), factor("constant", 0.5, 0.0, 0.25)
    (0.25, 0.5)
    """
    position = min(1.0, position)
    if position < warmup:
        return position / warmup
    if kind == "constant":
        return 1.0
    gone = (position - warmup) / (1.0 - warmup)
    left = 1.0 - gone if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * gone))
    return end + (1.0 - end) * left


def server_rate(plan: RunPlan, steps_made: int) -> float:
    """Return the learning rate of the server's next step, in a run that has made so many steps."""
    server = plan.server
    position = (steps_made + 0.5) / (server.schedule_rounds or plan.run.rounds)
    return server.lr * factor(server.schedule, server.lr_warmup, server.lr_end, position)


def server_at(plan: RunPlan, steps_made: int) -> ServerSection:
    """Return `[server]` with the learning rate of the next step as its `lr`."""
    return plan.server.model_copy(update={"lr": server_rate(plan, steps_made)}) if plan.server.moves else plan.server
