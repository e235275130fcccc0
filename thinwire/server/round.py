"""Runs a synchronous round, a state machine without I/O: events go in, actions come out (`round_events.py`).

The machine sees the headers of replies, never their payloads. It accepts, defers or drops each reply (`_on_reply`);
reasons of drops are `late`, `stale` and `duplicate`. A reply that arrived before the deadline is in time, however late
its aggregation ends. A round closes when all updates that it accepted are aggregated or rejected. It closes for one
reason, which the journal, the command line and the dashboard all show.

Fewer replies than `target` may be possible: devices were lost, updates could not be aggregated, or `max_concurrency`
held selections back. Then the round selects replacements, as long as they have time to reply. The table of states is
short:

    open      the round accepts replies until `target` are aggregated, no device is outstanding, the deadline passes,
              or a person stops the run
    shut      the round accepts nothing more and defers what comes to the next round; aggregation still runs; the round
              is open again when an update is rejected in time and another device can be selected
    closed    the reason is fixed

Concurrency slots decide which selected devices count against `max_concurrency`. A device's slot is free again when the
device replies or is lost. A frozen device does neither, so a slot also expires:

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
from itertools import islice

from thinwire.core.events import CloseReason
from thinwire.core.formatting import Reason, Reasons
from thinwire.core.types import UpdateId
from thinwire.server.policy.assignment_terms import listed
from thinwire.server.round_events import (
    Action,
    DeferUpdate,
    Input,
    MarkLost,
    Replacement,
    ReplacementSource,
    RoundConfig,
    SelectReplacement,
    SlotLease,
    UpdateArrived,
)
from thinwire.server.round_machine import RoundMachine
from thinwire.server.state.run_state import RunState


@dataclass
class Round(RoundMachine):
    """A synchronous round as a state machine without I/O.

    `on` takes events as they happen; `replay` takes those from before a restart. No event may follow `RoundResult`.

    >>> from thinwire.core.types import UpdateId
    >>> from thinwire.server.round_events import AggregationDone, RoundConfig, UpdateArrived
    >>> r = Round(RoundConfig(1, 0, {"a": "assignment-a"}, target_updates=1, min_updates=1, opened_s=0, deadline_s=60))
    >>> r.on(UpdateArrived(UpdateId("run", "a", 1), "assignment-a", "a", 0), now=2.0)[0].discount
    1.0
    >>> r.on(AggregationDone(UpdateId("run", "a", 1)), now=2.1)[0].reason
    'all'
    """

    instead: dict[str, str] = field(default_factory=dict)  # replacement -> the device that it replaces, or ""
    aggregated_in_time: int = 0
    spoiled: list[UpdateId] = field(default_factory=list)  # those of `in_time` that could not be aggregated
    waited_for: set[str] = field(default_factory=set)  # selected devices, neither replied nor lost

    def __post_init__(self) -> None:
        self.places = ConcurrencySlots(self.terms)
        super().__post_init__()

    @property
    def deadline_at(self) -> float:
        """Return the time of the deadline in seconds on the run's clock."""
        return self.terms.opened_s + self.terms.deadline_s

    @property
    def outstanding(self) -> tuple[str, ...]:
        """Return the devices that have neither replied nor been lost, in the order of selection."""
        return tuple(device for device in self.assignments if device in self.waited_for)

    @property
    def good(self) -> int:
        """Return the number of updates in time that have arrived and were not rejected."""
        return len(self.in_time) - len(self.spoiled)

    @property
    def possible(self) -> int:
        """Return the number of updates in time that have arrived or may still arrive."""
        return self.good + len(self.waited_for)

    def _decide(self, event: Input, now: float, replacements: ReplacementSource) -> list[Action]:
        lacking = not self.shut and (self.lost or self.spoiled or self.terms.max_concurrency)
        actions = self._fill(now, replacements) if lacking else []
        self.shut = self.shut or self._shutting(now)
        return actions

    def _replace(self, device: str, assignment_id: str, instead_of: str, now: float) -> None:
        self.instead[device] = instead_of
        self._begin(device, assignment_id, now)

    def _count(self, update_id: UpdateId) -> None:
        super()._count(update_id)
        self.aggregated_in_time += update_id in self.in_time

    def _reject(self, update_id: UpdateId, now: float) -> None:
        if update_id in self.in_time:
            self.spoiled.append(update_id)
        if self.shut != "stopped" and now < self.deadline_at:
            self.shut = None  # there is time to select another device

    def _leave(self, device: str, why: str) -> list[Action]:
        self.places.free(device)
        return self._lose(device, self.assignments.get(device, ""), "offline", why)

    def _stop(self) -> None:
        self.shut = self.shut or "stopped"

    def _on_reply(self, header: UpdateArrived, now: float) -> list[Action]:
        terms = self.terms
        self.places.free(header.device, header.assignment_id)
        if not header.again and (self.shut or now >= self.deadline_at):
            return [DeferUpdate(header.update_id)]
        if header.assignment_id in self.answered:
            return self._drop(header.update_id, "duplicate")
        in_time = self.assignments.get(header.device) == header.assignment_id
        if not in_time and terms.late == "drop":
            return self._drop(header.update_id, "late")
        if self._staleness(header) > terms.max_staleness:
            return self._drop(header.update_id, "stale")
        self.answered[header.assignment_id] = header.update_id
        if in_time:
            self.lost.pop(header.device, None)
            self.in_time.add(header.update_id)
            self.waited_for.discard(header.device)
        return [self._fold(header, late=not in_time)]

    def _lose(self, device: str, assignment_id: str, kind: str, text: str) -> list[Action]:
        """Note that a device will not reply to this assignment, unless it replied or was lost before."""
        self.places.free(device, assignment_id)
        if self.assignments.get(device) != assignment_id or assignment_id in self.answered or device in self.lost:
            return []
        self.lost[device] = kind
        self.waited_for.discard(device)
        return [MarkLost(device, assignment_id, kind, text)]

    def _begin(self, device: str, assignment_id: str, now: float) -> None:
        self.assignments[device] = assignment_id
        self.waited_for.add(device)
        self.places.take(device, assignment_id, now)

    def _places(self, now: float) -> tuple[int, list[Reason]]:
        """Return the number of free slots, and the reasons about slots for a selection.

        One slot counts as free if none is, but no device works on this round.
        """
        lacking = self.terms.min_updates - self.good
        held = self.places.held(now, lacking)
        silent = self.places.silent(self.assignments, held)
        reasons = [Reason("silent", {"count": len(silent), "devices": listed(silent)})] if silent else []
        free = self.terms.max_concurrency - len(held)
        if free > 0 or any(self.assignments.get(device) == work.assignment_id for device, work in held.items()):
            return free, reasons
        return 1, [*reasons, Reason("none-at-work", {})]

    def _fill(self, now: float, replacements: ReplacementSource) -> list[Action]:
        """Select as many replacements as updates are missing and slots are free, among devices that can
        reply in time.
        """
        left_s, short, slots = self.deadline_at - now, self.terms.target_updates - self.possible, list[Reason]()
        if short > 0 and self.terms.max_concurrency:
            free, slots = self._places(now)
            short = min(short, free)
        if short <= 0 or left_s <= 0:
            return []
        others = (replacement for replacement in replacements(left_s) if replacement.device not in self.assignments)
        return [self._assign(replacement, now, slots) for replacement in islice(others, short)]

    def _assign(self, replacement: Replacement, now: float, slots: Reasons) -> SelectReplacement:
        """Select a replacement, with the reasons."""
        left_s = self.deadline_at - now
        target = self.terms.target_updates
        why = [Reason("replaces", {"possible": self.possible, "target": target, "left_s": left_s}), *slots]
        self.instead[replacement.device] = instead_of = self._vacant() if self.lost or self.spoiled else ""
        self._begin(replacement.device, replacement.assignment_id, now)
        return SelectReplacement(
            replacement.device, replacement.assignment_id, self.terms.base_version, left_s, why, instead_of
        )

    def _vacant(self) -> str:
        """Return a device that was lost, or whose update was rejected, and that has no replacement yet; "" if there is
        none.
        """
        replaced, spoiled = set(self.instead.values()), (update_id.device for update_id in self.spoiled)
        return next((device for device in (*self.lost, *spoiled) if device not in replaced), "")

    def _shutting(self, now: float) -> CloseReason | None:
        if not self.waited_for:
            out_of_candidates = self.terms.max_concurrency and self.possible < self.terms.target_updates
            return "enough" if self.lost or out_of_candidates else "all"
        if self.aggregated_in_time >= self.terms.target_updates:
            return "enough"
        if now >= self.deadline_at:
            return "deadline"
        return None


PATIENCE = 2.0  # factor on a device's slowest recent reply, and on the time that its assignment allowed


def share_s(deadline_s: float, target: int, most: int) -> float:
    """Return the seconds of one wave, in a round that needs `target` replies, `most` of them at once.

    >>> share_s(100.0, target=7, most=2)
    25.0
    """
    return deadline_s / max(1, math.ceil(target / most))


def place_s(deadline_s: float, share_s: float, slowest_s: float) -> float:
    """Return the seconds after which a slot expires, for a device whose slowest recent reply took `slowest_s`.

    >>> [place_s(100.0, share_s=25.0, slowest_s=seconds) for seconds in (0.0, 20.0, 28_800.0)]
    [25.0, 40.0, 100.0]
    """
    return min(deadline_s, max(share_s, PATIENCE * slowest_s))


@dataclass
class ConcurrencySlots:
    """The concurrency slots of one round; no device holds one if the plan sets no `max_concurrency`."""

    terms: RoundConfig
    _working: dict[str, SlotLease] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._working |= self.terms.earlier

    @property
    def _share_s(self) -> float:
        """Return the seconds of one wave of this round."""
        return share_s(self.terms.deadline_s, self.terms.target_updates, self.terms.max_concurrency)

    def take(self, device: str, assignment_id: str, now: float) -> None:
        """Give the device a slot for this assignment from `now` on."""
        if self.terms.max_concurrency:
            until_s = now + place_s(self.terms.deadline_s, self._share_s, self.terms.slowest_s(device))
            self._working[device] = SlotLease(assignment_id, until_s, now + self._share_s)

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
        left_s = self.terms.opened_s + self.terms.deadline_s - now
        lacking -= sum(now < work.yields_s < math.inf for work in self._working.values())
        scarce = lacking > 0 and left_s <= self._share_s * math.ceil(lacking / self.terms.max_concurrency)
        return {
            device: work
            for device, work in self._working.items()
            if now < (min(work.until_s, work.yields_s) if scarce else work.until_s)
        }


def slowest_s(past: RunState, device: str) -> float:
    """Return the seconds of the slowest of a device's recent replies; 0 if it has none."""
    return max(past.took.get(device, ()), default=0.0)


def at_work_before(past: RunState, number: int) -> Mapping[str, SlotLease]:
    """Return the devices that are busy with an earlier round, and when the slot of each expires."""
    return {
        assigned.device: SlotLease(
            assigned.assignment_id,
            assigned.assigned_s + PATIENCE * min(slowest_s(past, assigned.device), assigned.deadline_s),
        )
        for assigned in past.ledger.oldest()
        if assigned.round != number
    }
