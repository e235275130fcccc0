"""What can happen to a round and what it can decide: the vocabulary of server/round.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from thinwire.core.events import CloseReason
from thinwire.core.types import UpdateId


@dataclass(frozen=True)
class AtWork:
    """An ask that a device works on, and how long it holds a place for that, in seconds on the run's clock. `yields_s`:
    from when on it gives the place up to answers that a step would lack otherwise.
    """

    ask_id: str
    until_s: float
    yields_s: float = math.inf


def unknown_s(_device: str) -> float:
    """No device has given an answer yet."""
    return 0.0


def no_more(_device: str) -> str:
    """No device is asked twice in a round."""
    return ""


@dataclass(frozen=True)
class Terms:
    """What was decided about a round when it opened. `asks`: device -> ask_id; times on the run's clock, seconds.

    `earlier`: who is still at work on an ask of a round before. `slowest_s`: how long a device's answers took of late.
    Of a buffer (buffered_round.py) `target` updates fill it, `deadline_s` is each ask's own, from when it is made, and
    `further` gives the id of another ask to a device; "" when it cannot be asked now.
    """

    number: int
    base_version: int
    asks: Mapping[str, str]
    target: int  # folded updates that are enough
    floor: int  # fewest that make a step
    opened_s: float
    deadline_s: float
    late: Literal["fold", "drop"] = "fold"
    max_staleness: int = 5
    staleness_exponent: float = 0.5
    max_concurrency: int = 0  # devices that may be at work at once; 0: no limit
    earlier: Mapping[str, AtWork] = field(default_factory=dict)
    slowest_s: Callable[[str], float] = unknown_s
    further: Callable[[str], str] = no_more


@dataclass(frozen=True)
class Spare:
    """A device that is not asked and could be, and the id that its ask would have."""

    device: str
    ask_id: str


Spares = Callable[[float], Iterable[Spare]]  # who could answer within so many seconds, first whom to ask first


def nobody(_left_s: float) -> Iterable[Spare]:
    """Nobody can be asked in the middle of the round."""
    return ()


# What happens to a round.


@dataclass(frozen=True)
class Asked:
    """What an `AskNow` decided before a restart, told again."""

    device: str
    ask_id: str
    instead_of: str = ""


@dataclass(frozen=True)
class Head:
    """An answer has arrived and is durable in the spool; `again`: it was accepted before a restart.

    `came_late` is known of an answer that was deferred: whether its own deadline was over when it came.
    """

    update_id: UpdateId
    ask_id: str
    device: str
    base_version: int
    again: bool = False
    came_late: bool | None = None


@dataclass(frozen=True)
class Folded:
    update_id: UpdateId


@dataclass(frozen=True)
class Refused:
    """A payload that could not be folded, and why."""

    update_id: UpdateId
    reason: str


@dataclass(frozen=True)
class Failed:
    device: str
    ask_id: str
    kind: str
    text: str


@dataclass(frozen=True)
class Joined:
    device: str


@dataclass(frozen=True)
class Left:
    device: str
    why: str


@dataclass(frozen=True)
class Stop:
    """A person stops the run."""


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Input = Asked | Head | Folded | Refused | Failed | Joined | Left | Stop | Tick
Told = Iterable[tuple[Input, float]]  # what happened before a restart in the journal's order, with when: elapsed_s


# What is to be done.


@dataclass(frozen=True)
class FoldUpdate:
    """Journal this answer as the round's next, then fold it with this discount."""

    update_id: UpdateId
    staleness: int
    discount: float
    late: bool


@dataclass(frozen=True)
class Drop:
    """The answer does not count; its sender gets it back."""

    update_id: UpdateId
    reason: str


@dataclass(frozen=True)
class Defer:
    """The round is shut: the answer belongs to the next one."""

    update_id: UpdateId


@dataclass(frozen=True)
class Lose:
    """A device will not answer in this round, and why."""

    device: str
    ask_id: str
    kind: str
    text: str


@dataclass(frozen=True)
class Back:
    """Journal that a device that had left is waited for again, then see to it that it has its ask."""

    device: str
    ask_id: str


@dataclass(frozen=True)
class AskNow:
    """Journal that this device is asked in the middle of the round, then ask it: from this version, for so long."""

    device: str
    ask_id: str
    base_version: int
    deadline_s: float
    why: str
    instead_of: str = ""  # the device whose place it takes, where there is one


@dataclass(frozen=True)
class Closed:
    """The round is over for this reason; `outstanding` devices had not answered."""

    reason: CloseReason
    folded: tuple[UpdateId, ...]
    dropped: tuple[UpdateId, ...]
    outstanding: tuple[str, ...]


Action = FoldUpdate | Drop | Defer | Lose | Back | AskNow | Closed


def ended(
    reason: CloseReason, folded: Sequence[UpdateId], dropped: Sequence[UpdateId], floor: int, outstanding: Sequence[str]
) -> Closed:
    """How a round ends that is shut for this reason: stopped, or with fewer updates than `floor`, it makes no step, and
    all goes back to its senders.
    """
    if reason != "stopped" and len(folded) < floor:
        reason = "too-few"
    if reason in ("stopped", "too-few"):
        folded, dropped = (), (*dropped, *folded)
    return Closed(reason, tuple(folded), tuple(dropped), tuple(outstanding))
