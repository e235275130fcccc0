"""Reports of runs with secure aggregation: what the plan protects, the phases of a round, and the phase it waited for.

The command line and the dashboard show the same sentences. They follow from the plan, from the number of selected
clients, and from the journalled phases. The threat model is in docs/explain/secure-aggregation.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from thinwire.core.errors import PlanError
from thinwire.core.events import NO_STEP
from thinwire.core.formatting import counted, duration
from thinwire.core.plan_schema import SecureSection
from thinwire.core.secure_numbers import fewest_survivors, protects, share_of
from thinwire.core.types import PHASES
from thinwire.privacy.graph import EVENT_BITS, graph_of_plan
from thinwire.store.read_models import PhaseRow, RoundRow, RunRow, UpdateRow

MASKED: Final = "not known: summed under masks"  # the reason of "-" where a table would show a fact of one client
PRIVATE: Final = "not told: the run has differential privacy"  # the same in a run with noise
BY_NEXT_SUM: Final = "evaluated by the next round's sum"  # the reason of a missing metric of the latest version
NOT_PROTECTED: Final = (
    "Not protected: poisoned updates, a model made to leak inputs, the difference of two sums of almost the same "
    "clients, and who took part (docs/explain/secure-aggregation.md)."
)
WAITS_FOR: Final[Mapping[str, str]] = {
    "advertise": "keys", "share": "shares", "masked": "masked vectors", "agree": "signatures of the survivors",
    "unmask": "shares that remove the masks",
}  # fmt: skip


@dataclass(frozen=True)
class Protection:
    """Holds what secure aggregation protects in a run, under which assumptions, and what it does not, as sentences.

    `least` is the fewest clients in a sum, 0 if no sum is possible.
    """

    sentence: str
    least: int
    assumes: tuple[str, ...]
    not_protected: str = NOT_PROTECTED


@dataclass(frozen=True)
class Phase:
    """Holds a phase of a round. `seconds` is None while the phase is open.

    `is_closed` is False for the phase that is open, or in which the round ended without a sum. `received` is the number
    of clients whose message counts, and `received_bytes` are the bytes of these messages; both are None for a phase
    that was not closed. `last` is the client whose message came last. `dropped` maps each client that dropped out in
    this phase to the reason, "" if no reason is recorded.
    """

    phase: str
    begin_s: float
    seconds: float | None
    is_closed: bool
    received: int | None = None
    received_bytes: int | None = None
    last: str = ""
    dropped: Mapping[str, str] = field(default_factory=dict)

    @property
    def waits_for(self) -> str:
        """Return what the clients send in this phase."""
        return WAITS_FOR[self.phase]


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


def phases_of(found: RoundRow, closed: Sequence[PhaseRow], assignments: Sequence[UpdateRow]) -> list[Phase]:
    """Return the phases of a secure round in order: those that were closed, then the open one or that of its end.

    `closed` and `assignments` are the round's own rows.
    """
    reasons = {one.device: one.reason for one in assignments if one.outcome in ("failed", "dropped")}
    shown = [
        Phase(
            row.phase, row.elapsed_s - row.seconds, row.seconds, True, len(row.received), row.received_bytes,
            next(reversed(row.received), ""), {device: reasons.get(device, "") for device in row.dropped},
        )
        for row in closed
    ]  # fmt: skip
    if len(closed) < len(PHASES) and (not found.reason or found.reason in NO_STEP):
        before = {device for row in closed for device in row.dropped}
        begin_s = closed[-1].elapsed_s if closed else 0.0
        seconds = None if found.seconds is None else max(0.0, found.seconds - found.missed_s - begin_s)
        lost = {device: reason for device, reason in reasons.items() if device not in before}
        if found.reason:  # the updates that its reason drops did not drop out
            lost = {device: reason for device, reason in lost.items() if reason != found.reason}
        shown.append(Phase(PHASES[len(closed)], begin_s, seconds, False, dropped=lost))
    return shown


def longest(phases: Sequence[Phase]) -> Phase | None:
    """Return the phase that lasted longest; None if no length is known."""
    return max((one for one in phases if one.seconds is not None), key=lambda one: one.seconds or 0.0, default=None)


def waited_for(found: RoundRow, one: Phase) -> tuple[str, ...]:
    """Return the clients for whose message the phase waited until its deadline; none if enough vectors came before."""
    if one.phase == "masked" and found.reason == "enough":
        return ()
    return tuple(device for device, reason in one.dropped.items() if reason.startswith("stale"))


def waited_text(found: RoundRow, one: Phase) -> str:
    """Return what a phase waited for as a clause, with the clients that dropped out in it, or the last one to send."""
    silent = waited_for(found, one)
    said = f"the phase {one.phase} lasted {duration(one.seconds)}, waiting for {one.waits_for}"
    if silent:
        said += f" of {_names(silent)} until its deadline"
    elif one.last:
        said += f"; the last came from {one.last}"
    late = [device for device, reason in one.dropped.items() if reason.startswith("stale") and device not in silent]
    if late:
        said += f"; {_names(late)} {'were' if late[1:] else 'was'} not waited for"
    if others := [device for device in one.dropped if device not in (*silent, *late)]:
        kind = one.dropped[others[0]].partition(":")[0]
        said += f"; {_names(others)} dropped out" + (f" ({kind})" if kind and not others[1:] else "")
    return said


def open_text(found: RoundRow, phases: Sequence[Phase]) -> str:
    """Return the state of an open secure round as a sentence."""
    lost = sum(len(one.dropped) for one in phases)
    left = f"{len(found.selected) - lost} of {len(found.selected)} clients are in it"
    at = phases[-1]
    waits = f"the phase {at.phase} waits for {at.waits_for}" if not at.is_closed else "the sum is being made"
    return f"Round {found.round} is open: {waits}; {left}."


def _names(devices: Sequence[str]) -> str:
    """Return the first device, and the number of the others."""
    return devices[0] if len(devices) == 1 else f"{devices[0]} and {len(devices) - 1} more"
