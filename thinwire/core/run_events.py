"""Events about runs as a whole: one got more rounds, or was deleted, or all wait because the disk is full."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from thinwire.core.events import Event
from thinwire.core.formatting import Reason, Reasons


@dataclass(frozen=True)
class RunExtended(Event):
    """Reports that a run that was over gets more rounds, so that it is queued again.

    `rounds` is the new total of rounds and `was` the total before; `version` is the model version from which the run
    goes on. `plan` is the resolved plan that holds from now on. `sets` are the keys that the person changed, in TOML's
    notation.

    `order` is the number of the person's command: a command that was carried out and not answered before a crash is not
    carried out again.

    Invariant: the devices begin again with residual 0. `first_round` is the first round whose state on devices counts.
    Devices drop older state when they get an assignment of it, and the aggregator drops updates of earlier rounds.
    """

    rounds: int
    was: int
    version: int
    first_round: int
    plan: Mapping[str, Any]
    sets: Mapping[str, str] = field(default_factory=dict)
    who: str = ""
    order: int = 0

    @property
    def note(self) -> Reasons:
        """Return the event as a note for the operator."""
        who = self.who or "a person"
        return [
            Reason("extended", {"who": who, "was": self.was, "rounds": self.rounds, "first": self.first_round}),
        ]


@dataclass(frozen=True)
class RunDeleted(Event):
    """Reports that a run was deleted: its models, rounds and events; its row and its ledger entries stay.

    `who` is the person, or `keep_days` if the setting of that name did it.

    The event belongs to no run, so it outlives the run's own events. Its number in the journal is above theirs: no
    number is given twice.
    """

    run_id: str
    who: str


@dataclass(frozen=True)
class DiskFilled(Event):
    """Reports that the aggregator paused all runs, because its disk takes no writes; `why` is what the disk said."""

    why: str


@dataclass(frozen=True)
class DiskFreed(Event):
    """Reports that the disk has space again, so that all runs go on after `seconds`."""

    seconds: float
