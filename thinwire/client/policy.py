"""Decide by the owner's policy (`client.toml`) whether this device works on an assignment.

Only the owner sets the policy; the aggregator has no influence on it. `load_policy` reads it when the client starts.
`decide` checks it against every assignment and the whole plan, one rule after the other, before anything of the
assignment is loaded.

`decide` is pure: everything that has to be looked up is in `PolicyContext`.

Invariant: an assignment is declined if a rule cannot establish that it is allowed. A plan with a table, a key or a
value that this version does not know may mean less protection than it seems to. A link of unknown price may be
expensive. A clock that is not trusted proves no hour.
"""

from __future__ import annotations

import hashlib
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, time, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, ValidationError, field_validator

from thinwire.core.errors import PlanError
from thinwire.core.formatting import plain
from thinwire.core.plan import RunPlan, explain
from thinwire.core.plan_schema import Count, NotNegative, Positive, Section, TaskName

FILE = "client.toml"
KEYS = "docs/reference/policy.md lists the keys of [policy]"
HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")

Kind = Literal["describe", "init", "train", "evaluate"]
Mode = Literal["off", "central", "distributed", "example"]


class Policy(Section):
    """The rules of this device's owner. A key that is left out allows everything that it would restrict."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)  # "4" or true instead of a number is a mistake

    tasks: Annotated[list[TaskName], Field(min_length=1)] | None = Field(
        default=None, description="names of tasks that may be worked on; left out: all that are installed"
    )
    kinds: Annotated[list[Kind], Field(min_length=1)] | None = Field(
        default=None,
        description="what may be asked: each of these reads the device's data or its task; left out: all. "
        "Without evaluate the model is not measured on the way to training either",
    )
    secure: Literal["any", "required"] = Field(
        default="any", description="whether this device's updates may only leave it under masks ([secure] of the plan)"
    )
    privacy: Annotated[list[Mode], Field(min_length=1)] | None = Field(
        default=None, description="the values of [privacy] mode that are private enough; left out: all, off among them"
    )
    max_epsilon: Positive | None = Field(
        default=None, description="largest epsilon of a whole run; a plan from which it cannot be read is declined"
    )
    max_delta: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=1e-5, description="largest delta that goes with `max_epsilon`"
    )
    min_noise: NotNegative = Field(default=0.0, description="least [privacy] noise_multiplier; 0: any, also none")
    rounds_a_day: Count | None = Field(
        default=None,
        description="most asks of each kind that are worked on in one day of this device's own calendar",
    )
    hours: str = Field(
        default="", description='when work may begin, in local time: "22:00-06:00" passes midnight; empty: always'
    )
    hours_end_work: bool = Field(
        default=True, description="whether work that is under way when `hours` end is stopped, and declined by `hours`"
    )
    max_assignment_minutes: NotNegative = Field(
        default=120.0,
        description="most minutes that one assignment is worked on; it is declined as soon as its steps would take "
        "twice as long, and stopped at the end of them, or sent as far as it came where the plan has partial work; "
        "0: no limit",
    )
    metered: Literal["allow", "refuse"] = Field(
        default="allow", description="whether to work on a link that is paid by volume, or that may be one"
    )
    link: Literal["auto", "metered", "unmetered"] = Field(
        default="auto", description="what the link is; auto: as NetworkManager says, where there is one"
    )
    power: Literal["auto", "mains", "battery"] = Field(
        default="auto", description="where power comes from, for plans that require mains; auto: as Linux says"
    )

    min_free_disk_mb: Annotated[int, Field(ge=0)] = Field(
        default=500,
        description="megabytes of the disk that stay free: no model is fetched and no answer kept that would leave "
        "less; 0: no limit",
    )

    @field_validator("hours")
    @classmethod
    def _is_a_span(cls, text: str) -> str:
        if text and (not HOURS.fullmatch(text) or text[:5] == text[6:]):
            raise ValueError('it reads "HH:MM-HH:MM", from 00:00 to 23:59, and the two differ')
        return text

    @property
    def digest(self) -> str:
        """Return a hash that distinguishes policies and reveals nothing else about them."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]

    @property
    def span(self) -> tuple[time, time]:
        """Return the begin and end of `hours`, which must not be empty."""
        begin, end = (time.fromisoformat(text) for text in self.hours.split("-"))
        return begin, end

    def is_open(self, at: time) -> bool:
        """Return True if work may begin at this time of day: `hours` include their first minute and exclude their last.

        >>> night = Policy(hours="22:00-06:00")
        >>> night.is_open(time(22, 0)), night.is_open(time(5, 59)), night.is_open(time(6, 0))
        (True, True, False)
        """
        if not self.hours:
            return True
        begin, end = self.span
        return begin <= at < end if begin < end else at >= begin or at < end


class ClientFile(Section):
    """The content of `client.toml`."""

    policy: Policy = Policy()


def load_policy(path: Path, must_exist: bool = False) -> Policy:
    """Return the policy in this file; without a file, one that forbids nothing.

    Raises `PlanError`, which names every wrong key and value.
    """
    try:
        text = path.read_text()
    except FileNotFoundError as error:
        if must_exist:
            raise PlanError(
                f"there is no policy {path}", hint="--policy FILE, in TOML, with a [policy] table"
            ) from error
        return Policy()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(
            f"cannot read the policy {path}", why=str(error), hint="make it readable, or move it"
        ) from error
    return parse_policy(text, str(path))


def parse_policy(text: str, source: str = FILE) -> Policy:
    """Read a policy from TOML.

    >>> parse_policy('[policy]\\nhours = "22:00-06:00"').hours
    '22:00-06:00'
    """
    try:
        raw: dict[str, Any] = tomllib.loads(text)
        return ClientFile.model_validate(raw).policy
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"{source} is not TOML", why=str(error), hint='a line reads: key = "value"') from error
    except ValidationError as error:
        found = [explain(ClientFile, details, "client.toml", KEYS) for details in error.errors()]
        whats, whys = ("; ".join(dict.fromkeys(column)) for column in ([f[0] for f in found], [f[1] for f in found]))
        raise PlanError(f"{source}: {whats}", why=whys, hint=found[0][2]) from error


MOST_LETTERS = 300  # of a reason: an unreadable plan may have long keys


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

    `now` is local time, None if the clock is not trusted (`no_clock` has the reason). `let_in` is the number of
    assignments of the same kind that were admitted today, without this one. It is None if the counts are unreadable
    (`no_counts` has the reason). `metered` is None if not known. `carries` are the sections of a plan ("secure",
    "privacy") that this client carries out.
    """

    now: datetime | None
    let_in: int | None = 0
    metered: bool | None = None
    carries: frozenset[str] = frozenset()
    no_clock: str = ""
    no_counts: str = ""

    def beside(self, metered: bool | None, carries: frozenset[str]) -> PolicyContext:
        """Return the facts with the link's price and the sections that this client carries out."""
        return replace(self, metered=metered, carries=carries)


def decide(policy: Policy, task: str, kind: str, plan: Mapping[str, Any], facts: PolicyContext) -> Denied | None:
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
        known = RunPlan.from_json(plan)
    except PlanError as error:
        return Denied("plan", plain(f"this version cannot judge it: {error.what}"[:MOST_LETTERS]))
    ask = _Ask(policy, task, kind, known, facts)
    return next((declined for rule in RULES if (declined := rule(ask)) is not None), None)


@dataclass(frozen=True)
class _Ask:
    policy: Policy
    task: str
    kind: str
    plan: RunPlan
    facts: PolicyContext


def _tasks(ask: _Ask) -> Denied | None:
    if ask.plan.run.task != ask.task:
        return Denied("tasks", "the ask and its plan name different tasks")
    if ask.policy.tasks is not None and ask.task not in ask.policy.tasks:
        return Denied("tasks", "this task is not among those allowed here")
    return None


def _kinds(ask: _Ask) -> Denied | None:
    if ask.kind not in get_args(Kind):
        return Denied("kinds", "this version does not know what it is asked")
    if ask.policy.kinds is not None and ask.kind not in ask.policy.kinds:
        return Denied("kinds", f"{ask.kind} is not allowed here")
    return None


def _secure(ask: _Ask) -> Denied | None:
    if ask.plan.secure.enabled and "secure" not in ask.facts.carries:
        return Denied("secure", "this version cannot sum under masks and would send in the clear")
    if ask.policy.secure == "required" and not ask.plan.secure.enabled:
        return Denied("secure", "the plan sums in the clear, and masks are required here")
    return None


def _privacy(ask: _Ask) -> Denied | None:
    mode = ask.plan.privacy.mode
    if mode != "off" and "privacy" not in ask.facts.carries:
        return Denied("privacy", f'this version cannot keep mode = "{mode}" and would send without it')
    if ask.policy.privacy is not None and mode not in ask.policy.privacy:
        return Denied("privacy", f'mode = "{mode}" is not private enough here')
    return None


def _max_epsilon(ask: _Ask) -> Denied | None:
    most, asked = ask.policy.max_epsilon, ask.plan.privacy
    if most is None:
        return None
    if asked.mode == "off":
        return Denied("max_epsilon", "the plan has no privacy, so its epsilon has no bound")
    bounds = [bound for bound in (asked.target_epsilon, asked.budget) if bound is not None]
    if not bounds:
        return Denied("max_epsilon", "the plan says neither target_epsilon nor budget")
    if min(bounds) > most:
        return Denied("max_epsilon", f"the plan spends up to {min(bounds):g}, {most:g} is allowed here")
    if asked.delta > ask.policy.max_delta:
        return Denied("max_delta", f"the plan has delta = {asked.delta:g}, {ask.policy.max_delta:g} is allowed here")
    return None


def _min_noise(ask: _Ask) -> Denied | None:
    least, asked = ask.policy.min_noise, ask.plan.privacy
    if not least:
        return None
    if asked.mode == "off" or asked.noise_multiplier is None:
        return Denied("min_noise", "the plan does not say how much noise is added")
    if asked.noise_multiplier < least:
        return Denied("min_noise", f"the plan adds {asked.noise_multiplier:g}, the least here is {least:g}")
    return None


def _hours(ask: _Ask) -> Denied | None:
    if not ask.policy.hours:
        return None
    if ask.facts.now is None:
        return Denied("hours", ask.facts.no_clock or "the time is not known")
    if not ask.policy.is_open(ask.facts.now.time()):
        begin, _ = ask.policy.span
        again_s = until(ask.facts.now, begin)
        return Denied("hours", f"work begins within {ask.policy.hours} of this device's time", again_s)
    return None


def _rounds_a_day(ask: _Ask) -> Denied | None:
    most, facts = ask.policy.rounds_a_day, ask.facts
    if most is None:
        return None
    if facts.let_in is None or facts.now is None:
        return Denied("rounds_a_day", facts.no_counts or facts.no_clock or "what was done today is not known")
    if facts.let_in >= most:
        return Denied("rounds_a_day", f"the {most} of today are used up", until(facts.now, time.min))
    return None


def until(now: datetime, at: time) -> int:
    """Return the whole seconds until this time of day comes next, by a clock that nothing sets before then."""
    next_one = datetime.combine(now.date(), at, now.tzinfo)
    if next_one <= now:
        next_one += timedelta(days=1)
    return math.ceil((next_one - now).total_seconds())


def _metered(ask: _Ask) -> Denied | None:
    if ask.policy.metered == "allow" or ask.facts.metered is False:
        return None
    if ask.facts.metered is None:
        return Denied("metered", "it cannot be told whether this link is paid by volume")
    return Denied("metered", "this link is paid by volume")


Rule = Callable[[_Ask], Denied | None]
RULES: tuple[Rule, ...] = (
    _tasks, _kinds, _secure, _privacy, _max_epsilon, _min_noise, _hours, _rounds_a_day, _metered,
)  # fmt: skip
