"""A round receives events, returns actions, and opens with terms; this module defines all three.

The state machines in `round.py` and `buffered_round.py` share these types. An event says what happened, such as a reply
that arrived. An action says what the driver (`round_runner.py`) has to do next. All types are plain values without I/O.
Times are seconds on the run's clock, which stops while the aggregator is down.

Invariant: a round ends with exactly one `RoundResult`, which holds one reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from thinwire.core.events import CloseReason
from thinwire.core.types import UpdateId


@dataclass(frozen=True)
class SlotLease:
    """An assignment that a device works on, and the time at which its concurrency slot expires.

    `until_s`: the slot expires then. `yields_s`: the slot expires then already, if the round would otherwise lack
    updates for a step. Both are seconds on the run's clock.
    """

    ask_id: str
    until_s: float
    yields_s: float = math.inf


def unknown_s(_device: str) -> float:
    """Return 0.0 seconds: no device has replied yet."""
    return 0.0


def no_more(_device: str) -> str:
    """Return "": no device is selected twice in a round."""
    return ""


@dataclass(frozen=True)
class RoundConfig:
    """The terms of a round, decided when it opened.

    `asks` maps each selected device to its `ask_id`. `earlier` holds the devices that still work on an assignment of an
    earlier round. `slowest_s` gives the seconds of a device's slowest recent reply. All times are seconds on the run's
    clock.

    In a buffered round (`buffered_round.py`) three fields mean something else. The round is full when it holds `target`
    updates. `deadline_s` applies to each assignment, counted from when it was made. `further` returns the `ask_id` of a
    device's follow-up assignment, or "" if the device cannot get one now.
    """

    number: int
    base_version: int
    asks: Mapping[str, str]
    target: int  # aggregated updates that are enough
    floor: int  # fewest updates that make a step
    opened_s: float
    deadline_s: float
    late: Literal["fold", "drop"] = "fold"
    max_staleness: int = 5
    staleness_exponent: float = 0.5
    max_concurrency: int = 0  # devices that may be at work at once; 0: no limit
    earlier: Mapping[str, SlotLease] = field(default_factory=dict)
    slowest_s: Callable[[str], float] = unknown_s
    further: Callable[[str], str] = no_more


@dataclass(frozen=True)
class Replacement:
    """A device that could be selected as a replacement, and the `ask_id` of its assignment."""

    device: str
    ask_id: str


Spares = Callable[[float], Iterable[Replacement]]  # seconds left -> devices that could reply in time, best first


def nobody(_left_s: float) -> Iterable[Replacement]:
    """Return no devices: the round selects no replacements."""
    return ()


# Events: what happens to a round.


@dataclass(frozen=True)
class ReplacementSelected:
    """A device was selected during the round, before a restart; this replays its `SelectReplacement`.

    `instead_of`: the device that it replaces, or "".
    """

    device: str
    ask_id: str
    instead_of: str = ""


@dataclass(frozen=True)
class UpdateArrived:
    """A reply has arrived, and it is durable in the spool.

    `again`: it was accepted before a restart and is replayed. `came_late`: for a deferred reply, True if it arrived
    after its own deadline; None for every other reply.
    """

    update_id: UpdateId
    ask_id: str
    device: str
    base_version: int
    again: bool = False
    came_late: bool | None = None


@dataclass(frozen=True)
class FoldDone:
    """An accepted update was aggregated."""

    update_id: UpdateId


@dataclass(frozen=True)
class FoldRejected:
    """An accepted update could not be aggregated, for this reason."""

    update_id: UpdateId
    reason: str


@dataclass(frozen=True)
class AssignmentFailed:
    """A device will not reply to an assignment, for a reason of this kind with this text."""

    device: str
    ask_id: str
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


Input = (
    ReplacementSelected
    | UpdateArrived
    | FoldDone
    | FoldRejected
    | AssignmentFailed
    | DeviceConnected
    | DeviceDisconnected
    | Stop
    | Tick
)
Told = Iterable[tuple[Input, float]]  # (event, elapsed_s) pairs from before a restart, in the journal's order


# Actions: what the driver of a round has to do.


@dataclass(frozen=True)
class FoldUpdate:
    """Record that this update is accepted as the round's next, then aggregate it with this discount.

    `staleness`: model versions behind. `late`: True if it is late for the round or deadline of its assignment.
    """

    update_id: UpdateId
    staleness: int
    discount: float
    late: bool


@dataclass(frozen=True)
class DropUpdate:
    """Drop this update: it does not count, and its device adds it to its residual again."""

    update_id: UpdateId
    reason: str


@dataclass(frozen=True)
class DeferUpdate:
    """Keep this reply for the next round, because this one accepts no more."""

    update_id: UpdateId


@dataclass(frozen=True)
class MarkLost:
    """Record that a device will not reply in this round, with kind and text of the reason."""

    device: str
    ask_id: str
    kind: str
    text: str


@dataclass(frozen=True)
class Reinstate:
    """Record that a device that had disconnected is outstanding again, then make sure that it has its assignment."""

    device: str
    ask_id: str


@dataclass(frozen=True)
class SelectReplacement:
    """Record that this device is selected during the round, then send its assignment.

    The device trains from `base_version`, and has `deadline_s` seconds. `why` is the reason that the record shows.
    """

    device: str
    ask_id: str
    base_version: int
    deadline_s: float
    why: str
    instead_of: str = ""  # the device that it replaces; "" when it replaces none


@dataclass(frozen=True)
class RoundResult:
    """The round is closed for this reason.

    `folded` and `dropped` are the updates that count and those that do not. `outstanding` devices had not replied.
    """

    reason: CloseReason
    folded: tuple[UpdateId, ...]
    dropped: tuple[UpdateId, ...]
    outstanding: tuple[str, ...]


Action = FoldUpdate | DropUpdate | DeferUpdate | MarkLost | Reinstate | SelectReplacement | RoundResult


def ended(
    reason: CloseReason, folded: Sequence[UpdateId], dropped: Sequence[UpdateId], floor: int, outstanding: Sequence[str]
) -> RoundResult:
    """Return the result of a round that closes for this reason.

    A round with fewer than `floor` updates closes as `too-few`. After `too-few` or `stopped` the round makes no step:
    all updates are dropped, so their devices get them back.
    """
    if reason != "stopped" and len(folded) < floor:
        reason = "too-few"
    if reason in ("stopped", "too-few"):
        folded, dropped = (), (*dropped, *folded)
    return RoundResult(reason, tuple(folded), tuple(dropped), tuple(outstanding))
