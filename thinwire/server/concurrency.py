"""Concurrency slots decide which selected devices count against `[cohort] max_concurrency` of a synchronous round.

A device's slot is free again when the device replies or is lost. A frozen device does neither, so a slot also expires:

- It expires after max(wave, 2 x slowest recent reply), never later than the deadline. A wave is the deadline divided by
  the number of waves. Thus a slow device keeps its slot, but one that once slept for hours does not keep it for hours.
- It expires after one wave when the remaining time is just enough for the updates that `min_updates` still needs, at a
  wave each. Otherwise one frozen device would cost the round its step.
- A device that is still busy with a closed round holds a slot of the current one. That slot expires at 2 x min(slowest
  recent reply, time allowed) after the assignment. A device without history holds no slot.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from thinwire.server.round_events import RoundConfig, SlotLease
from thinwire.server.state.run_state import RunState

SLOT_FACTOR = 2.0  # factor on a device's slowest recent reply, and on the time that its assignment allowed


def wave_s(deadline_s: float, target: int, most: int) -> float:
    """Return the seconds of one wave, in a round that needs `target` replies, `most` of them at once.

    >>> wave_s(100.0, target=7, most=2)
    25.0
    """
    return deadline_s / max(1, math.ceil(target / most))


def slot_s(deadline_s: float, wave_s: float, slowest_s: float) -> float:
    """Return the seconds after which a slot expires, for a device whose slowest recent reply took `slowest_s`.

    >>> [slot_s(100.0, wave_s=25.0, slowest_s=seconds) for seconds in (0.0, 20.0, 28_800.0)]
    [25.0, 40.0, 100.0]
    """
    return min(deadline_s, max(wave_s, SLOT_FACTOR * slowest_s))


@dataclass
class ConcurrencySlots:
    """The concurrency slots of one round of a plan with `max_concurrency`."""

    config: RoundConfig
    _working: dict[str, SlotLease] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._working |= self.config.earlier

    @property
    def _wave_s(self) -> float:
        """Return the seconds of one wave of this round."""
        return wave_s(self.config.deadline_s, self.config.target_updates, self.config.max_concurrency)

    def take(self, device: str, assignment_id: str, now: float) -> None:
        """Give the device a slot for this assignment from `now` on."""
        until_s = now + slot_s(self.config.deadline_s, self._wave_s, self.config.slowest_s(device))
        self._working[device] = SlotLease(assignment_id, until_s, now + self._wave_s)

    def free(self, device: str, assignment_id: str = "") -> None:
        """Free the device's slot if it works on this assignment; on any assignment if `assignment_id` is ""."""
        if device in self._working and assignment_id in ("", self._working[device].assignment_id):
            del self._working[device]

    def silent(self, assignments: Mapping[str, str], held: Container[str]) -> list[str]:
        """Return the devices that work on one of these assignments without a slot among `held`."""
        working = self._working.items()
        return [
            device for device, work in working if device not in held and assignments.get(device) == work.assignment_id
        ]

    def held(self, now: float, lacking: int) -> dict[str, SlotLease]:
        """Return device -> assignment for each slot that has not expired at `now`.

        `lacking` is the number of updates that the round still needs for a step. Assignments younger than one wave may
        still bring some of these. If the remaining time is just enough for the others, slots expire after one wave.
        """
        left_s = self.config.opened_s + self.config.deadline_s - now
        lacking -= sum(now < work.yields_s < math.inf for work in self._working.values())
        scarce = lacking > 0 and left_s <= self._wave_s * math.ceil(lacking / self.config.max_concurrency)
        return {
            device: work
            for device, work in self._working.items()
            if now < (min(work.until_s, work.yields_s) if scarce else work.until_s)
        }


def slowest_s(run_state: RunState, device: str) -> float:
    """Return the seconds of the slowest of a device's recent replies; 0 if it has none."""
    return max(run_state.reply_seconds.get(device, ()), default=0.0)


def at_work_before(run_state: RunState, number: int) -> Mapping[str, SlotLease]:
    """Return the devices that are busy with an earlier round, and when the slot of each expires."""
    return {
        assigned.device: SlotLease(
            assigned.assignment_id,
            assigned.assigned_s + SLOT_FACTOR * min(slowest_s(run_state, assigned.device), assigned.deadline_s),
        )
        for assigned in run_state.ledger.oldest()
        if assigned.round != number
    }
