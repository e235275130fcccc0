"""The facts of a secure round that the journal keeps: which phases were closed, and the sum that came out.

They tell of a device that it was there, in which phase it dropped out, how many bytes its messages had, and when.
Nothing else of a single device is in the journal of a secure run.

A round of a secure run has five phases: `advertise`, `share`, `masked`, `agree` and `unmask`. Each is closed once, by
a `PhaseClosed`, and a round that succeeds has one `SumUnmasked` behind the last. They stand apart from
`core/events.py`, whose events every run has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from thinwire.core.events import Event


@dataclass(frozen=True)
class PhaseClosed(Event):
    """Reports that a phase of a secure round was closed; it is journalled before a request of the next phase leaves.

    - `round`: its number, from 1.
    - `phase`: advertise, share, masked, agree or unmask.
    - `elapsed_s`: seconds since the round began.
    - `received`: maps each device whose message counts to the bytes of the message, in the order of arrival.
    - `dropped`: the devices that dropped out in this phase.
    - `reason`: why the phase `masked` ended: all, enough or deadline; it becomes the round's. "" for other phases.
    - `messages`: the SHA-256 of the file that holds the messages, which a resume reads again. It is "" for the masked
      vectors, which lie in the spool, and for `unmask`, whose messages are never stored.
    """

    round: int
    phase: str
    elapsed_s: float
    received: Mapping[str, int]
    dropped: list[str] = field(default_factory=list)
    reason: str = ""
    messages: str = ""


@dataclass(frozen=True)
class SumUnmasked(Event):
    """Reports that the masks were removed from the sum of a round.

    - `round`: its number, from 1.
    - `survivors`: how many clients' updates are in the sum.
    - `weight`: the sum of their weights.
    - `norm`: the L2 norm of the mean update.
    - `clip`: the largest L2 norm that one update may have in this round; a client scales a larger one down to it.
    - `next_clip`: the same of the next round, which differs if the plan says `clip = "auto"`.
    - `elapsed_s`: seconds since the round began.
    - `unmask_s`: the seconds of them in which the masks were computed and removed.
    """

    round: int
    survivors: int
    weight: int
    norm: float
    clip: float
    next_clip: float
    elapsed_s: float
    unmask_s: float = 0.0
