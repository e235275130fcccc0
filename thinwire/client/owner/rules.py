"""Whether this device works on an ask: its owner's policy against the whole plan, one rule after the other.

Pure: what has to be looked up stands in `Facts`. Law: what cannot be established is declined. A plan with a table, a
key or a value that this version does not know may mean less protection than it seems to; a link of which nobody knows
the price may be dear; a clock that cannot be believed says nothing about the hour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, time, timedelta
from typing import Any, get_args

from thinwire.client.policy import Kind, Policy
from thinwire.core.errors import PlanError
from thinwire.core.plan import RunPlan
from thinwire.core.texts import plain

MOST_LETTERS = 300  # of a reason: a plan that cannot be read may have long keys


@dataclass(frozen=True)
class Declined:
    """The first rule that forbids it, and why: a sentence about the policy and the plan, never about data.

    `again_s` is how long it stays so for certain; the other end reads it in the text and asks no earlier.
    """

    rule: str
    why: str
    again_s: int = 0

    @property
    def text(self) -> str:
        return f"{self.rule}: {self.why}" + (f" (again in {self.again_s} s)" if self.again_s else "")


@dataclass(frozen=True)
class Facts:
    """What a decision depends on beside policy and plan.

    `now` is local time, None where the clock cannot be believed (`no_clock` says why). `let_in` is how many asks of
    the same kind were let in today, this one not among them; None where the counts cannot be read (`no_counts`).
    `carries` are the sections of a plan ("secure", "privacy") that this client carries out.
    """

    now: datetime | None
    let_in: int | None = 0
    metered: bool | None = None
    carries: frozenset[str] = frozenset()
    no_clock: str = ""
    no_counts: str = ""

    def beside(self, metered: bool | None, carries: frozenset[str]) -> Facts:
        return replace(self, metered=metered, carries=carries)


def decide(policy: Policy, task: str, kind: str, plan: Mapping[str, Any], facts: Facts) -> Declined | None:
    """Why an ask of this kind for this task may not be worked on; None when it may.

    >>> plan = RunPlan.parse('[run]\\ntask = "ecg"\\n[local]\\nlr = 0.1').to_json()
    >>> decide(Policy(), "ecg", "train", plan, Facts(None)) is None
    True
    >>> decide(Policy(secure="required"), "ecg", "train", plan, Facts(None)).text
    'secure: the plan sums in the clear, and masks are required here'
    """
    if kind == "stop":
        return None
    try:
        known = RunPlan.from_json(plan)
    except PlanError as error:
        return Declined("plan", plain(f"this version cannot judge it: {error.what}"[:MOST_LETTERS]))
    ask = _Ask(policy, task, kind, known, facts)
    return next((declined for rule in RULES if (declined := rule(ask)) is not None), None)


@dataclass(frozen=True)
class _Ask:
    policy: Policy
    task: str
    kind: str
    plan: RunPlan
    facts: Facts


def _tasks(ask: _Ask) -> Declined | None:
    if ask.plan.run.task != ask.task:
        return Declined("tasks", "the ask and its plan name different tasks")
    if ask.policy.tasks is not None and ask.task not in ask.policy.tasks:
        return Declined("tasks", "this task is not among those allowed here")
    return None


def _kinds(ask: _Ask) -> Declined | None:
    if ask.kind not in get_args(Kind):
        return Declined("kinds", "this version does not know what it is asked")
    if ask.policy.kinds is not None and ask.kind not in ask.policy.kinds:
        return Declined("kinds", f"{ask.kind} is not allowed here")
    return None


def _secure(ask: _Ask) -> Declined | None:
    if ask.plan.secure.enabled and "secure" not in ask.facts.carries:
        return Declined("secure", "this version cannot sum under masks and would send in the clear")
    if ask.policy.secure == "required" and not ask.plan.secure.enabled:
        return Declined("secure", "the plan sums in the clear, and masks are required here")
    return None


def _privacy(ask: _Ask) -> Declined | None:
    mode = ask.plan.privacy.mode
    if mode != "off" and "privacy" not in ask.facts.carries:
        return Declined("privacy", f'this version cannot keep mode = "{mode}" and would send without it')
    if ask.policy.privacy is not None and mode not in ask.policy.privacy:
        return Declined("privacy", f'mode = "{mode}" is not private enough here')
    return None


def _max_epsilon(ask: _Ask) -> Declined | None:
    most, asked = ask.policy.max_epsilon, ask.plan.privacy
    if most is None:
        return None
    if asked.mode == "off":
        return Declined("max_epsilon", "the plan has no privacy, so its epsilon has no bound")
    bounds = [bound for bound in (asked.target_epsilon, asked.budget) if bound is not None]
    if not bounds:
        return Declined("max_epsilon", "the plan says neither target_epsilon nor budget")
    if min(bounds) > most:
        return Declined("max_epsilon", f"the plan spends up to {min(bounds):g}, {most:g} is allowed here")
    if asked.delta > ask.policy.max_delta:
        return Declined("max_delta", f"the plan has delta = {asked.delta:g}, {ask.policy.max_delta:g} is allowed here")
    return None


def _min_noise(ask: _Ask) -> Declined | None:
    least, asked = ask.policy.min_noise, ask.plan.privacy
    if not least:
        return None
    if asked.mode == "off" or asked.noise_multiplier is None:
        return Declined("min_noise", "the plan does not say how much noise is added")
    if asked.noise_multiplier < least:
        return Declined("min_noise", f"the plan adds {asked.noise_multiplier:g}, the least here is {least:g}")
    return None


def _hours(ask: _Ask) -> Declined | None:
    if not ask.policy.hours:
        return None
    if ask.facts.now is None:
        return Declined("hours", ask.facts.no_clock or "the time is not known")
    if not ask.policy.is_open(ask.facts.now.time()):
        begin, _ = ask.policy.span
        again_s = until(ask.facts.now, begin)
        return Declined("hours", f"work begins within {ask.policy.hours} of this device's time", again_s)
    return None


def _rounds_a_day(ask: _Ask) -> Declined | None:
    most, facts = ask.policy.rounds_a_day, ask.facts
    if most is None:
        return None
    if facts.let_in is None or facts.now is None:
        return Declined("rounds_a_day", facts.no_counts or facts.no_clock or "what was done today is not known")
    if facts.let_in >= most:
        return Declined("rounds_a_day", f"the {most} of today are used up", until(facts.now, time.min))
    return None


def until(now: datetime, at: time) -> int:
    """Whole seconds until this time of day comes next, by a clock that nobody puts forward or back meanwhile."""
    next_one = datetime.combine(now.date(), at, now.tzinfo)
    if next_one <= now:
        next_one += timedelta(days=1)
    return math.ceil((next_one - now).total_seconds())


def _metered(ask: _Ask) -> Declined | None:
    if ask.policy.metered == "allow" or ask.facts.metered is False:
        return None
    if ask.facts.metered is None:
        return Declined("metered", "it cannot be told whether this link is paid by volume")
    return Declined("metered", "this link is paid by volume")


Rule = Callable[[_Ask], Declined | None]
RULES: tuple[Rule, ...] = (
    _tasks, _kinds, _secure, _privacy, _max_epsilon, _min_noise, _hours, _rounds_a_day, _metered,
)  # fmt: skip
