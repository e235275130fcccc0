"""The base class of the state machines of a round: they take events and return actions, without I/O.

`round.py`, `buffered_round.py` and `secure_mode.py` have the machines of the three kinds of rounds.

Invariant: a round ends with exactly one `RoundResult`, which holds one reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from thinwire.core.events import NO_STEP, CloseReason
from thinwire.core.types import UpdateId
from thinwire.server.round_events import (
    Action,
    AggregateUpdate,
    AggregationDone,
    AggregationRejected,
    AssignmentFailed,
    DeviceConnected,
    DeviceDisconnected,
    DropUpdate,
    Input,
    Reinstate,
    ReplacementSelected,
    ReplacementSource,
    RoundConfig,
    RoundResult,
    Stop,
    Told,
    UpdateArrived,
    nobody,
)


@dataclass
class RoundMachine:
    """Holds what all rounds share: the selected devices, and the outcomes of their updates.

    `replay` takes the events from before a restart, and comes first. No event may follow `RoundResult`.
    """

    terms: RoundConfig
    assignments: dict[str, str] = field(default_factory=dict)  # device -> assignment_id, in the order of selection
    folding: set[UpdateId] = field(default_factory=set)
    aggregated: list[UpdateId] = field(default_factory=list)
    dropped: list[UpdateId] = field(default_factory=list)
    answered: dict[str, UpdateId] = field(default_factory=dict)  # assignment_id -> the update that answered it
    lost: dict[str, str] = field(default_factory=dict)  # device -> kind
    in_time: set[UpdateId] = field(default_factory=set)  # of a synchronous round: updates for its own assignments
    shut: CloseReason | None = None
    closed: RoundResult | None = None

    def __post_init__(self) -> None:
        for device, assignment_id in self.terms.assignments.items():
            self._begin(device, assignment_id, self.terms.opened_s)

    @property
    def deadline_at(self) -> float:
        """Return the time of the next deadline, in seconds on the run's clock."""
        raise NotImplementedError

    @property
    def outstanding(self) -> tuple[str, ...]:
        """Return the devices whose reply may still be in time."""
        raise NotImplementedError

    def on(self, event: Input, now: float, replacements: ReplacementSource = nobody) -> list[Action]:
        """Apply one event and return the actions that follow; `now` is in seconds on the run's clock.

        `replacements` is called only when another device may be selected. Raise `RuntimeError` if the round is closed.
        """
        if self.closed:
            raise RuntimeError(f"round {self.terms.number} is closed: {event}")
        self._pass_time(now)
        actions = [*self._take(event, now), *self._decide(event, now, replacements)]
        return [*actions, self._close()] if self.shut and not self.folding else actions

    def _decide(self, event: Input, now: float, replacements: ReplacementSource) -> list[Action]:
        """Select devices, and decide whether the round accepts no more, after an event was applied."""
        raise NotImplementedError

    def replay(self, told: Told) -> None:
        """Apply the events from before a restart, without returning actions.

        The journal holds all that follows from these events, except the round's close, which is decided here.
        """
        now = -math.inf
        for event, now in told:
            self._pass_time(now)
            self._take(event, now)
        if now > -math.inf:
            self.shut = self._shutting(now)
        if self.shut and not self.folding:
            self._close()

    def _take(self, event: Input, now: float) -> list[Action]:
        """Apply one event to the state, and return the actions that follow from it alone."""
        match event:
            case ReplacementSelected(device, assignment_id, instead_of):
                self._replace(device, assignment_id, instead_of, now)
            case UpdateArrived():
                return self._on_reply(event, now)
            case AggregationDone(update_id):
                self.folding.discard(update_id)
                self._count(update_id)
            case AggregationRejected(update_id, reason):
                self.folding.discard(update_id)
                self._reject(update_id, now)
                return self._drop(update_id, reason)
            case AssignmentFailed(device, assignment_id, kind, text):
                return self._lose(device, assignment_id, kind, text)
            case DeviceDisconnected(device, why):
                return self._leave(device, why)
            case DeviceConnected(device):
                if self.lost.get(device) == "offline" and not self.shut:
                    del self.lost[device]  # it is online again in time
                    self._begin(device, self.assignments[device], now)
                    return [Reinstate(device, self.assignments[device])]
            case Stop():
                self._stop()
        return []  # a Tick needs nothing more: `on` reads the clock after each event

    def _pass_time(self, now: float) -> None:
        """Note what follows from the time alone."""

    def _replace(self, device: str, assignment_id: str, instead_of: str, now: float) -> None:
        """Note that a device was selected during the round."""
        self._begin(device, assignment_id, now)

    def _count(self, update_id: UpdateId) -> None:
        """Note that an update was aggregated."""
        self.aggregated.append(update_id)

    def _drop(self, update_id: UpdateId, reason: str) -> list[Action]:
        """Note that an update does not count."""
        self.dropped.append(update_id)
        return [DropUpdate(update_id, reason)]

    def _staleness(self, header: UpdateArrived) -> int:
        """Return by how many versions the update is behind the round."""
        return max(0, self.terms.base_version - header.base_version)

    def _fold(self, header: UpdateArrived, late: bool) -> AggregateUpdate:
        """Accept an update, which counts less the more versions it is behind."""
        staleness = self._staleness(header)
        self.folding.add(header.update_id)
        return AggregateUpdate(header.update_id, staleness, (1.0 + staleness) ** -self.terms.staleness_exponent, late)

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

    def _leave(self, device: str, why: str) -> list[Action]:
        """Note that a device disconnected."""
        raise NotImplementedError

    def _stop(self) -> None:
        """Accept no more, because a person stops the run."""
        raise NotImplementedError

    def _shutting(self, now: float) -> CloseReason | None:
        """Return the reason for which the round accepts no more replies, or None while it stays open."""
        raise NotImplementedError

    @property
    def _silent(self) -> tuple[str, ...]:
        """Return the devices that the result names as outstanding."""
        return self.outstanding

    def _close(self) -> RoundResult:
        """Fix the result of the round.

        A round with fewer than `min_updates` updates closes as `too-few`. After `too-few` or `stopped` the round makes
        no step: all updates are dropped, so their devices get them back.
        """
        assert self.shut is not None
        reason, aggregated, dropped = self.shut, tuple(self.aggregated), tuple(self.dropped)
        if reason not in NO_STEP and len(aggregated) < self.terms.min_updates:
            reason = "too-few"
        if reason in NO_STEP:
            aggregated, dropped = (), (*dropped, *aggregated)
        self.closed = RoundResult(reason, aggregated, dropped, self._silent)
        return self.closed
