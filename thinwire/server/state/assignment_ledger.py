"""Keeps the ledger of a run's assignments, rebuilt from its journal.

`AssignmentLedger` holds the assignments in flight: which devices have not replied yet, and when their replies are due.
`OutcomeLog` holds the latest outcomes of each device's updates, which assignments report to the device.
`UnresolvedAssignments` holds the assignments without an outcome.

Invariant: once a run is over, each of its assignments has exactly one outcome. The last event about an assignment gives
its outcome:

    UpdateAccepted   the reply counts; it is dropped after all if its aggregation fails or its round makes no step
    UpdateDropped    the reply does not count
    ClientFailed     there is no reply

The reply to an assignment is the first one that the round decides about. Anything that the device sends later for the
same assignment is a duplicate, and no event of the assignment.

Nothing follows these events, with one exception. The failure kinds `left` and `stale` only say that the round no longer
waits for the reply. If the device reconnects while its round is open, a `ClientBack` says that the round waits again. A
reply that arrives after all is accepted or dropped by the plan's rules, like any other.

An assignment that has no such event when the run ends, or only a `ClientBack`, fails with the kind `OVER`. The failure
is committed in one transaction with the end of the run, so a crash cannot separate the two.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from thinwire.core.events import (
    OVER,
    ClientAsked,
    ClientBack,
    ClientFailed,
    Event,
    FirstModelAsked,
    FirstModelFailed,
    ModelStored,
    RoundOpened,
    RunStatusChanged,
    UpdateAccepted,
    UpdateDropped,
)
from thinwire.core.types import UpdateId, Verdict


@dataclass
class AssignmentLedger:
    """Holds the assignments in flight: those that each device has not answered yet.

    With `ahead`, a device gets its assignment of the next round before it has answered the one of this round. Without
    it, a device has at most one assignment in flight.
    """

    ahead: bool = False
    busy: dict[str, tuple[str, int]] = field(default_factory=dict)  # device -> (id, round) of its oldest one
    due: dict[str, float] = field(default_factory=dict)  # device -> when its last one should be answered, elapsed_s
    _queued: dict[str, dict[str, int]] = field(default_factory=dict)  # device -> id -> round: those after the oldest
    _last: dict[str, tuple[str, float]] = field(default_factory=dict)  # device -> its last one, and when

    def of(self, device: str) -> dict[str, int]:
        """Return {id: round} of the assignments that a device has not answered, oldest first."""
        if device not in self.busy:
            return {}
        first, number = self.busy[device]
        return {first: number, **self._queued.get(device, {})}

    def asked_at(self, device: str) -> float:
        """Return when the device got its last assignment, in seconds of the run's clock."""
        return self._last[device][1]

    def had_s(self, device: str) -> float:
        """Return how many seconds the device was given for its last assignment."""
        return self.due[device] - self.asked_at(device)

    def took_s(self, device: str, ask_id: str, elapsed_s: float) -> float | None:
        """Return how many seconds the device took if it replies at `elapsed_s`; None if this is not its last
        assignment.
        """
        last, asked_s = self._last.get(device, ("", 0.0))
        return elapsed_s - asked_s if last == ask_id else None

    def ask(self, number: int, device: str, ask_id: str, elapsed_s: float, deadline_s: float) -> None:
        """Record an assignment that a device got at `elapsed_s` and should answer within `deadline_s` seconds."""
        if self.ahead and device in self.busy:
            self._queued.setdefault(device, {})[ask_id] = number
        else:
            self.busy[device] = ask_id, number
        self._last[device] = ask_id, elapsed_s
        self.due[device] = elapsed_s + deadline_s

    def back(self, number: int, device: str, ask_id: str) -> None:
        """Record that an assignment is outstanding again, as the oldest one of its device."""
        since = {id_: of for id_, of in self.of(device).items() if id_ != ask_id}
        self.busy[device] = ask_id, number
        if since:
            self._queued[device] = since

    def release(self, device: str, ask_id: str) -> None:
        """Stop waiting for an assignment; the device's next unanswered assignment, if any, becomes its oldest."""
        queued = self._queued.get(device, {})
        queued.pop(ask_id, None)
        if self.busy.get(device, ("", 0))[0] == ask_id:
            del self.busy[device]
            if queued:
                following = next(iter(queued))
                self.busy[device] = following, queued.pop(following)


@dataclass
class OutcomeLog:
    """Holds the last `kept` outcomes of each device's updates, oldest first.

    Assignments report them to the device again and again until newer outcomes displace them. It does no harm to report
    one twice.
    """

    kept: int
    _verdicts: dict[str, deque[Verdict]] = field(default_factory=dict)
    _count: Counter[str] = field(default_factory=Counter)  # device -> number of its outcomes so far
    _when_asked: dict[str, int] = field(default_factory=dict)  # id -> number of its device's outcomes at that time

    def dropped(self, update_id: str) -> None:
        """Record that an update was dropped."""
        self._tell(Verdict(UpdateId.parse(update_id), "dropped"))

    def folded(self, update_id: str, version: int) -> None:
        """Record that an update was aggregated into the model, first into this `version`."""
        self._tell(Verdict(UpdateId.parse(update_id), "folded", version))

    def asked(self, device: str, ask_id: str) -> None:
        """Note how many outcomes the device has as it gets this assignment."""
        self._when_asked[ask_id] = self._count[device]

    def forget(self, ask_id: str) -> None:
        """Forget an assignment that will not be sent again."""
        self._when_asked.pop(ask_id, None)

    def of(self, device: str, most: int, ask_id: str = "") -> tuple[Verdict, ...]:
        """Return the last `most` outcomes of a device's updates, oldest first.

        With the id of an assignment, return the last outcomes that existed when the device got it. So an assignment
        that is sent again reports the same outcomes.
        """
        since = self._count[device] - self._when_asked[ask_id] if ask_id in self._when_asked else 0
        told = list(self._verdicts.get(device, ()))
        return tuple(told[: len(told) - since][-most:])

    def _tell(self, verdict: Verdict) -> None:
        device = verdict.update_id.device
        self._count[device] += 1
        self._verdicts.setdefault(device, deque(maxlen=self.kept)).append(verdict)


UNTAKEN = "no answer was taken before the run's end"


@dataclass
class UnresolvedAssignments:
    """Holds the assignments without an outcome, rebuilt from the journal."""

    missing: dict[str, tuple[int, str]] = field(default_factory=dict)  # id -> (round, device), oldest first
    first: FirstModelAsked | None = None  # the open request for the initial model

    def apply(self, event: Event) -> None:
        """Add the assignment that an event makes or reopens, or remove the one that it resolves."""
        match event:
            case RoundOpened():
                self.missing |= {ask_id: (event.round, device) for device, ask_id in event.asks.items()}
            case ClientAsked() | ClientBack():
                self.missing[event.ask_id] = event.round, event.device
            case UpdateAccepted() | UpdateDropped() | ClientFailed():
                self.missing.pop(event.ask_id, None)
            case FirstModelAsked():
                self.first = event
            case FirstModelFailed() | ModelStored():
                self.first = None

    def with_end(self, end: RunStatusChanged, elapsed_s: float) -> list[Event]:
        """Return the event that ends the run, after the failures of all assignments that have no outcome yet."""
        facts: list[Event] = [
            ClientFailed(end.at, number, device, ask_id, OVER, UNTAKEN, elapsed_s)
            for ask_id, (number, device) in self.missing.items()
        ]
        if asked := self.first:
            facts.append(FirstModelFailed(end.at, asked.device, asked.ask_id, OVER, UNTAKEN, elapsed_s))
        return [*facts, end]
