"""How many clients a round selects, and with how many replies it closes, by the plan and the devices that are online.

These numbers are needed where a round is selected (server/policy/cohort.py), and where its cost is told before a run
starts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from thinwire.core.secure_numbers import LEAST_CLIENTS

if TYPE_CHECKING:
    from thinwire.core.plan import RunPlan

ONLINE = 10  # devices, where neither the plan nor a person names a number
ANY = 1 << 30  # more devices than any aggregator has


def wanted_count(plan: RunPlan, online: int) -> int:
    """Return from how many of `online` devices a round wants replies."""
    clients = plan.cohort.clients
    if clients == "all":
        return online
    if isinstance(clients, float):
        return max(1, math.ceil(clients * online - 1e-9))
    return min(clients, online)


def with_excess(plan: RunPlan, wanted: int, online: int) -> int:
    """Return how many of `online` devices a round selects to get `wanted` replies, with over-selection."""
    excess = 0.0 if plan.cohort.clients == "all" else plan.cohort.over_select
    return min(online, math.ceil(wanted * (1 + excess)))


def selected_of(plan: RunPlan, online: int | None) -> tuple[int, int]:
    """Return how many clients a round selects, and with how many updates it closes.

    `online` is the number of devices; None for as many as the plan selects or waits for, or else `ONLINE`.

    >>> from thinwire.core.plan import RunPlan
    >>> plan = RunPlan.from_json({"run": {"task": "t"}, "local": {"lr": 1}, "cohort": {"clients": 4, "over_select": 1}})
    >>> selected_of(plan, None), selected_of(plan, 5), selected_of(plan, 2)
    ((8, 4), (5, 4), (2, 2))
    """
    clients = plan.cohort.clients
    if online is None and isinstance(clients, int):
        return with_excess(plan, clients, ANY), clients
    waits = plan.cohort.wait_for if isinstance(plan.cohort.wait_for, int) else len(plan.cohort.wait_for)
    if online is None:
        online = waits if waits >= LEAST_CLIENTS else ONLINE
    target = wanted_count(plan, online)
    return with_excess(plan, target, online), target
