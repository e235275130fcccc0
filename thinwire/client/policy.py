"""Read the owner's policy of this device (`client.toml`).

Only the owner sets the policy; the aggregator has no influence on it. `load_policy` reads it when the client starts.
`client/policy_rules.py` decides by it.
"""

from __future__ import annotations

import hashlib
import re
from datetime import time
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, field_validator

from thinwire.core.owner_file import parse_owner_text, read_owner_file
from thinwire.core.plan_values import Below1, Count, NotNegative, Positive, Section, TaskName

FILE = "client.toml"
KEYS = "docs/reference/policy.md lists the keys of [policy]"
HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")

Kind = Literal["describe", "init", "train", "evaluate"]
Mode = Literal["off", "central", "distributed", "local", "example"]


class Policy(Section):
    """The rules of this device's owner. A key that is left out allows everything that it would restrict."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)  # "4" or true instead of a number is a mistake

    tasks: Annotated[list[TaskName], Field(min_length=1)] | None = Field(
        default=None, description="names of tasks that may be worked on; left out: all that are installed"
    )
    kinds: Annotated[list[Kind], Field(min_length=1)] | None = Field(
        default=None,
        description="assignments that are accepted: each of these reads the device's data or its task; left out: all. "
        "Without evaluate the model is not measured on the way to training either",
    )
    secure: Literal["any", "required"] = Field(
        default="any", description="whether this device's updates may only leave it under masks ([secure] of the plan)"
    )
    adversary: Literal["curious", "malicious"] | None = Field(
        default=None,
        description="aggregator that masks must withstand: malicious declines plans with [secure] adversary = "
        '"curious"; a plan without masks is declined',
    )
    max_corrupt_assumed: Below1 | None = Field(
        default=None,
        description="least [secure] max_corrupt: the share of a round's clients that may collude with the aggregator; "
        "a plan without masks is declined",
    )
    min_cohort: Count | None = Field(
        default=None, description="fewest clients in a round under masks; a plan without masks is declined"
    )
    min_survivors: Count | None = Field(
        default=None, description="least [secure] min_survivors, the clients in a sum; a plan without masks is declined"
    )
    post_quantum: Literal["any", "required"] = Field(
        default="any",
        description="required declines masks without [secure] post_quantum = true: who records messages now, the "
        "aggregator too, could read them with a quantum computer later; a plan without masks is declined",
    )
    privacy: Annotated[list[Mode], Field(min_length=1)] | None = Field(
        default=None,
        description="the values of [privacy] mode that are private enough; left out: all, off among them. In "
        "mode central the aggregator sees each update, and the epsilon is its claim, which no device can check",
    )
    max_epsilon: Positive | None = Field(
        default=None,
        description="most epsilon that this device's data may have spent after an assignment, over all runs, by the "
        "device's own ledger; a plan without privacy is declined, and one of mode distributed unless adversary and "
        "max_corrupt_assumed are set, on which that ledger's noise counts",
    )
    max_delta: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=1e-5, description="delta at which the device computes the epsilon of `max_epsilon`"
    )
    max_participations: Count | None = Field(
        default=None,
        description="most releases of one population in which this device's data may take part, over all runs, by the "
        "device's own ledger; a plan names its population, so only max_epsilon bounds all of them; a plan without "
        "privacy is declined",
    )
    min_noise: NotNegative = Field(default=0.0, description="least [privacy] noise_multiplier; 0: any, also none")
    rounds_a_day: Count | None = Field(
        default=None,
        description="most assignments of each kind that are worked on in one day of this device's own calendar",
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
        description="megabytes of the disk that stay free: no model is fetched and no reply kept that would leave "
        "less; 0: no limit",
    )
    max_runs: Count = Field(
        default=4,
        description="most runs of one task, not over, of which this device keeps residual and models; with one more, "
        "the run unused longest begins again when it comes back",
    )
    max_state_mb: NotNegative = Field(
        default=64.0,
        description="most megabytes that a task's own train() keeps in context.state for one run; 0: none",
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
    return read_owner_file(path, ClientFile, "policy", KEYS, must_exist).policy


def parse_policy(text: str) -> Policy:
    """Read a policy from TOML.

    >>> parse_policy('[policy]\\nhours = "22:00-06:00"').hours
    '22:00-06:00'
    """
    return parse_owner_text(text, ClientFile, FILE, KEYS).policy
