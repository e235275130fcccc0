"""A buffered round collects asynchronous updates; this is its state machine, which does no I/O.

A buffered plan uses it in place of the synchronous round (`round.py`), with the same events and actions
(`round_events.py`). No device waits for another one. Each device works all the time, from the model version that is
newest when it gets its assignment. Its update goes into the open buffer, and weighs less the more versions it is
behind.

Invariant:

- A device has at most one update in a buffer. Its second reply is deferred to the next buffer.
- An idle device without an update in the buffer gets an assignment at once, while fewer than `max_concurrency` devices
  work. Devices with an update in it follow: each gets one follow-up assignment, for the next buffer.
- The buffer closes with `buffer` when it holds `target_updates` updates, and it never holds more. It closes with
  `enough` when no device without an update in it works or can be selected. Then every online device has one there.
- No buffer waits for a device that missed the deadline of its assignment. The late update of such a device counts.

Paper: FedBuff (Nguyen et al. 2022).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from thinwire.core.events import CloseReason, Evaluated, RoundOpened
from thinwire.core.formatting import Reason
from thinwire.core.plan import RunPlan
from thinwire.core.types import ReplyHeader, UpdateId, assignment_id_of
from thinwire.server.context import RunContext
from thinwire.server.evaluation import final_evaluations
from thinwire.server.policy.assignment_terms import Deadline
from thinwire.server.policy.cohort import Cohort, select_for_buffer
from thinwire.server.round import RoundMachine
from thinwire.server.round_events import (
    Action,
    AggregationRejected,
    DeferUpdate,
    Input,
    MarkLost,
    ReplacementSource,
    SelectReplacement,
    SlotLease,
    UpdateArrived,
)
from thinwire.server.round_mode import RoundMode


@dataclass
class BufferedRound(RoundMachine):
    """A buffered round as a state machine without I/O, which knows the first assignment of each device in a buffer.

    >>> from thinwire.core.types import UpdateId
    >>> from thinwire.server.round_events import AggregationDone, RoundConfig, UpdateArrived
    >>> b = BufferedRound(RoundConfig(1, 0, {"a": "assignment-a", "b": "assignment-b"}, target_updates=1, min_updates=1,
    ...     opened_s=0.0, deadline_s=9.0))
    >>> b.on(UpdateArrived(UpdateId("run", "a", 1), "assignment-a", "a", 0), now=2.0)[0].discount
    1.0
    >>> b.on(AggregationDone(UpdateId("run", "a", 1)), now=2.1)[0].reason
    'buffer'
    """

    followed_up: set[str] = field(default_factory=set)  # devices with a follow-up assignment, for the next buffer
    at_work: dict[str, SlotLease] = field(default_factory=dict)  # device -> assignment before its deadline
    overdue: dict[str, SlotLease] = field(default_factory=dict)  # device -> assignment after its deadline
    buffered: set[UpdateId] = field(default_factory=set)  # updates in the buffer: aggregated, or accepted for it

    def __post_init__(self) -> None:
        self.at_work |= self.config.earlier
        super().__post_init__()

    @property
    def deadline_at(self) -> float:
        """Return the earliest deadline of an assignment, in seconds on the run's clock; infinity if no device works."""
        return min((work.until_s for work in self.at_work.values()), default=math.inf)

    @property
    def outstanding(self) -> tuple[str, ...]:
        """Return the devices whose reply may still be in time, to an assignment of this buffer or of an earlier one."""
        return tuple(self.at_work)

    @property
    def devices(self) -> frozenset[str]:
        """Return the devices with an update in the buffer."""
        return frozenset(update_id.device for update_id in self.buffered)

    def _decide(self, event: Input, now: float, replacements: ReplacementSource) -> list[Action]:
        actions = list[Action]()
        if not self.shut and len(self.buffered) >= self.config.target_updates:
            self.shut = "buffer"
        if not self.shut:
            actions += self._fill(now, replacements)
            if not isinstance(event, AggregationRejected):
                # After a rejection a deferred reply may fill the gap: the driver offers it first.
                self.shut = None if self._awaits_devices else "enough"
        if not self.shut:
            actions += self._assign_follow_ups(now)
        return actions

    def _reject(self, update_id: UpdateId, now: float) -> None:
        self.buffered.discard(update_id)
        if self.shut != "stopped":
            self.shut = None  # the buffer has room again

    def _disconnect(self, device: str, why: str) -> list[Action]:
        working = self.at_work.get(device) or self.overdue.get(device)
        return self._lose(device, working.assignment_id, "offline", why) if working else []

    def _stop(self) -> None:
        self.shut = "stopped"

    def _on_reply(self, header: UpdateArrived, now: float) -> list[Action]:
        device, assignment_id = header.device, header.assignment_id
        if assignment_id in self.replied:
            return self._drop(header.update_id, "duplicate")
        in_time = self._remove(self.at_work, device, assignment_id)
        self._remove(self.overdue, device, assignment_id)
        if not header.again and (self.shut or device in self.devices):
            return [DeferUpdate(header.update_id)]
        self.replied[assignment_id] = header.update_id
        if self.assignments.get(device) == assignment_id:
            self.lost.pop(device, None)
        if self._staleness(header) > self.config.max_staleness:
            return self._drop(header.update_id, "stale")
        self.buffered.add(header.update_id)
        return [self._accept(header, late=not in_time if header.came_late is None else header.came_late)]

    def _lose(self, device: str, assignment_id: str, kind: str, text: str) -> list[Action]:
        """Forget an assignment that gets no reply, and return `MarkLost` if this buffer made it.

        The driver records the failure of an earlier buffer's assignment.
        """
        known = self._remove(self.at_work, device, assignment_id) or self._remove(self.overdue, device, assignment_id)
        if not known or self.assignments.get(device) != assignment_id:
            return []
        self.lost[device] = kind
        return [MarkLost(device, assignment_id, kind, text)]

    @staticmethod
    def _remove(working: dict[str, SlotLease], device: str, assignment_id: str) -> bool:
        """Remove the assignment from `working`, and return True if the device was working on it."""
        found = device in working and working[device].assignment_id == assignment_id
        if found:
            del working[device]
        return found

    def _begin(self, device: str, assignment_id: str, now: float) -> None:
        if device in self.devices:
            self.followed_up.add(device)
        self.assignments.setdefault(device, assignment_id)
        self.at_work[device] = SlotLease(assignment_id, now + self.config.deadline_s)

    def _pass_time(self, now: float) -> None:
        """Move the assignments whose deadline has passed to `overdue`."""
        for device in [device for device, work in self.at_work.items() if now >= work.until_s]:
            self.overdue[device] = self.at_work.pop(device)

    def _closing_reason(self, now: float) -> CloseReason | None:
        if len(self.buffered) >= self.config.target_updates:
            return "buffer"
        return None if self._awaits_devices else "enough"

    @property
    def _awaits_devices(self) -> bool:
        """Return True if a device without an update in the buffer is at work."""
        return not self.at_work.keys() <= self.devices

    def _slot_is_free(self) -> bool:
        """Return True if a concurrency slot is free."""
        return len(self.at_work) < (self.config.max_concurrency or math.inf)

    def _fill(self, now: float, replacements: ReplacementSource) -> list[Action]:
        """Select idle devices without an update in the buffer, as many as slots are free."""
        actions = list[Action]()
        if not self._slot_is_free():
            return actions
        unavailable = self.assignments.keys() | self.devices | self.at_work.keys()
        for replacement in replacements(math.inf):
            if replacement.device not in unavailable:
                actions.append(self._assign(replacement.device, replacement.assignment_id, Reason("idle", {})))
                self._begin(replacement.device, replacement.assignment_id, now)
            if not self._slot_is_free():
                break
        return actions

    def _assign_follow_ups(self, now: float) -> list[Action]:
        """Give devices with an update in the buffer a follow-up assignment, one each, as many as slots are free."""
        actions = list[Action]()
        for device in sorted(self.devices - self.followed_up - self.at_work.keys()):
            if self._slot_is_free() and (assignment_id := self.config.follow_up(device)):
                actions.append(self._assign(device, assignment_id, Reason("buffered", {})))
                self._begin(device, assignment_id, now)
        return actions

    def _assign(self, device: str, assignment_id: str, why: Reason) -> SelectReplacement:
        """Return the selection of a device, with the reasons."""
        at_work = Reason("at-work", {"at_work": len(self.at_work)})
        if most := self.config.max_concurrency:
            at_work = Reason("slots-taken", {"at_work": len(self.at_work), "most": most})
        return SelectReplacement(
            device, assignment_id, self.config.base_version, self.config.deadline_s, [why, at_work]
        )

    @property
    def _reported_outstanding(self) -> tuple[str, ...]:
        return tuple(device for device in self.overdue if device not in self.devices)


class BufferedMode(RoundMode):
    """The buffered mode: one buffer is open, and devices work on assignments of this buffer and of earlier ones."""

    counts_alike = True  # the mean of a buffer is over updates, not over examples

    @classmethod
    def is_for(cls, plan: RunPlan) -> bool:
        """Return True if the plan's rounds are buffered."""
        return plan.cohort.mode == "buffered"

    def select(self, running: RunContext, number: int) -> Cohort:
        """Return all idle devices, as far as concurrency slots are free."""
        at_work = sum(running.elapsed < assigned.due_s for assigned in running.run_state.ledger.oldest())
        present, unable = running.online.names, running.unable()
        return select_for_buffer(self.plan, number, present, unable, self.busy(running), at_work)

    def may_open(self, running: RunContext, cohort: Cohort, min_updates: int) -> bool:
        """Return True if the buffer selects a device, or can receive a reply without that."""
        at_work = (running.elapsed < assigned.due_s for assigned in running.run_state.ledger.oldest())
        return bool(cohort.selected or running.deferred) or any(at_work)

    def expected_to_reply(self, running: RunContext, cohort: Cohort, min_updates: int) -> tuple[Sequence[str], int]:
        """Return all devices that can take part, and their number.

        Each assignment has its own deadline, and any idle device may be selected later.
        """
        able = running.eligibility.able()
        return able, len(able)

    def deadline_in_waves(self, auto: Deadline, devices: int) -> Deadline:
        """Return the deadline unchanged, since it applies to each assignment."""
        return auto

    def notes(self, able: int) -> list[Reason]:
        """Return warnings about a buffer that does not fit the devices."""
        return notes(self.plan, able)

    def machine(self, opened: RoundOpened, running: RunContext) -> BufferedRound:
        """Build the state machine of a buffer; a reply that arrived while the previous one was open is in time."""
        earlier = {
            assigned.device: SlotLease(
                assigned.assignment_id, math.inf if assigned.assignment_id in running.deferred else assigned.due_s
            )
            for assigned in running.run_state.ledger.oldest()
            if assigned.round != opened.round
        }
        follow_up = partial(self._follow_up, running, opened.round)
        return BufferedRound(replace(self.config(opened), earlier=earlier, follow_up=follow_up))

    def _follow_up(self, running: RunContext, number: int, device: str) -> str:
        """Return the `assignment_id` of a follow-up assignment for the next buffer; "" if the device cannot get one."""
        if running.run_state.steps_made + 1 >= self.plan.run.rounds or not running.is_free(device):
            return ""
        return assignment_id_of(running.run_id, number, device, follow_up=True)

    def summed_together(self, running: RunContext, number: int) -> int:
        """Return how many updates fill the buffer."""
        return self.plan.cohort.buffer

    def evaluate(
        self, running: RunContext, opened: RoundOpened, in_time: Sequence[ReplyHeader], now: float
    ) -> list[Evaluated]:
        """Return the evaluations of all versions that no device evaluates any more."""
        return final_evaluations(running, now)

    def defer(self, running: RunContext, header: ReplyHeader) -> None:
        """Keep a reply for the next buffer, which frees its device."""
        running.defer(header)

    def cancel_remaining(self, running: RunContext) -> None:
        """Cancel all assignments after the last buffer, and record the evaluations that are final now."""
        running.fleet.cancel([assigned.assignment_id for assigned in running.run_state.ledger.oldest()])
        running.record(*final_evaluations(running, running.clock.wall(), over=True))


def notes(plan: RunPlan, able: int) -> list[Reason]:
    """Return warnings for the user who starts a buffered run while `able` devices can take part.

    They describe what the plan does with these devices where the user may not expect it. Such a plan is never refused.

    >>> plan = RunPlan.parse('[run]\\ntask="t"\\n[local]\\nlr=1\\n[cohort]\\nmode="buffered"\\nbuffer=4')
    >>> notes(plan, 3)
    [Reason(code='large-buffer', numbers={'buffer': 4, 'devices': 3})]
    >>> notes(plan, 9)
    []
    """
    cohort = plan.cohort
    at_work = min(able, cohort.max_concurrency or able)
    behind = at_work // cohort.buffer  # buffers that fill while one device works, if all are equally fast
    if able < cohort.buffer:
        return [Reason("large-buffer", {"buffer": cohort.buffer, "devices": able})]
    if behind > cohort.max_staleness:
        most = cohort.max_staleness
        return [
            Reason(
                "stale-buffer",
                {
                    "at_work": at_work, "buffer": cohort.buffer, "staleness": behind, "most": most,
                    "concurrency": cohort.buffer * most,
                },
            )
        ]  # fmt: skip
    if cohort.buffer < at_work == able <= 2 * cohort.buffer:
        return [Reason("same-buffer", {"devices": able, "buffer": cohort.buffer})]
    return []
