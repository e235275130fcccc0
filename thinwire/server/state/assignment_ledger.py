"""Keeps one record of each assignment of a run, rebuilt from its journal.

`AssignmentRecord` is the record. It says to which device and in which round the assignment was made, from which model
version, in which codec and with which work, when, how many bytes of the model went with it, and its outcome.
`AssignmentLedger` holds the records and answers questions about them: what is outstanding at a device, what has no
outcome yet, whether an update is decided. `OutcomeLog` holds the latest outcomes of each device's updates, which
assignments report to the device.

Invariant: once a run is over, each of its assignments has exactly one outcome. The last event about an assignment gives
its outcome:

    UpdateAccepted   the reply counts; it is dropped after all if its aggregation fails or its round makes no step
    UpdateDropped    the reply does not count
    ClientFailed     there is no reply

The reply to an assignment is the first one that the round decides about. Anything that the device sends later for the
same assignment is a duplicate, and no event of the assignment.

Nothing follows these events, with one exception. The failure kinds `offline` and `stale` only say that the round no
longer waits for the reply. If the device reconnects while its round is open, a `ClientReconnected` says that the round
waits again. A reply that arrives after all is accepted or dropped by the plan's rules, like any other.

An assignment that has no such event when the run ends, or only a `ClientReconnected`, fails with the kind `OVER`. The
failure is committed in one transaction with the end of the run, so a crash cannot separate the two.

Invariant: the ledger does not grow with the number of rounds. It forgets a round whose model version is too old for any
reply to count, as soon as each of its assignments has an outcome. Of the updates that it forgets, the highest sequence
of each device remains, since a device never gives a sequence twice.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, KeysView
from dataclasses import dataclass, field
from typing import Literal

from thinwire.core.events import (
    OVER,
    ClientFailed,
    ClientReconnected,
    ClientSelected,
    Event,
    FullModelSent,
    RoundClosed,
    RoundOpened,
    RunStatusChanged,
    UpdateAccepted,
    UpdateDropped,
)
from thinwire.core.run_events import FirstModelAssigned, FirstModelFailed, RunExtended
from thinwire.core.types import UpdateId, UpdateOutcome, assignment_round, first_of, is_follow_up

MAX_KEPT = 1024  # rounds, and outcomes of one device; no plan waits for a reply that long
NO_REPLY_BEFORE_END = "no answer was taken before the run's end"
Status = Literal["open", "accepted", "dropped", "failed"]


@dataclass(slots=True)
class AssignmentRecord:
    """Holds what the run knows of one assignment; times are seconds of the run's clock, but for `at`, the wall clock's.

    `codec` is the one of the reply. `steps` and `batch` are 0 if the plan sets the work.
    `update_id` names the reply that the round decided about; "" before.
    """

    assignment_id: str
    device: str
    round: int
    base_version: int
    assigned_s: float
    deadline_s: float
    codec: str = ""
    at: float = 0.0  # when it was made
    steps: int = 0
    batch: int = 0
    sent_bytes: int = 0  # of the model that were last sent with it
    reported: int = 0  # outcomes that its device had when it got the assignment
    evaluates: bool = True
    status: Status = "open"
    update_id: str = ""

    @property
    def due_s(self) -> float:
        """Return when the reply should be there."""
        return self.assigned_s + self.deadline_s

    @property
    def work(self) -> tuple[int, int] | None:
        """Return (steps, batch) if the assignment has work of its own, otherwise None."""
        return (self.steps, self.batch) if self.steps else None


@dataclass(slots=True)
class AssignedRound:
    """Holds the assignments of one round, in the order of selection.

    `selected` counts the devices that it selected when it opened. `codec` is the one of most devices, and `codecs` has
    those of the others until the round is closed.
    """

    number: int
    base_version: int
    selected: int
    codec: str
    codecs: dict[str, str]
    is_open: bool = True
    assignments: list[AssignmentRecord] = field(default_factory=list)


@dataclass
class OutcomeLog:
    """Holds the last outcomes of each device's updates, oldest first: `kept` of each.

    Each assignment reports them to its device, so a device may read an outcome more than once.
    """

    kept: int = MAX_KEPT
    count: Counter[str] = field(default_factory=Counter)  # device -> number of its outcomes so far
    _outcomes: dict[str, deque[UpdateOutcome]] = field(default_factory=dict)

    def add(self, outcome: UpdateOutcome) -> None:
        """Record the outcome of an update."""
        device = outcome.update_id.device
        self.count[device] += 1
        self._outcomes.setdefault(device, deque(maxlen=self.kept)).append(outcome)

    def of(self, device: str, most: int, record: AssignmentRecord | None = None) -> tuple[UpdateOutcome, ...]:
        """Return the last `most` outcomes of a device's updates, oldest first.

        With an assignment, return the last outcomes that existed when the device got it. So an assignment that is sent
        again reports the same outcomes.
        """
        since = self.count[device] - record.reported if record else 0
        outcomes = list(self._outcomes.get(device, ()))
        return tuple(outcomes[: max(0, len(outcomes) - since)][-most:])


@dataclass
class AssignmentLedger:
    """Holds the assignments of a run.

    A reply counts only if its model version is at most `kept` versions old. Without `pipelined`, a device has at most
    one outstanding assignment; with it, a device gets its assignment of the next round before it has answered the one
    of this round. An assignment is outstanding until the run stops waiting for its reply.
    """

    kept: int = MAX_KEPT
    pipelined: bool = False
    rounds: dict[int, AssignedRound] = field(default_factory=dict)  # oldest first
    deadline_s: float = 0.0  # of the last round that opened
    device_s: float = 0.0  # seconds that devices spent on settled assignments, as far as other runs wait for devices
    outcomes: OutcomeLog = field(default_factory=OutcomeLog)
    _records: dict[str, AssignmentRecord] = field(default_factory=dict)  # id -> all that `rounds` holds
    _unresolved: dict[str, bool] = field(default_factory=dict)  # ids of those without an outcome, oldest first
    _outstanding: dict[str, list[str]] = field(default_factory=dict)  # device -> ids, oldest first
    _last: dict[str, str] = field(default_factory=dict)  # device -> id of its last one
    _decided: dict[str, Status] = field(default_factory=dict)  # update id -> accepted or dropped
    _decided_in: dict[int, list[str]] = field(default_factory=dict)  # round -> the updates that it decided about
    _forgotten: dict[str, int] = field(default_factory=dict)  # device -> highest sequence of its forgotten updates

    def find(self, assignment_id: str, device: str = "") -> AssignmentRecord | None:
        """Return the record of an assignment, or None if it is unknown or went to another device than the one named."""
        found = self._records.get(assignment_id)
        return found if found and device in ("", found.device) else None

    @property
    def busy(self) -> KeysView[str]:
        """Return the devices that have an outstanding assignment."""
        return self._outstanding.keys()

    def outstanding(self, device: str) -> list[AssignmentRecord]:
        """Return the outstanding assignments of a device, oldest first."""
        return [self._records[assignment_id] for assignment_id in self._outstanding.get(device, ())]

    def is_outstanding(self, device: str, assignment_id: str) -> bool:
        """Return True if the run waits for the reply of this device to this assignment."""
        return assignment_id in self._outstanding.get(device, ())

    def oldest(self) -> Iterator[AssignmentRecord]:
        """Yield the oldest outstanding assignment of each busy device."""
        for assignment_ids in self._outstanding.values():
            yield self._records[assignment_ids[0]]

    def accepted(self, device: str) -> AssignmentRecord | None:
        """Return the last assignment of a device if its open round has accepted the update; else None."""
        found = self._records.get(self._last.get(device, ""))
        is_open = found is not None and found.round in self.rounds and self.rounds[found.round].is_open
        return found if found is not None and is_open and found.status == "accepted" else None

    def all_accepted(self) -> Iterator[AssignmentRecord]:
        """Yield the assignments whose updates an open round has accepted."""
        for assigned in self.rounds.values():
            yield from (one for one in assigned.assignments if assigned.is_open and one.status == "accepted")

    @property
    def unresolved(self) -> list[AssignmentRecord]:
        """Return the assignments without an outcome, oldest first."""
        return [self._records[assignment_id] for assignment_id in self._unresolved]

    def took_s(self, device: str, assignment_id: str, elapsed_s: float) -> float | None:
        """Return how many seconds the device took if it replies at `elapsed_s`; None if this is not its last
        assignment.
        """
        found = self._records.get(assignment_id)
        return elapsed_s - found.assigned_s if found and self._last.get(device) == assignment_id else None

    def selected(self, number: int) -> int:
        """Return the number of devices that a round selected at its opening; 0 if the round is forgotten."""
        return self.rounds[number].selected if number in self.rounds else 0

    def is_follow_up(self, assignment_id: str) -> bool:
        """Return True if this is a follow-up assignment whose first assignment in the same round is known.

        Only the first one evaluates the model.
        """
        return is_follow_up(assignment_id) and first_of(assignment_id) in self._records

    def is_forgotten(self, assignment_id: str) -> bool:
        """Return True if the id names a round that is so old that the ledger has forgotten it."""
        return 0 < assignment_round(assignment_id) < next(iter(self.rounds), 0)

    def is_decided(self, update_id: UpdateId) -> bool:
        """Return True if the update was accepted or dropped."""
        return update_id.sequence <= self._forgotten.get(update_id.device, 0) or str(update_id) in self._decided

    def is_dropped(self, update_id: UpdateId) -> bool:
        """Return True if the update was dropped, unless it is forgotten."""
        return self._decided.get(str(update_id)) == "dropped"

    def is_answered(self, assignment_id: str) -> bool:
        """Return True if a reply to this assignment was accepted or dropped."""
        found = self._records.get(assignment_id)
        return found is not None and found.update_id != ""

    def apply(self, event: Event) -> None:
        """Record an event that makes, sends, resolves or reopens assignments."""
        match event:
            case RoundOpened():
                self._open_round(event)
            case ClientSelected():
                self._assign(event)
            case FullModelSent():
                if found := self._records.get(event.assignment_id):
                    found.sent_bytes = event.payload_bytes
            case UpdateAccepted():
                self._decide(event, "accepted")
            case UpdateDropped():
                self._decide(event, "dropped")
                self.outcomes.add(UpdateOutcome(UpdateId.parse(event.update_id), "dropped"))
            case ClientFailed():
                self._resolve(event.assignment_id, "failed", event.at)
                self.release(event.device, event.assignment_id)
            case ClientReconnected():
                self._reopen(event)
            case RoundClosed():
                self._close_round(event)
            case RunExtended():
                self._close_all()

    def release(self, device: str, assignment_id: str) -> None:
        """Stop waiting for an assignment; the device's next outstanding one, if any, becomes its oldest."""
        assignment_ids = self._outstanding.get(device, [])
        if assignment_id in assignment_ids:
            was_oldest = assignment_ids[0] == assignment_id
            assignment_ids.remove(assignment_id)
            if was_oldest:
                del self._outstanding[device]
                if assignment_ids:
                    self._outstanding[device] = assignment_ids

    def with_end(self, end: RunStatusChanged, elapsed_s: float, first: FirstModelAssigned | None) -> list[Event]:
        """Return the event that ends the run, after the failures of all assignments that have no outcome yet.

        `first` is the open request for the initial model, if there is one.
        """
        facts: list[Event] = [
            ClientFailed(end.at, one.round, one.device, one.assignment_id, OVER, NO_REPLY_BEFORE_END, elapsed_s)
            for one in self.unresolved
        ]
        if first:
            failed = FirstModelFailed(end.at, first.device, first.assignment_id, OVER, NO_REPLY_BEFORE_END, elapsed_s)
            facts.append(failed)
        return [*facts, end]

    def _close_all(self) -> None:
        """Record that no round is open: the run had ended, and all its assignments have an outcome."""
        for assigned in self.rounds.values():
            assigned.is_open, assigned.codecs = False, {}

    def _open_round(self, event: RoundOpened) -> None:
        self.deadline_s, self.device_s = event.deadline_s, event.device_s
        selected = len(event.assignments) + len(event.later)
        made = AssignedRound(event.round, event.base_version, selected, event.codec, dict(event.codecs))
        self.rounds[event.round] = made
        for device, assignment_id in event.assignments.items():
            self._add(made, device, assignment_id, event.elapsed_s, event.deadline_s, event.at)
        self._forget(event)

    def _assign(self, event: ClientSelected) -> None:
        """Record how an assignment was sent, and the assignment itself if its round did not open with it."""
        found = self._records.get(event.assignment_id)
        if found is None:
            assigned = self.rounds.get(event.round)
            if assigned is None or not assigned.is_open:
                return
            found = self._add(assigned, event.device, event.assignment_id, event.elapsed_s, event.deadline_s, event.at)
        found.sent_bytes, found.steps, found.batch = event.payload_bytes, event.steps, event.batch
        found.evaluates = event.evaluates
        found.codec = event.codec or found.codec

    def _add(
        self, assigned: AssignedRound, device: str, assignment_id: str, assigned_s: float, deadline_s: float, at: float
    ) -> AssignmentRecord:
        codec = assigned.codecs.get(device) or assigned.codec
        made = AssignmentRecord(
            assignment_id, device, assigned.number, assigned.base_version, assigned_s, deadline_s, codec, at
        )
        made.reported = self.outcomes.count[device]
        assigned.assignments.append(made)
        self._records[assignment_id], self._last[device], self._unresolved[assignment_id] = made, assignment_id, True
        self._outstanding.setdefault(device, []).append(assignment_id)
        if not self.pipelined:
            self._outstanding[device] = [assignment_id]
        return made

    def _decide(self, event: UpdateAccepted | UpdateDropped, status: Status) -> None:
        """Record that a round decided about an update; only the first one for an assignment is its reply."""
        self._record_decision(event.round, event.update_id, status)
        found = self._records.get(event.assignment_id)
        if found is not None and found.update_id in ("", event.update_id):
            found.update_id = event.update_id
            arrived_at = (event.header.get("transfer") or {}).get("arrived_at") or event.at
            self._resolve(event.assignment_id, status, min(arrived_at, event.at))  # a deferred reply arrived earlier
        self.release(event.device, event.assignment_id)

    def _record_decision(self, number: int, update_id: str, status: Status) -> None:
        """Record that this round decided about an update."""
        if update_id not in self._decided:
            self._decided_in.setdefault(number, []).append(update_id)
        self._decided[update_id] = status

    def _resolve(self, assignment_id: str, status: Status, at: float) -> None:
        self._unresolved.pop(assignment_id, None)
        if found := self._records.get(assignment_id):
            if found.status == "open":
                self.device_s += min(max(0.0, at - found.at), found.deadline_s)
            found.status = status

    def _reopen(self, event: ClientReconnected) -> None:
        """Record that an assignment is outstanding again, as the oldest one of its device."""
        if found := self._records.get(event.assignment_id):
            found.status, found.at, self._unresolved[event.assignment_id] = "open", event.at, True
            since = [
                assignment_id
                for assignment_id in self._outstanding.get(event.device, ())
                if assignment_id != event.assignment_id
            ]
            self._outstanding[event.device] = [event.assignment_id, *since]

    def _close_round(self, event: RoundClosed) -> None:
        """Record the outcomes of a round's updates; a pipelined round that is stopped waits for no reply any more."""
        assigned = self.rounds.get(event.round)
        for text in event.aggregated:
            self.outcomes.add(UpdateOutcome(UpdateId.parse(text), "aggregated", event.version))
        for text in event.dropped:
            if self._decided.get(text) != "dropped":
                self._record_decision(event.round, text, "dropped")
                self.outcomes.add(UpdateOutcome(UpdateId.parse(text), "dropped"))
        if assigned is not None:
            assigned.is_open, assigned.codecs = False, {}
            for record in assigned.assignments if self.pipelined and event.reason == "stopped" else ():
                self.release(record.device, record.assignment_id)

    def _forget(self, opened: RoundOpened) -> None:
        """Forget the oldest rounds: those whose replies could only be dropped, if all their assignments are settled."""
        for number, assigned in list(self.rounds.items()):
            is_old = assigned.base_version < opened.base_version - self.kept or number <= opened.round - MAX_KEPT
            if not is_old or assigned.is_open or any(record.status == "open" for record in assigned.assignments):
                return
            del self.rounds[number]
            for record in assigned.assignments:
                del self._records[record.assignment_id]
            for text in self._decided_in.pop(number, ()):
                del self._decided[text]
                update_id = UpdateId.parse(text)
                highest = max(self._forgotten.get(update_id.device, 0), update_id.sequence)
                self._forgotten[update_id.device] = highest
