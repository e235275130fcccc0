"""Reports of runs with secure aggregation: what the plan protects, the phases of a round, and the phase it waited for.

The command line and the dashboard show the same sentences. They follow from the plan, from the number of selected
clients, and from the journalled phases. The threat model is in docs/explain/secure-aggregation.md.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from thinwire.core.errors import PlanError
from thinwire.core.events import NO_STEP
from thinwire.core.formatting import counted
from thinwire.core.plan_protection import SecureSection
from thinwire.core.secure_numbers import fewest_survivors, protects, share_of
from thinwire.privacy.graph import EVENT_BITS, graph_of_plan
from thinwire.store.read_models import RoundRow, RunRow

MASKED: Final = "not known: summed under masks"  # the reason of "-" where a table would show a fact of one client
PRIVATE: Final = "not told: the run has differential privacy"  # the same in a run with noise
BY_NEXT_SUM: Final = "evaluated by the next round's sum"  # the reason of a missing metric of the latest version
NOT_PROTECTED: Final = (
    "Not protected: poisoned updates, a model made to leak inputs, the difference of two sums of almost the same "
    "clients, and who took part (docs/explain/secure-aggregation.md)."
)


@dataclass(frozen=True)
class Protection:
    """Holds what secure aggregation protects in a run, under which assumptions, and what it does not, as sentences.

    `least` is the fewest clients in a sum, 0 if no sum is possible.
    """

    sentence: str
    least: int
    assumes: tuple[str, ...]
    not_protected: str = NOT_PROTECTED


def secure_section(run: RunRow) -> SecureSection:
    """Return the table [secure] of the run's plan."""
    return SecureSection.model_validate(run.plan.get("secure") or {})


def is_secure(run: RunRow) -> bool:
    """Return True if the run's updates are summed under masks."""
    return secure_section(run).enabled


def why_not_known(run: RunRow) -> str:
    """Return why the facts of single clients are not known; "" if their replies tell them."""
    private = dict(run.plan.get("privacy") or {}).get("mode", "off") != "off"
    return MASKED if is_secure(run) else PRIVATE if private else ""


def protection(run: RunRow, selected: Collection[int]) -> Protection | None:
    """Return what the run protects in each of its rounds; None without secure aggregation or without a round.

    `selected` are the numbers of clients that its rounds selected. The smallest one decides: a round with more clients
    withstands at least as many corrupt ones.
    """
    secure = secure_section(run)
    if not secure.enabled or not selected:
        return None
    fewest, most = min(selected), max(selected)
    try:
        graph = graph_of_plan(secure, fewest, run.plan["run"]["rounds"])
    except PlanError as error:  # no k-regular graph, which the plan demands, has so few clients
        return Protection(f"A round of {fewest} clients has no sum: {error.what}.", 0, ())
    noised = dict(run.plan.get("privacy") or {}).get("mode") == "distributed"
    least = max(graph.least, fewest_survivors(secure, fewest, noised))
    said = f"{protects(secure, fewest)}; a sum holds at least {least} clients"
    if fewest < most:
        said += f"; the rounds selected {fewest} to {most} clients"
    if run.source == "sim":
        begin = "A simulation protects nothing, because one process has the data of all clients; on devices this plan"
    else:
        begin = "Secure aggregation"
    assumes = _assumptions(secure, share_of(secure.max_corrupt, fewest))
    if not graph.is_complete:
        graph_text = (
            f"Each client shares its secrets with {graph.k} others. Corrupt clients and drop-outs do not depend on "
            f"this graph; then it exposes a client in a run with a probability of at most 2^-{EVENT_BITS - 1}."
        )
        assumes = (*assumes, graph_text)
    return Protection(f"{begin} {said}.", least, assumes)


def _assumptions(secure: SecureSection, corrupt: int) -> tuple[str, ...]:
    """Return what must hold for the sentence of `protection` to be true, apart from the graph."""
    if secure.adversary == "curious":
        return (
            "The aggregator follows the protocol: it sends all clients of a round the same, and invents no client.",
        )
    of_all = f"at most {counted(corrupt, 'device')} of it {'is' if corrupt == 1 else 'are'}" if corrupt else "none is"
    return (
        f"Each client has pinned the roster of identity keys, which an offline key has signed, and {of_all} corrupt.",
        "The aggregator chooses how many clients a round selects; only an owner's [policy] min_cohort is a bound.",
    )


def not_evaluated(run: RunRow, rounds: Sequence[RoundRow]) -> str:
    """Return why the latest version of a secure run has no metrics; "" if it has, or if no metric is summed.

    `rounds` are the last rounds of the run.
    """
    if not is_secure(run) or not secure_section(run).metrics:
        return ""
    made = [one for one in rounds if one.reason and one.reason not in NO_STEP]
    if not made or made[-1].metrics:
        return ""
    return f"version {made[-1].version} has no metrics yet: {BY_NEXT_SUM}"
