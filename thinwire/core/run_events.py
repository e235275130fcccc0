"""Events about runs as a whole: a device makes the first model, more rounds, a deletion, a full disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from thinwire.core.events import Event
from thinwire.core.formatting import Reason, Reasons


@dataclass(frozen=True)
class FirstModelAssigned(Event):
    """Reports that a device is selected to make the first model; journalled before its assignment leaves.

    `why` is the reason for this device. Invariant: no other device's first model is accepted until this device has
    failed or its model is stored.
    """

    device: str
    assignment_id: str
    why: Reasons
    deadline_s: float
    deadline_reason: Reasons
    elapsed_s: float

    @property
    def note(self) -> Reasons:
        """Return the event as a note for the operator."""
        by, within = Reason("first-model", {"device": self.device}), Reason("within", {"seconds": self.deadline_s})
        return [by, *self.why, within, *self.deadline_reason]


@dataclass(frozen=True)
class FirstModelFailed(Event):
    """Reports that a device gave no usable first model; a model that it sends later is not accepted.

    `said` is a digest of the device's report about itself: once that changes, the aggregator may select it again.
    """

    device: str
    assignment_id: str
    kind: str
    reason: str
    elapsed_s: float
    said: str = ""

    @property
    def note(self) -> Reasons:
        """Return the event as a note for the operator."""
        return [Reason("first-model-failed", {"device": self.device, "kind": self.kind, "text": self.reason})]


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
