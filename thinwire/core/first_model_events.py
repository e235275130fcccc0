"""Events about the first model of a run that a device makes: a device is selected for it, or gave none."""

from __future__ import annotations

from dataclasses import dataclass

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
