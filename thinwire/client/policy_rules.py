"""Decide by the owner's policy whether this device works on an assignment.

`decide` checks the policy against every assignment and the whole plan, one rule after the other, before anything of
the assignment is loaded. It is pure: everything that has to be looked up is in `PolicyContext`.

Invariant: an assignment is declined if a rule cannot establish that it is allowed. A plan with a table, a key or a
value that this version does not know may mean less protection than it seems to. A link of unknown price may be
expensive. A clock that is not trusted proves no hour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from typing import Any, NoReturn, get_args

from thinwire.aggregation.plan_codecs import CodecCatalog
from thinwire.client.policy import Kind, Policy
from thinwire.core.errors import CodecError, PlanError
from thinwire.core.formatting import counted, plain, rounded_up
from thinwire.core.plan import RunPlan
from thinwire.core.plan_schema import ServerSection
from thinwire.core.plan_values import ROUNDING
from thinwire.core.secure_numbers import check_numbers

KINDS = get_args(Kind)
MASKED = ("adversary", "max_corrupt_assumed", "min_cohort", "min_survivors")  # keys that need masks
MAX_LETTERS = 300  # of a reason: an unreadable plan may have long keys


@dataclass(frozen=True)
class Denied:
    """The first rule that forbids an assignment, and why: a sentence about the policy and the plan, never about data.

    `again_s` is how long the reason holds for certain. The aggregator reads it in the text and sends no assignment
    earlier.
    """

    rule: str
    why: str
    again_s: int = 0

    @property
    def text(self) -> str:
        """Return the rule, the reason and `again_s` in one line."""
        return f"{self.rule}: {self.why}" + (f" (again in {self.again_s} s)" if self.again_s else "")


@dataclass(frozen=True)
class PolicyContext:
    """The facts on which a decision depends, in addition to policy and plan.

    `now` is local time, None if the clock is not trusted (`no_clock` has the reason). `admitted` is the number of
    assignments of the same kind that were admitted today, without this one. It is None if the counts are unreadable
    (`no_counts` has the reason). `metered` is None if not known. `carries` are the parts of a plan that this client
    carries out: "secure", with what of [secure] not every device has ("secure.post_quantum" and "secure.malicious").
    `selected` is the number of clients in the terms of a round under masks, None before the terms are known.

    Of a private plan, by the device's own ledger: `epsilon_after` is what its data set would have spent after this
    assignment, at the policy's `max_delta`. `participations` is the data set's number in this population, without this
    assignment. None if not known; then `no_ledger` may have the reason.
    """

    now: datetime | None
    admitted: int | None = 0
    metered: bool | None = None
    carries: frozenset[str] = frozenset()
    no_clock: str = ""
    no_counts: str = ""
    selected: int | None = None
    epsilon_after: float | None = None
    participations: int | None = None
    no_ledger: str = ""


def decide(
    policy: Policy,
    task: str,
    kind: str,
    plan: Mapping[str, Any],
    facts: PolicyContext,
    parse: Callable[[Mapping[str, Any]], RunPlan] = RunPlan.from_json,
) -> Denied | None:
    """Return why an assignment of this kind for this task is declined; None if it is allowed.

    >>> plan = RunPlan.parse('[run]\\ntask = "ecg"\\n[local]\\nlr = 0.1').to_json()
    >>> decide(Policy(), "ecg", "train", plan, PolicyContext(None)) is None
    True
    >>> decide(Policy(secure="required"), "ecg", "train", plan, PolicyContext(None)).text
    'secure: the plan sums in the clear, and masks are required here'
    """
    if kind == "stop":
        return None
    try:
        known = parse(plan)
    except PlanError as error:
        return Denied("plan", plain(f"this version cannot judge it: {error.what}"[:MAX_LETTERS]))
    assignment = _Assignment(policy, task, kind, known, facts)
    try:
        return next((declined for rule in RULES if (declined := rule(assignment)) is not None), None)
    except (ArithmeticError, ValueError) as error:  # of numbers that no plan of a person has
        return Denied("plan", f"this version cannot judge its numbers: {type(error).__name__}")


@dataclass(frozen=True)
class _Assignment:
    policy: Policy
    task: str
    kind: str
    plan: RunPlan
    facts: PolicyContext


def _tasks(assignment: _Assignment) -> Denied | None:
    if assignment.plan.run.task != assignment.task:
        return Denied("tasks", "the assignment and its plan name different tasks")
    if assignment.policy.tasks is not None and assignment.task not in assignment.policy.tasks:
        return Denied("tasks", "this task is not among those allowed here")
    return None


def _kinds(assignment: _Assignment) -> Denied | None:
    if assignment.kind not in KINDS:
        return Denied("kinds", "this version does not know this kind of assignment")
    if assignment.policy.kinds is not None and assignment.kind not in assignment.policy.kinds:
        return Denied("kinds", f"{assignment.kind} is not allowed here")
    return None


def _secure(assignment: _Assignment) -> Denied | None:
    secure, carries = assignment.plan.secure, assignment.facts.carries
    if secure.enabled and "secure" not in carries:
        return Denied("secure", "this device cannot sum under masks and would send in the clear")
    if secure.enabled and assignment.kind != "train":
        return Denied("secure", f"the plan sums under masks, and the reply to {assignment.kind} has none")
    if secure.enabled and secure.post_quantum and "secure.post_quantum" not in carries:
        return Denied("secure", "the plan needs ML-KEM, and the package cryptography of this device has none")
    if secure.enabled and secure.adversary == "malicious" and "secure.malicious" not in carries:
        return Denied("secure", "a malicious aggregator is withstood only with a pinned roster, and none is here")
    if assignment.policy.post_quantum == "required" and secure.enabled and not secure.post_quantum:
        return Denied("post_quantum", "the plan's masks have X25519 alone, and ML-KEM beside it is required here")
    if assignment.policy.secure == "required" and not assignment.plan.secure.enabled:
        return Denied("secure", "the plan sums in the clear, and masks are required here")
    return None


def _unmasked(assignment: _Assignment) -> Denied | None:
    """Decline a plan in the clear if the owner restricts masked rounds: in it the aggregator sees each update alone."""
    if assignment.plan.secure.enabled:
        return None
    given = [key for key in MASKED if getattr(assignment.policy, key) is not None]
    given += ["post_quantum"] if assignment.policy.post_quantum == "required" else []
    return Denied(given[0], "the plan sums in the clear, so the aggregator sees each update") if given else None


def _adversary(assignment: _Assignment) -> Denied | None:
    if assignment.policy.adversary == "malicious" and assignment.plan.secure.adversary != "malicious":
        return Denied("adversary", "the plan withstands a curious aggregator, and a malicious one is assumed here")
    return None


def _max_corrupt_assumed(assignment: _Assignment) -> Denied | None:
    least, planned = assignment.policy.max_corrupt_assumed, assignment.plan.secure.max_corrupt
    if least is not None and planned < least:
        return Denied("max_corrupt_assumed", f"the plan has max_corrupt = {planned:g}, the least here is {least:g}")
    return None


def _min_cohort(assignment: _Assignment) -> Denied | None:
    """Decline a round of too few clients, by its terms, or by its plan before they are known.

    A plan that selects all or a share of the clients does not say how many. The terms do, before anything is shared.
    """
    least, cohort, selected = assignment.policy.min_cohort, assignment.plan.cohort, assignment.facts.selected
    if selected is None and isinstance(cohort.clients, int):
        selected = math.ceil(cohort.clients * (1 + cohort.over_select))
    if least is not None and selected is not None and selected < least:
        return Denied("min_cohort", f"a round selects {counted(selected, 'client')}, the fewest here are {least}")
    return None


def _min_survivors(assignment: _Assignment) -> Denied | None:
    least, planned = assignment.policy.min_survivors, assignment.plan.secure.min_survivors
    if least is not None and planned < least:
        return Denied("min_survivors", f"the plan has min_survivors = {planned}, the least here is {least}")
    return None


def _threshold(assignment: _Assignment) -> Denied | None:
    """Decline terms whose number of clients does not fit the plan: this device does not rely on the aggregator's check.

    A plan that selects all or a share of the clients closes a round with the selected ones less its over-selection.
    """
    secure, cohort, selected = assignment.plan.secure, assignment.plan.cohort, assignment.facts.selected
    if selected is None or not secure.enabled:
        return None
    if isinstance(cohort.clients, int):
        target = cohort.clients
    else:
        target = selected if cohort.clients == "all" else math.floor(selected / (1 + cohort.over_select) + ROUNDING)
    try:
        check_numbers(secure, selected, target)
    except PlanError as error:
        return Denied("secure", error.what)
    return None


def _privacy(assignment: _Assignment) -> Denied | None:
    mode = assignment.plan.privacy.mode
    if assignment.policy.privacy is not None and mode not in assignment.policy.privacy:
        return Denied("privacy", f'mode = "{mode}" is not private enough here')
    if mode != "off" and assignment.kind == "evaluate":
        return Denied("privacy", "the plan is private, and metrics would leave this device without noise")
    if mode != "off" and assignment.kind == "init":  # model() may know what data() has read in the same process
        return Denied("privacy", "the plan is private, and a first model would leave this device without noise")
    if mode != "off" and assignment.facts.no_ledger:
        return Denied("privacy", assignment.facts.no_ledger)
    return None


class _DeviceCodecs(CodecCatalog):
    """The catalog for a device's check of a plan. It imports nothing that [server] names, a module or a file.

    An optimizer works on the sum alone, so a device lets it pass; no plan under masks or with privacy has a reduction.
    """

    def require_optimizer(self, server: ServerSection) -> None:
        """Let every optimizer pass."""

    @staticmethod
    def reduction_of(spec: str) -> NoReturn:
        """Raise CodecError."""
        raise CodecError(
            f"the reduction {spec[:80]!r}", "it compares updates of the clients", '[server] reduce = "mean"'
        )


_CODECS = _DeviceCodecs()


def _contradiction(assignment: _Assignment) -> Denied | None:
    """Decline a plan under masks or with privacy that `thinwire plan check` refuses: it may promise what no run keeps.

    The aggregator's own check does not protect a device from the aggregator. A plan without masks or privacy promises
    nothing, so it is not checked. This rule is the last one, because it may import an installed codec.
    """
    if not assignment.plan.is_protected:
        return None
    refused = assignment.plan.check(_CODECS)
    return Denied("plan", plain(f"it contradicts itself: {refused[0].what}"[:MAX_LETTERS])) if refused else None


def _max_epsilon(assignment: _Assignment) -> Denied | None:
    """Decline what would spend too much by this device's own ledger: what a plan claims to spend proves nothing."""
    most, after = assignment.policy.max_epsilon, assignment.facts.epsilon_after
    if most is None:
        return None
    if assignment.plan.privacy.mode == "off":
        return Denied("max_epsilon", "the plan has no privacy, so its epsilon has no bound")
    withstands = assignment.policy.adversary == "malicious" and assignment.policy.max_corrupt_assumed
    if assignment.plan.privacy.mode == "distributed" and not withstands:
        said = "the plan alone says how many clients add noise that the aggregator does not know: "
        return Denied("max_epsilon", said + 'adversary = "malicious" and max_corrupt_assumed in [policy] bound that')
    if after is None:
        return Denied("max_epsilon", "it is not known what this device's data would have spent after it")
    if not after <= most:
        said = f"this device's data would have spent {rounded_up(after)} after it, {most:g} is allowed here"
        return Denied("max_epsilon", said)
    return None


def _max_participations(assignment: _Assignment) -> Denied | None:
    most, took_part = assignment.policy.max_participations, assignment.facts.participations
    if most is None or assignment.kind != "train":
        return None
    if assignment.plan.privacy.mode == "off":
        return Denied("max_participations", "the plan has no privacy, so this device's ledger does not count it")
    if took_part is None:
        return Denied("max_participations", "it is not known how often this device's data took part")
    if took_part >= most:
        return Denied("max_participations", f"this device's data took part {took_part} times, {most} are allowed here")
    return None


def _min_noise(assignment: _Assignment) -> Denied | None:
    least, planned = assignment.policy.min_noise, assignment.plan.privacy
    if not least:
        return None
    if planned.mode == "off" or planned.noise_multiplier is None:
        return Denied("min_noise", "the plan does not say how much noise is added")
    noise = planned.noise_multiplier
    if planned.mechanism == "tree":  # an update is in many sums, so its noise counts less
        from thinwire.privacy.noise_plan import share_of_participation  # other runs need no accountant

        noise /= math.sqrt(share_of_participation(assignment.plan))
    if noise < least:
        return Denied("min_noise", f"the plan adds {noise:.4g}, the least here is {least:g}")
    return None


def _hours(assignment: _Assignment) -> Denied | None:
    if not assignment.policy.hours:
        return None
    if assignment.facts.now is None:
        return Denied("hours", assignment.facts.no_clock or "the time is not known")
    if not assignment.policy.is_open(assignment.facts.now.time()):
        begin, _ = assignment.policy.span
        again_s = until(assignment.facts.now, begin)
        return Denied("hours", f"work begins within {assignment.policy.hours} of this device's time", again_s)
    return None


def _rounds_a_day(assignment: _Assignment) -> Denied | None:
    most, facts = assignment.policy.rounds_a_day, assignment.facts
    if most is None:
        return None
    if facts.admitted is None or facts.now is None:
        return Denied("rounds_a_day", facts.no_counts or facts.no_clock or "what was done today is not known")
    if facts.admitted >= most:
        return Denied("rounds_a_day", f"the {most} of today are used up", until(facts.now, time.min))
    return None


def until(now: datetime, at: time) -> int:
    """Return the whole seconds until this time of day comes next, by a clock that nothing sets before then."""
    next_one = datetime.combine(now.date(), at, now.tzinfo)
    if next_one <= now:
        next_one += timedelta(days=1)
    return math.ceil((next_one - now).total_seconds())


def _metered(assignment: _Assignment) -> Denied | None:
    if assignment.policy.metered == "allow" or assignment.facts.metered is False:
        return None
    if assignment.facts.metered is None:
        return Denied("metered", "it is unknown whether this link is paid by volume")
    return Denied("metered", "this link is paid by volume")


Rule = Callable[[_Assignment], Denied | None]
RULES: tuple[Rule, ...] = (
    _tasks, _kinds,
    _secure, _unmasked, _adversary, _max_corrupt_assumed, _min_cohort, _min_survivors, _threshold,
    _privacy, _max_epsilon, _max_participations, _min_noise,
    _hours, _rounds_a_day, _metered, _contradiction,
)  # fmt: skip
