"""What a run without a fault has to do to take in what a run with one took in: the same answers, each in its round.

Two runs are to be compared where the order of accepted heads and deadline ticks is the same (run_outcome.py).
The gate holds the order of devices in a round and of rounds; here is what is left of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.support.passing import Answer
from tests.support.run_outcome import WRONG
from thinwire.core.events import Event, RoundClosed, RoundOpened, StateLost, UpdateAccepted, UpdateDropped


@dataclass(frozen=True)
class Alike:
    """`absent`: the rounds of each device whose assignments it fails. `restarted`: those that it answers with a
    residual of zero, since it said that it had lost its state. `late`: answers that are approved when a later round is
    open, since a deadline passed before them. `why_not`: no run without the fault takes in the same.
    """

    absent: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    restarted: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    late: Mapping[Answer, int] = field(default_factory=dict)
    why_not: str = ""

    @property
    def key(self) -> str:
        """The same where the same is to be done."""
        return str([sorted(each.items(), key=str) for each in (self.absent, self.restarted, self.late)])

    def of(self, device: str) -> str:
        """What it is told (tests/support/scripted_client.py); "" where there is nothing."""
        told = {"absent": self.absent.get(device, ()), "again": self.restarted.get(device, ())}
        return json.dumps(told) if any(told.values()) else ""


def alike(events: Sequence[Event], devices: Sequence[str]) -> Alike:
    """What a run without a fault has to do to take in what this one did."""
    wrong = {e.update_id for e in events if isinstance(e, UpdateDropped) and e.reason in WRONG}
    taken = [e for e in events if isinstance(e, UpdateAccepted) and e.update_id not in wrong]
    came = {Answer(e.assignment_round, e.device) for e in taken}
    opened = [e.round for e in events if isinstance(e, RoundOpened)]
    absent = {device: tuple(n for n in opened if Answer(n, device) not in came) for device in devices}
    said = {e.update_id for e in events if isinstance(e, StateLost)}
    restarted = {device: tuple(e.assignment_round for e in taken if e.device == device and e.update_id in said)
            for device in devices}  # fmt: skip
    late = {Answer(e.assignment_round, e.device): e.round for e in taken if e.round != e.assignment_round}
    waited = {Answer(e.round, device) for e in events if isinstance(e, RoundClosed) and e.reason == "deadline"
              for device in e.outstanding}  # fmt: skip
    if late.keys() - waited:
        return Alike(why_not="an answer came after its round had closed without it, and no deadline closed it")
    return Alike(_some(absent), _some(restarted), late)


def _some(rounds: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {device: numbers for device, numbers in rounds.items() if numbers}
