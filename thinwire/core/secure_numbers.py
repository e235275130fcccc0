"""This module computes the integers of secure aggregation: thresholds, and how many clients a round selects and needs.

They come from the plan's shares; those that do not fit are refused.

The aggregator and each device compute them for themselves, from the plan and the number of selected clients.

Invariant: every function gives the same result on every machine. A share of a count is rounded down, after ROUNDING
was added: 0.29 of 100 clients are 29, although 0.29 * 100 is less in binary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from thinwire.core.errors import PlanError
from thinwire.core.formatting import counted
from thinwire.core.plan_values import ROUNDING, SecureSection

if TYPE_CHECKING:
    from thinwire.core.plan import RunPlan

LEAST_CLIENTS = 3  # of two clients, each could subtract its own update from the sum
SCALAR_BITS = 63  # weights and metrics are summed in lanes of 64 bits, with a sign
ROTATED = 65_536  # values of a block where [secure] rotate = true: an outlier is spread over the whole block
MAX_TRIED = 2000  # clients, in the search for the fewest that fit a plan: 10 ms
METRIC_BITS = 10  # a metric is summed in units of bound / 2^10; finer ones would tell which clients' numbers sum


@dataclass(frozen=True)
class Threshold:
    """Holds how many clients' shares reveal a secret (t), and for how many corrupt clients and drop-outs t is right.

    `min_survivors` is the fewest clients in a sum: t, and at least two more than the corrupt clients, since these can
    subtract their own updates.
    """

    t: int
    corrupt: int
    dropout: int

    @property
    def min_survivors(self) -> int:
        """Return max(t, A + 2), at least LEAST_CLIENTS: no sum has one honest client only."""
        return max(self.t, self.corrupt + 2, LEAST_CLIENTS)


def share_of(share: float, count: int) -> int:
    """Return the largest number of clients that is at most this share of `count`.

    >>> share_of(0.29, 100), share_of(1 / 3, 99)
    (29, 33)
    """
    return math.floor(share * count + ROUNDING)


def threshold(selected: int, max_corrupt: float, max_dropout: float, adversary: str) -> Threshold:
    """Return the threshold of the complete graph, in which every client holds a share of every client's secrets.

    n clients are selected, of which A may be corrupt and D may leave. `curious`: t = n // 2 + 1, raised to A + 1 and
    lowered to n - D. The A corrupt clients hold A shares of a secret, and the clients reveal each client's secrets in
    one of two ways only. `malicious`: the smallest t with 2t > n + A. For two lists of survivors a malicious aggregator
    needs 2t answers. Honest clients answer once and corrupt ones twice, so it gets at most n + A (Bonawitz et al. 2017,
    section 6).

    Invariant: A < t and `Threshold.min_survivors` <= n - D, so that a round with D drop-outs ends with a sum. Raise
    `PlanError` if no t has this property. For `malicious` no t has it from max_corrupt + 2 max_dropout = 1 on.
    """
    found, remaining = _numbers(selected, max_corrupt, max_dropout, adversary)
    if selected >= LEAST_CLIENTS and found.min_survivors <= remaining:
        return found
    enough = _fewest_selected(max_corrupt, max_dropout, adversary)
    if selected < LEAST_CLIENTS:
        raise _too_few(selected, enough)
    if adversary == "malicious":
        why = f"two lists of survivors are impossible only from {found.t} shares on"
    else:
        few, shares = counted(found.corrupt, "corrupt client"), counted(found.corrupt + 1, "share")
        why = f"{few} may not reveal a secret, so it takes {shares}"
    raise PlanError(
        f"no threshold withstands a {adversary} aggregator with [secure] max_corrupt = {max_corrupt:g} and "
        f"max_dropout = {max_dropout:g} among {selected} clients",
        f"{why}; a sum needs {found.min_survivors} clients, and after {counted(found.dropout, 'drop-out')} "
        f"{remaining} {'is' if remaining == 1 else 'are'} left",
        "smaller [secure] max_dropout or max_corrupt" + (f", or {enough} clients" if enough else ""),
    )


def _numbers(selected: int, max_corrupt: float, max_dropout: float, adversary: str) -> tuple[Threshold, int]:
    """Return the numbers of `threshold`, unchecked, and how many clients are left after D drop-outs."""
    corrupt, dropout = share_of(max_corrupt, selected), share_of(max_dropout, selected)
    remaining = selected - dropout
    if adversary == "malicious":
        t = (selected + corrupt) // 2 + 1
    else:
        t = max(corrupt + 1, min(selected // 2 + 1, remaining))
    return Threshold(t, corrupt, dropout), remaining


@lru_cache(maxsize=64)
def _fewest_selected(max_corrupt: float, max_dropout: float, adversary: str) -> int:
    """Return the fewest selected clients that have a threshold; 0 if no number up to MAX_TRIED has one."""
    each = ((count, *_numbers(count, max_corrupt, max_dropout, adversary)) for count in range(MAX_TRIED + 1))
    return next((count for count, found, left in each if count >= LEAST_CLIENTS and found.min_survivors <= left), 0)


def fewest_survivors(secure: SecureSection, selected: int, noised: bool) -> int:
    """Return the fewest clients in a sum of a round that selects so many.

    With noise of the clients (`noised`) these are all but the D that may drop out, if the plan says no other number:
    the fewer clients a sum may have, the more noise each of them has to add.

    >>> [fewest_survivors(SecureSection(max_dropout=0.2), 20, noised) for noised in (False, True)]
    [11, 16]
    """
    found = threshold(selected, secure.max_corrupt, secure.max_dropout, secure.adversary)
    least = secure.min_survivors or (selected - found.dropout if noised else 0)
    return max(found.min_survivors, least)


def protects(secure: SecureSection, selected: int) -> str:
    """Return in words what a secure round of so many clients protects against, and what that assumes.

    Several rounds together may tell single updates: see the threat model.

    >>> protects(SecureSection(max_corrupt=0.3), 10)
    'protects the updates of one round against an honest-but-curious aggregator with up to 3 of 10 clients colluding'
    """
    corrupt = share_of(secure.max_corrupt, selected)
    colluding = f"with up to {corrupt} of {selected} clients colluding" if corrupt else "with which no client colludes"
    if secure.adversary == "malicious":
        given = "if each client has pinned the roster"
        return f"protects the updates of one round against a malicious aggregator {colluding}, {given}"
    return f"protects the updates of one round against an honest-but-curious aggregator {colluding}"


def rotation_block(secure: SecureSection) -> int:
    """Return the number of values that are rotated together, a power of two; 0 if nothing is rotated.

    >>> [rotation_block(SecureSection(rotate=given)) for given in (False, True, 1024)]
    [0, 65536, 1024]
    """
    return ROTATED if secure.rotate is True else int(secure.rotate)


def check_numbers(secure: SecureSection, selected: int, target: int) -> None:
    """Raise `PlanError` if these numbers of clients do not fit the plan's [secure] table.

    `selected` counts the clients of a round, with over-selection, and `target` the updates with which it closes. The
    difference is lost by design, so it must fit into the D clients of max_dropout, together with real drop-outs.
    """
    found = threshold(selected, secure.max_corrupt, secure.max_dropout, secure.adversary)
    cut = selected - target
    if cut > found.dropout:
        raise PlanError(
            f"over-selection cuts {cut} of {selected} clients, and [secure] max_dropout = {secure.max_dropout:g} "
            f"allows {found.dropout}",
            f"a round that closes with {target} updates counts all others as drop-outs",
            f"[secure] max_dropout = {math.ceil(100 * cut / selected) / 100:g} and more for real drop-outs, or less "
            "[cohort] over_select",
        )
    if secure.min_survivors > (left := selected - found.dropout):
        raise PlanError(
            f"[secure] min_survivors = {secure.min_survivors} among {selected} clients",
            f"after {counted(found.dropout, 'drop-out')}, as max_dropout allows, {left} clients are left",
            f"[secure] min_survivors = {left}, or more clients",
        )
    scale = METRIC_BITS if secure.metrics or secure.histograms else 0
    if selected * secure.weight_max << scale >= 1 << SCALAR_BITS:
        raise PlanError(
            f"[secure] weight_max = {secure.weight_max} for {selected} clients",
            f"the sum of the weights{' and metrics' if scale else ''} must stay below 2^{SCALAR_BITS}",
            f"[secure] weight_max = {((1 << SCALAR_BITS - scale) - 1) // selected}",
        )


def _too_few(selected: int, enough: int) -> PlanError:
    return PlanError(
        f"secure aggregation of {counted(selected, 'client')}",
        "each of two clients could subtract its own update from the sum, and the sum of one is its update",
        f"{enough or LEAST_CLIENTS} devices or more, and no [cohort] clients below {enough or LEAST_CLIENTS}",
    )


ONLINE = 10  # devices, where neither the plan nor a person names a number
ANY = 1 << 30  # more devices than any aggregator has


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
        return plan.cohort.over_selected(clients, ANY), clients
    waits = plan.cohort.wait_for if isinstance(plan.cohort.wait_for, int) else len(plan.cohort.wait_for)
    if online is None:
        online = waits if waits >= LEAST_CLIENTS else ONLINE
    target = plan.cohort.target_updates(online)
    return plan.cohort.over_selected(target, online), target


def fewest_devices(plan: RunPlan) -> int:
    """Return with how many online devices a round of a secure plan has a sum; 0 if no number up to MAX_TRIED is known.

    >>> from thinwire.core.plan import RunPlan
    >>> values = {"run": {"task": "t"}, "local": {"lr": 1}, "secure": {"enabled": True}}
    >>> [fewest_devices(RunPlan.from_json({**values, "cohort": {"clients": clients}})) for clients in ("all", 0.2)]
    [3, 11]
    """
    first = plan.cohort.clients if isinstance(plan.cohort.clients, int) else max(1, plan.secure.min_survivors)
    for online in range(first, max(first, MAX_TRIED) + 1):
        target = plan.cohort.target_updates(online)
        try:
            check_numbers(plan.secure, plan.cohort.over_selected(target, online), target)
        except PlanError:
            continue
        return online
    return 0
