"""Runs a synchronous round, a state machine without I/O: events go in, actions come out (`round_events.py`).

The machine sees the headers of replies, never their payloads. It accepts, defers or drops each reply (`_on_reply`);
reasons of drops are `late`, `stale` and `duplicate`. A reply that is handled before the deadline is in time, however
late its aggregation ends. A round closes when all updates that it accepted are aggregated or rejected. It closes for
one reason, which the journal, the command line and the dashboard all show.

Fewer replies than `target_updates` may be possible: devices were lost, updates could not be aggregated, or
`max_concurrency` held selections back. Then the round selects replacements, as long as they have time to reply. The
table of states is short:

    open      the round accepts replies until `target_updates` are aggregated, no device is outstanding, the deadline
              passes, or a person stops the run
    shut      the round accepts nothing more and defers what comes to the next round; aggregation still runs; the round
              is open again when an update is rejected in time and another device can be selected
    closed    the reason is fixed

With `max_concurrency`, concurrency slots decide which devices are at work at once (`concurrency.py`). Buffered and
secure rounds have state machines of their own, and share `RoundMachine` with this one.

Invariant: a round ends with exactly one `RoundResult`, which holds one reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import islice

from thinwire.core.events import NO_STEP, CloseReason, DropReason
from thinwire.core.formatting import Reason, Reasons
from thinwire.core.types import UpdateId
from thinwire.server.concurrency import ConcurrencySlots
from thinwire.server.policy.assignment_terms import first_names
from thinwire.server.round_events import (
    Action,
    AggregateUpdate,
    AggregationDone,
    AggregationRejected,
    AssignmentFailed,
    DeferUpdate,
    DeviceConnected,
    DeviceDisconnected,
    DropUpdate,
    Input,
    MarkLost,
    PastEvents,
    Reinstate,
    Replacement,
    ReplacementSelected,
    ReplacementSource,
    RoundConfig,
    RoundResult,
    SelectReplacement,
    Stop,
    UpdateArrived,
    no_replacements,
)


@dataclass
class RoundMachine:
    """Holds what all rounds share: the selected devices, and the outcomes of their updates.

    `replay` takes the events from before a restart, and comes first. No event may follow `RoundResult`.
    """

    config: RoundConfig
    assignments: dict[str, str] = field(default_factory=dict)  # device -> assignment_id, in the order of selection
    aggregating: set[UpdateId] = field(default_factory=set)  # accepted, and not yet in the sum
    aggregated: list[UpdateId] = field(default_factory=list)
    dropped: list[UpdateId] = field(default_factory=list)
    replied: dict[str, UpdateId] = field(default_factory=dict)  # assignment_id -> the update of its reply
    lost: dict[str, str] = field(default_factory=dict)  # device -> kind
    in_time: set[UpdateId] = field(default_factory=set)  # of a synchronous round: updates for its own assignments
    shut: CloseReason | None = None
    closed: RoundResult | None = None

    def __post_init__(self) -> None:
        for device, assignment_id in self.config.assignments.items():
            self._begin(device, assignment_id, self.config.opened_s)

    @property
    def deadline_at(self) -> float:
        """Return the time of the next deadline, in seconds on the run's clock."""
        raise NotImplementedError

    @property
    def outstanding(self) -> tuple[str, ...]:
        """Return the devices whose reply may still be in time."""
        raise NotImplementedError

    def on(self, event: Input, now: float, replacements: ReplacementSource = no_replacements) -> list[Action]:
        """Apply one event and return the actions that follow; `now` is in seconds on the run's clock.

        `replacements` is called only when another device may be selected. Raise `RuntimeError` if the round is closed.
        """
        if self.closed:
            raise RuntimeError(f"round {self.config.number} is closed: {event}")
        self._pass_time(now)
        actions = [*self._apply(event, now), *self._decide(event, now, replacements)]
        return [*actions, self._close()] if self.shut and not self.aggregating else actions

    def _decide(self, event: Input, now: float, replacements: ReplacementSource) -> list[Action]:
        """Select devices, and decide whether the round accepts no more, after an event was applied."""
        raise NotImplementedError

    def replay(self, past: PastEvents) -> None:
        """Apply the events from before a restart, without returning actions.

        The journal holds all that follows from these events, except the round's close, which is decided here.
        """
        now = -math.inf
        for event, now in past:
            self._pass_time(now)
            self._apply(event, now)
        if now > -math.inf:
            self.shut = self._closing_reason(now)
        if self.shut and not self.aggregating:
            self._close()

    def _apply(self, event: Input, now: float) -> list[Action]:
        """Apply one event to the state, and return the actions that it alone causes."""
        match event:
            case ReplacementSelected(device, assignment_id, instead_of):
                self._replace(device, assignment_id, instead_of, now)
            case UpdateArrived():
                return self._on_reply(event, now)
            case AggregationDone(update_id):
                self.aggregating.discard(update_id)
                self._count(update_id)
            case AggregationRejected(update_id, reason, detail):
                self.aggregating.discard(update_id)
                self._reject(update_id, now)
                return self._drop(update_id, reason, detail)
            case AssignmentFailed(device, assignment_id, kind, text):
                return self._lose(device, assignment_id, kind, text)
            case DeviceDisconnected(device, why):
                return self._disconnect(device, why)
            case DeviceConnected(device):
                if self.lost.get(device) == "offline" and not self.shut:
                    del self.lost[device]  # it is online again in time
                    self._begin(device, self.assignments[device], now)
                    return [Reinstate(device, self.assignments[device])]
            case Stop():
                self._stop()
        return []  # a Tick needs nothing more: `on` reads the clock after each event

    def _pass_time(self, now: float) -> None:
        """Record the changes that time alone causes, such as a deadline that passed."""

    def _replace(self, device: str, assignment_id: str, instead_of: str, now: float) -> None:
        """Note that a device was selected during the round."""
        self._begin(device, assignment_id, now)

    def _count(self, update_id: UpdateId) -> None:
        """Note that an update was aggregated."""
        self.aggregated.append(update_id)

    def _drop(self, update_id: UpdateId, reason: DropReason, detail: str = "") -> list[Action]:
        """Note that an update does not count."""
        self.dropped.append(update_id)
        return [DropUpdate(update_id, reason, detail)]

    def _staleness(self, header: UpdateArrived) -> int:
        """Return by how many versions the update is behind the round."""
        return max(0, self.config.base_version - header.base_version)

    def _accept(self, header: UpdateArrived, late: bool) -> AggregateUpdate:
        """Accept an update, which counts less the more versions it is behind."""
        staleness = self._staleness(header)
        self.aggregating.add(header.update_id)
        return AggregateUpdate(header.update_id, staleness, (1.0 + staleness) ** -self.config.staleness_exponent, late)

    def _begin(self, device: str, assignment_id: str, now: float) -> None:
        """Note that the device works on this assignment from `now` on."""
        raise NotImplementedError

    def _on_reply(self, header: UpdateArrived, now: float) -> list[Action]:
        """Accept, defer or drop the update of a reply."""
        raise NotImplementedError

    def _reject(self, update_id: UpdateId, now: float) -> None:
        """Note that an accepted update could not be aggregated, so that the round may have room again."""
        raise NotImplementedError

    def _lose(self, device: str, assignment_id: str, kind: str, text: str) -> list[Action]:
        """Note that a device will not reply to this assignment."""
        raise NotImplementedError

    def _disconnect(self, device: str, why: str) -> list[Action]:
        """Note that a device disconnected."""
        raise NotImplementedError

    def _stop(self) -> None:
        """Accept no more, because a person stops the run."""
        raise NotImplementedError

    def _closing_reason(self, now: float) -> CloseReason | None:
        """Return the reason for which the round accepts no more replies, or None while it stays open."""
        raise NotImplementedError

    @property
    def _reported_outstanding(self) -> tuple[str, ...]:
        """Return the devices that the result names as outstanding."""
        return self.outstanding

    def _close(self) -> RoundResult:
        """Fix the result of the round.

        A round with fewer than `min_updates` updates closes as `too-few`. After `too-few` or `stopped` the round makes
        no step: all updates are dropped, so their devices get them back.
        """
        assert self.shut is not None
        reason, aggregated, dropped = self.shut, tuple(self.aggregated), tuple(self.dropped)
        if reason not in NO_STEP and len(aggregated) < self.config.min_updates:
            reason = "too-few"
        if reason in NO_STEP:
            aggregated, dropped = (), (*dropped, *aggregated)
        self.closed = RoundResult(reason, aggregated, dropped, self._reported_outstanding)
        return self.closed


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
    rejected_in_time: list[UpdateId] = field(default_factory=list)  # those of `in_time` that could not be aggregated
    waited_for: set[str] = field(default_factory=set)  # selected devices, neither replied nor lost

    def __post_init__(self) -> None:
        self.slots = ConcurrencySlots(self.config) if self.config.max_concurrency else None
        super().__post_init__()

    @property
    def deadline_at(self) -> float:
        """Return the time of the deadline in seconds on the run's clock."""
        return self.config.opened_s + self.config.deadline_s

    @property
    def outstanding(self) -> tuple[str, ...]:
        """Return the devices that have neither replied nor been lost, in the order of selection."""
        return tuple(device for device in self.assignments if device in self.waited_for)

    @property
    def arrived_in_time(self) -> int:
        """Return the number of updates in time that have arrived and were not rejected."""
        return len(self.in_time) - len(self.rejected_in_time)

    @property
    def possible(self) -> int:
        """Return the number of updates in time that have arrived or may still arrive."""
        return self.arrived_in_time + len(self.waited_for)

    def _decide(self, event: Input, now: float, replacements: ReplacementSource) -> list[Action]:
        lacking = not self.shut and (self.lost or self.rejected_in_time or self.config.max_concurrency)
        actions = self._fill(now, replacements) if lacking else []
        self.shut = self.shut or self._closing_reason(now)
        return actions

    def _replace(self, device: str, assignment_id: str, instead_of: str, now: float) -> None:
        self.instead[device] = instead_of
        self._begin(device, assignment_id, now)

    def _count(self, update_id: UpdateId) -> None:
        super()._count(update_id)
        self.aggregated_in_time += update_id in self.in_time

    def _reject(self, update_id: UpdateId, now: float) -> None:
        if update_id in self.in_time:
            self.rejected_in_time.append(update_id)
        if self.shut != "stopped" and now < self.deadline_at:
            self.shut = None  # there is time to select another device

    def _disconnect(self, device: str, why: str) -> list[Action]:
        if self.slots is not None:
            self.slots.free(device)
        return self._lose(device, self.assignments.get(device, ""), "offline", why)

    def _stop(self) -> None:
        self.shut = self.shut or "stopped"

    def _on_reply(self, header: UpdateArrived, now: float) -> list[Action]:
        config = self.config
        if self.slots is not None:
            self.slots.free(header.device, header.assignment_id)
        if not header.again and (self.shut or now >= self.deadline_at):
            return [DeferUpdate(header.update_id)]
        if header.assignment_id in self.replied:
            return self._drop(header.update_id, "duplicate")
        in_time = self.assignments.get(header.device) == header.assignment_id
        if not in_time and config.late == "drop":
            return self._drop(header.update_id, "late")
        if self._staleness(header) > config.max_staleness:
            return self._drop(header.update_id, "stale")
        self.replied[header.assignment_id] = header.update_id
        if in_time:
            self.lost.pop(header.device, None)
            self.in_time.add(header.update_id)
            self.waited_for.discard(header.device)
        return [self._accept(header, late=not in_time)]

    def _lose(self, device: str, assignment_id: str, kind: str, text: str) -> list[Action]:
        """Note that a device will not reply to this assignment, unless it replied or was lost before."""
        if self.slots is not None:
            self.slots.free(device, assignment_id)
        if self.assignments.get(device) != assignment_id or assignment_id in self.replied or device in self.lost:
            return []
        self.lost[device] = kind
        self.waited_for.discard(device)
        return [MarkLost(device, assignment_id, kind, text)]

    def _begin(self, device: str, assignment_id: str, now: float) -> None:
        self.assignments[device] = assignment_id
        self.waited_for.add(device)
        if self.slots is not None:
            self.slots.take(device, assignment_id, now)

    def _free_slots(self, slots: ConcurrencySlots, now: float) -> tuple[int, list[Reason]]:
        """Return the number of free concurrency slots, and the reasons that a selection gets from them.

        If no slot is free, one counts as free as long as no device works on this round.
        """
        lacking = self.config.min_updates - self.arrived_in_time
        held = slots.held(now, lacking)
        silent = slots.silent(self.assignments, held)
        reasons = [Reason("silent", {"count": len(silent), "devices": first_names(silent)})] if silent else []
        free = self.config.max_concurrency - len(held)
        if free > 0 or any(self.assignments.get(device) == work.assignment_id for device, work in held.items()):
            return free, reasons
        return 1, [*reasons, Reason("none-at-work", {})]

    def _fill(self, now: float, replacements: ReplacementSource) -> list[Action]:
        """Select replacements for missing updates, as many as slots are free, among devices that can reply in time."""
        left_s, short, slot_reasons = self.deadline_at - now, self.config.target_updates - self.possible, list[Reason]()
        if short > 0 and self.slots is not None:
            free, slot_reasons = self._free_slots(self.slots, now)
            short = min(short, free)
        if short <= 0 or left_s <= 0:
            return []
        others = (replacement for replacement in replacements(left_s) if replacement.device not in self.assignments)
        return [self._assign(replacement, now, slot_reasons) for replacement in islice(others, short)]

    def _assign(self, replacement: Replacement, now: float, slot_reasons: Reasons) -> SelectReplacement:
        """Select a replacement; its reasons include `slot_reasons`, those about concurrency slots."""
        left_s = self.deadline_at - now
        target = self.config.target_updates
        why = [Reason("replaces", {"possible": self.possible, "target": target, "left_s": left_s}), *slot_reasons]
        instead_of = self._device_to_replace() if self.lost or self.rejected_in_time else ""
        self.instead[replacement.device] = instead_of
        self._begin(replacement.device, replacement.assignment_id, now)
        return SelectReplacement(
            replacement.device, replacement.assignment_id, self.config.base_version, left_s, why, instead_of
        )

    def _device_to_replace(self) -> str:
        """Return a lost device, or one whose update was rejected, without a replacement yet; "" if there is none."""
        replaced, rejected = set(self.instead.values()), [update_id.device for update_id in self.rejected_in_time]
        return next((device for device in (*self.lost, *rejected) if device not in replaced), "")

    def _closing_reason(self, now: float) -> CloseReason | None:
        if not self.waited_for:
            out_of_candidates = self.config.max_concurrency and self.possible < self.config.target_updates
            return "enough" if self.lost or out_of_candidates else "all"
        if self.aggregated_in_time >= self.config.target_updates:
            return "enough"
        if now >= self.deadline_at:
            return "deadline"
        return None
