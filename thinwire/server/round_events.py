"""A round receives events, returns actions, and opens with a configuration; this module defines all three.

The state machines (`RoundMachine` in `round.py` and its subclasses) share these types. An event says what happened,
such as a reply that arrived. An action says what the driver (`round_runner.py`) has to do next. Times are seconds on
the run's clock, which stops while the aggregator is down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from thinwire.core.events import CloseReason, DropReason
from thinwire.core.formatting import Reasons
from thinwire.core.types import UpdateId
from thinwire.privacy.secure_round import UnmaskingKeys


@dataclass(frozen=True)
class SlotLease:
    """An assignment that a device works on, and the time at which its concurrency slot expires.

    `until_s`: the slot expires then. `yields_s`: the slot expires then already, if the round would otherwise lack
    updates for a step. Both are seconds on the run's clock.
    """

    assignment_id: str
    until_s: float
    yields_s: float = math.inf


@dataclass(frozen=True)
class RoundConfig:
    """The configuration of a round, decided when it opened.

    `assignments` maps each selected device to its `assignment_id`. `earlier` holds the devices that still work on an
    assignment of an earlier round. `slowest_s` gives the seconds of a device's slowest recent reply.

    In a buffered round (`buffered_round.py`) three fields mean something else. The round is full when it holds
    `target_updates` updates. `deadline_s` applies to each assignment, counted from when it was made. `follow_up`
    returns the `assignment_id` of a device's follow-up assignment, or "" if the device cannot get one now.
    """

    number: int
    base_version: int
    assignments: Mapping[str, str]
    target_updates: int  # aggregated updates that are enough
    min_updates: int  # fewest updates that make a step
    opened_s: float
    deadline_s: float
    late: Literal["aggregate", "drop"] = "aggregate"
    max_staleness: int = 5
    staleness_exponent: float = 0.5
    max_concurrency: int = 0  # devices that may be at work at once; 0: no limit
    earlier: Mapping[str, SlotLease] = field(default_factory=dict)
    slowest_s: Callable[[str], float] = lambda device: 0.0  # no device has replied yet
    follow_up: Callable[[str], str] = lambda device: ""  # no device is selected twice in a round


@dataclass(frozen=True)
class Replacement:
    """A device that could be selected as a replacement, and the `assignment_id` of its assignment."""

    device: str
    assignment_id: str


# Seconds left -> devices that could reply in time, best first.
ReplacementSource = Callable[[float], Iterable[Replacement]]


def no_replacements(_left_s: float) -> Iterable[Replacement]:
    """Return no devices: the round selects no replacements."""
    return ()


@dataclass(frozen=True)
class ReplacementSelected:
    """A device was selected during the round, before a restart; this replays its `SelectReplacement`."""

    device: str
    assignment_id: str
    instead_of: str = ""  # the device that it replaces; "" when it replaces none


@dataclass(frozen=True)
class UpdateArrived:
    """A reply has arrived, and it is durable in the spool.

    `again`: it was accepted before a restart and is replayed. `came_late`: for a deferred reply, True if it arrived
    after its own deadline; None for every other reply.
    """

    update_id: UpdateId
    assignment_id: str
    device: str
    base_version: int
    again: bool = False
    came_late: bool | None = None


@dataclass(frozen=True)
class AggregationDone:
    """An accepted update was aggregated."""

    update_id: UpdateId


@dataclass(frozen=True)
class AggregationRejected:
    """An accepted update could not be aggregated, for this reason; `detail` tells the case."""

    update_id: UpdateId
    reason: DropReason
    detail: str = ""


@dataclass(frozen=True)
class AssignmentFailed:
    """A device will not reply to an assignment, for a reason of this kind with this text."""

    device: str
    assignment_id: str
    kind: str
    text: str


@dataclass(frozen=True)
class DeviceConnected:
    """A device connected."""

    device: str


@dataclass(frozen=True)
class DeviceDisconnected:
    """A device disconnected or was revoked, for this reason."""

    device: str
    why: str


@dataclass(frozen=True)
class Stop:
    """A person stops the run."""


@dataclass(frozen=True)
class Tick:
    """Time has passed, and nothing else happened."""


@dataclass(frozen=True)
class PhaseMessage:
    """A device sent its message of a phase of a secure round."""

    device: str
    phase: str
    message: bytes


@dataclass(frozen=True)
class PhaseEnded:
    """A phase of a secure round was closed, before a restart, for a reason; this replays its `ClosePhase`."""

    reason: str = ""


@dataclass(frozen=True)
class MasksRemoved:
    """The masks were removed from the sum of a secure round; `error` says why that was not possible, or is ""."""

    error: str = ""


Input = (
    ReplacementSelected
    | UpdateArrived
    | AggregationDone
    | AggregationRejected
    | AssignmentFailed
    | DeviceConnected
    | DeviceDisconnected
    | Stop
    | Tick
    | PhaseMessage
    | PhaseEnded
    | MasksRemoved
)
PastEvents = Iterable[tuple[Input, float]]  # (event, elapsed_s) pairs from before a restart, in the journal's order


@dataclass(frozen=True)
class AggregateUpdate:
    """Record that this update is accepted as the round's next, then aggregate it with this discount."""

    update_id: UpdateId
    staleness: int  # model versions behind
    discount: float
    late: bool  # for the round, or for the deadline of its assignment


@dataclass(frozen=True)
class DropUpdate:
    """Drop this update: it does not count. With error feedback its device adds it to its residual again."""

    update_id: UpdateId
    reason: DropReason
    detail: str = ""


@dataclass(frozen=True)
class DeferUpdate:
    """Keep this reply for the next round, because this one accepts no more."""

    update_id: UpdateId


@dataclass(frozen=True)
class MarkLost:
    """Record that a device will not reply in this round, with kind and text of the reason."""

    device: str
    assignment_id: str
    kind: str
    text: str


@dataclass(frozen=True)
class Reinstate:
    """Record that a device that had disconnected is outstanding again, then make sure that it has its assignment."""

    device: str
    assignment_id: str


@dataclass(frozen=True)
class SelectReplacement:
    """Record that this device is selected during the round, then send its assignment.

    The device trains from `base_version`, and has `deadline_s` seconds. `why` holds the reasons.
    """

    device: str
    assignment_id: str
    base_version: int
    deadline_s: float
    why: Reasons
    instead_of: str = ""  # the device that it replaces; "" when it replaces none


@dataclass(frozen=True)
class RoundResult:
    """The round is closed for this reason."""

    reason: CloseReason
    aggregated: tuple[UpdateId, ...]  # they count
    dropped: tuple[UpdateId, ...]  # they do not count
    outstanding: tuple[str, ...]  # devices that had not replied
    detail: str = ""  # why an aborted round has no sum


@dataclass(frozen=True)
class ClosePhase:
    """Record that this phase of a secure round is closed, then send each device the request of the next phase."""

    phase: str
    requests: Mapping[str, bytes]


@dataclass(frozen=True)
class RemoveVector:
    """Subtract an aggregated masked vector again: its device was revoked before the survivors were shown."""

    update_id: UpdateId


@dataclass(frozen=True)
class RemoveMasks:
    """Remove the masks from the sum with these keys, then report `MasksRemoved`."""

    keys: UnmaskingKeys


Action = (
    AggregateUpdate
    | DropUpdate
    | DeferUpdate
    | MarkLost
    | Reinstate
    | SelectReplacement
    | RoundResult
    | ClosePhase
    | RemoveVector
    | RemoveMasks
)
