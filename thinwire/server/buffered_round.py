"""A buffered round collects asynchronous updates; this is its state machine, which does no I/O.

It replaces the synchronous round (`round.py`) in a buffered plan and has the same events and actions
(`round_events.py`). But no device waits for another one. Each device works all the time, from the newest model version
at the time of its assignment. Each update goes into the buffer that is open, with a smaller weight the more versions it
is behind.

Invariant:

- A device has at most one update in a buffer. Its second reply is deferred to the next buffer.
- An idle device without an update in the buffer gets an assignment at once, while fewer than `max_concurrency` devices
  work. Devices with an update in it follow: each gets one follow-up assignment, for the next buffer.
- The buffer closes with `buffer` when it holds `target` updates, and it never holds more. It closes with `enough` when
  no device without an update in it works or can be selected. Then every live device has an update in it.
- A device that misses the deadline of its own assignment is not waited for. Its late update counts all the same.

Paper: FedBuff (Nguyen et al. 2022).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from thinwire.core.events import CloseReason
from thinwire.core.types import UpdateId
from thinwire.server.round_events import (
    Action,
    AssignmentFailed,
    DeferUpdate,
    DeviceConnected,
    DeviceDisconnected,
    DropUpdate,
    FoldDone,
    FoldRejected,
    FoldUpdate,
    Input,
    MarkLost,
    Reinstate,
    ReplacementSelected,
    RoundConfig,
    RoundResult,
    SelectReplacement,
    SlotLease,
    Spares,
    Stop,
    Tick,
    Told,
    UpdateArrived,
    ended,
    nobody,
)


@dataclass
class BufferedRound:
    """A buffered round as a state machine without I/O.

    `on` takes events as they happen; `replay` takes those from before a restart, and comes first. No event may follow
    `RoundResult`.

    >>> b = BufferedRound(RoundConfig(1, 0, {"a": "ask-a", "b": "ask-b"}, target=1, floor=1,
    ...     opened_s=0.0, deadline_s=9.0))
    >>> b.on(UpdateArrived(UpdateId("run", "a", 1), "ask-a", "a", 0), now=2.0)[0].discount
    1.0
    >>> b.on(FoldDone(UpdateId("run", "a", 1)), now=2.1)[0].reason
    'buffer'
    """

    terms: RoundConfig
    asks: dict[str, str] = field(default_factory=dict)  # device -> ask_id: its first in this buffer
    going_on: set[str] = field(default_factory=set)  # devices with a follow-up, for the next buffer
    at_work: dict[str, SlotLease] = field(default_factory=dict)  # device -> assignment before its deadline
    overdue: dict[str, SlotLease] = field(default_factory=dict)  # device -> assignment after its deadline
    standing: set[UpdateId] = field(default_factory=set)  # in the buffer: aggregated, or about to be
    folding: set[UpdateId] = field(default_factory=set)
    folded: list[UpdateId] = field(default_factory=list)
    dropped: list[UpdateId] = field(default_factory=list)
    answered: dict[str, UpdateId] = field(default_factory=dict)  # ask_id -> the update that answered it
    lost: dict[str, str] = field(default_factory=dict)  # device -> kind
    shut: CloseReason | None = None
    closed: RoundResult | None = None

    def __post_init__(self) -> None:
        self.at_work |= self.terms.earlier
        for device, ask_id in self.terms.asks.items():
            self._begin(device, ask_id, self.terms.opened_s)

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
        return frozenset(update_id.device for update_id in self.standing)

    def on(self, event: Input, now: float, spares: Spares = nobody) -> list[Action]:
        """Apply one event and return the actions that follow; `now` is in seconds on the run's clock.

        `spares` is called only when a concurrency slot is free. Raise `RuntimeError` if the round is closed.
        """
        if self.closed:
            raise RuntimeError(f"buffer {self.terms.number} is closed: {event}")
        self._time_out(now)
        actions = self._take(event, now)
        if not self.shut and len(self.standing) >= self.terms.target:
            self.shut = "buffer"
        if not self.shut:
            actions += self._fill(now, spares)
            if not isinstance(event, FoldRejected):  # a deferred reply may fill the gap: the driver offers it first
                self.shut = None if self._lacking else "enough"
        if not self.shut:
            actions += self._go_on(now)
        if self.shut and not self.folding:
            actions.append(self._close())
        return actions

    def replay(self, told: Told) -> None:
        """Apply the events from before a restart, without returning actions.

        The journal holds every consequence of these events as an event of its own, except the round's close. Therefore
        only the close is decided here.
        """
        now = -math.inf
        for event, now in told:
            self._time_out(now)
            self._take(event, now)
        if now > -math.inf:
            self.shut = "buffer" if len(self.standing) >= self.terms.target else None if self._lacking else "enough"
        if self.shut and not self.folding:
            self._close()

    def _take(self, event: Input, now: float) -> list[Action]:
        """Apply one event to the state, and return the actions that follow from it alone."""
        match event:
            case ReplacementSelected(device, ask_id):
                self._begin(device, ask_id, now)
            case UpdateArrived():
                return self._head(event)
            case FoldDone(update_id):
                self.folding.discard(update_id)
                self.folded.append(update_id)
            case FoldRejected(update_id, reason):
                self.folding.discard(update_id)
                self.standing.discard(update_id)
                if self.shut != "stopped":
                    self.shut = None  # the buffer has room again
                return self._drop(update_id, reason)
            case AssignmentFailed(device, ask_id, kind, text):
                return self._lose(device, ask_id, kind, text)
            case DeviceDisconnected(device, why):
                working = self.at_work.get(device) or self.overdue.get(device)
                return self._lose(device, working.ask_id, "left", why) if working else []
            case DeviceConnected(device):
                if self.lost.get(device) == "left" and not self.shut:
                    del self.lost[device]
                    self._begin(device, self.asks[device], now)
                    return [Reinstate(device, self.asks[device])]
            case Stop():
                self.shut = "stopped"
            case Tick():
                pass
        return []

    def _head(self, head: UpdateArrived) -> list[Action]:
        """Accept, defer or drop the update of a reply."""
        terms, device, ask_id = self.terms, head.device, head.ask_id
        if ask_id in self.answered:
            return self._drop(head.update_id, "duplicate")
        in_time = self._done(self.at_work, device, ask_id)
        self._done(self.overdue, device, ask_id)
        if not head.again and (self.shut or device in self.devices):
            return [DeferUpdate(head.update_id)]
        self.answered[ask_id] = head.update_id
        if self.asks.get(device) == ask_id:
            self.lost.pop(device, None)
        staleness = max(0, terms.base_version - head.base_version)
        if staleness > terms.max_staleness:
            return self._drop(head.update_id, "stale")
        self.standing.add(head.update_id)
        self.folding.add(head.update_id)
        discount = (1.0 + staleness) ** -terms.staleness_exponent
        late = not in_time if head.came_late is None else head.came_late
        return [FoldUpdate(head.update_id, staleness, discount, late)]

    def _drop(self, update_id: UpdateId, reason: str) -> list[Action]:
        """Note that an update does not count."""
        self.dropped.append(update_id)
        return [DropUpdate(update_id, reason)]

    def _lose(self, device: str, ask_id: str, kind: str, text: str) -> list[Action]:
        """Forget an assignment that gets no reply, and return `MarkLost` if this buffer made it.

        The driver records the failure of an earlier buffer's assignment.
        """
        known = self._done(self.at_work, device, ask_id) or self._done(self.overdue, device, ask_id)
        if not known or self.asks.get(device) != ask_id:
            return []
        self.lost[device] = kind
        return [MarkLost(device, ask_id, kind, text)]

    @staticmethod
    def _done(working: dict[str, SlotLease], device: str, ask_id: str) -> bool:
        """Remove the assignment from `working`, and return True if the device was working on it."""
        found = device in working and working[device].ask_id == ask_id
        if found:
            del working[device]
        return found

    def _begin(self, device: str, ask_id: str, now: float) -> None:
        """Note that the device works on this assignment from `now` on."""
        if device in self.devices:
            self.going_on.add(device)
        self.asks.setdefault(device, ask_id)
        self.at_work[device] = SlotLease(ask_id, now + self.terms.deadline_s)

    def _time_out(self, now: float) -> None:
        """Move the assignments whose deadline has passed to `overdue`."""
        for device in [device for device, work in self.at_work.items() if now >= work.until_s]:
            self.overdue[device] = self.at_work.pop(device)

    @property
    def _lacking(self) -> bool:
        """Return True if a device without an update in the buffer is at work."""
        return not self.at_work.keys() <= self.devices

    def _place_is_free(self) -> bool:
        """Return True if a concurrency slot is free."""
        return len(self.at_work) < (self.terms.max_concurrency or math.inf)

    def _fill(self, now: float, spares: Spares) -> list[Action]:
        """Select idle devices without an update in the buffer, as many as slots are free."""
        actions = list[Action]()
        if not self._place_is_free():
            return actions
        passed_over = self.asks.keys() | self.devices | self.at_work.keys()
        for spare in spares(math.inf):
            if spare.device not in passed_over:
                actions.append(self._ask(spare.device, spare.ask_id, "it was idle"))
                self._begin(spare.device, spare.ask_id, now)
            if not self._place_is_free():
                break
        return actions

    def _go_on(self, now: float) -> list[Action]:
        """Give devices with an update in the buffer a follow-up assignment, one each, as many as slots are free."""
        actions = list[Action]()
        for device in sorted(self.devices - self.going_on - self.at_work.keys()):
            if self._place_is_free() and (ask_id := self.terms.further(device)):
                actions.append(self._ask(device, ask_id, "its update stands in the buffer"))
                self._begin(device, ask_id, now)
        return actions

    def _ask(self, device: str, ask_id: str, why: str) -> SelectReplacement:
        """Return the selection of a device, with the reason."""
        places = f" of at most {self.terms.max_concurrency}" if self.terms.max_concurrency else ""
        why += f", {len(self.at_work)}{places} were at work"
        return SelectReplacement(device, ask_id, self.terms.base_version, self.terms.deadline_s, why)

    def _close(self) -> RoundResult:
        """Fix the result of the round."""
        assert self.shut is not None
        silent = tuple(device for device in self.overdue if device not in self.devices)
        self.closed = ended(self.shut, self.folded, self.dropped, self.terms.floor, silent)
        return self.closed
