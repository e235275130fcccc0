"""Holds the state of a run, rebuilt from its journal.

The run applies each event here as it records it, and a resume applies the same events from the journal. So a resumed
run knows exactly what the killed one knew. Nothing is decided in this file.

Each part with a topic of its own is a class of its own: open rounds (`line`), model versions (`bases`), their
evaluations (`scores`), assignments without an outcome (`outcomes`), assignments in flight (`owed`), and the outcomes
that devices are informed of (`told`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from thinwire.core.clock import absence_s
from thinwire.core.events import (
    AskedInFull,
    ClientAsked,
    ClientBack,
    ClientFailed,
    Evaluated,
    Event,
    HeadTaken,
    RoundClosed,
    RoundOpened,
    RoundTakenUp,
    RunStatus,
    RunStatusChanged,
    UpdateAccepted,
    UpdateDropped,
    UpdateFolded,
)
from thinwire.core.types import asked_round, first_of, is_further
from thinwire.server.policy.codec_ladder import CodecHistory
from thinwire.server.policy.local_work import DeviceSpeeds
from thinwire.server.state.assignment_ledger import AssignmentLedger, OutcomeLog, UnresolvedAssignments
from thinwire.server.state.backoff import DeviceBackoff, InitialModelRequests
from thinwire.server.state.model_history import EvaluationLog, ModelHistory, made_step
from thinwire.server.state.open_rounds import OpenRounds

TIMES = 3  # replies of a device whose durations are kept
KEPT = 1024  # rounds, and outcomes of one device: far more than a plan waits for a reply


@dataclass
class RunState:
    """Holds the state of a run between two events. `delay` is the number of rounds that open ahead of the current
    one.
    """

    delay: int = 0
    status: RunStatus = "queued"
    status_text: str = ""
    first: InitialModelRequests = field(default_factory=InitialModelRequests)  # requests for the initial model
    bases: ModelHistory = field(default_factory=lambda: ModelHistory(KEPT))
    scores: EvaluationLog = field(default_factory=lambda: EvaluationLog(KEPT))
    line: OpenRounds = field(default_factory=OpenRounds)
    rounds_opened: int = 0
    steps_made: int = 0
    too_few_in_a_row: int = 0  # rounds; those open when one of them closed count with it
    asks: dict[int, dict[str, str]] = field(default_factory=dict)  # round -> id -> device, of the last KEPT rounds
    drawn: dict[int, int] = field(default_factory=dict)  # round -> number of devices selected at its opening
    sent: dict[str, int] = field(default_factory=dict)  # id -> bytes of the model that were last sent with it
    decided: set[str] = field(default_factory=set)  # ids of all updates that were accepted or dropped
    dropped: set[str] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)  # all ids in `asks` that were answered
    outcomes: UnresolvedAssignments = field(default_factory=UnresolvedAssignments)  # which assignments have none yet
    took: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # device -> s of last replies
    paces: DeviceSpeeds = field(default_factory=DeviceSpeeds)
    owed: AssignmentLedger = field(default_factory=AssignmentLedger)
    here: set[str] = field(default_factory=set)  # devices that got an assignment and were not seen to disconnect
    there: set[str] = field(default_factory=set)  # online when the last round opened, selected or not
    barred: DeviceBackoff = field(default_factory=DeviceBackoff)
    told: OutcomeLog = field(default_factory=lambda: OutcomeLog(KEPT))
    deadlines: dict[int, float] = field(default_factory=dict)  # round -> its deadline at the opening, s
    codecs: CodecHistory = field(default_factory=lambda: CodecHistory(KEPT))
    weights: dict[str, int] = field(default_factory=dict)  # device -> its examples in the first round that counted them
    references_from: int = 0  # the round from which `weights` are collected
    slowest: list[float] = field(default_factory=list)
    elapsed_s: float = 0.0
    elapsed_at: float = 0.0  # the wall clock at that time
    _failed_with: int = 0  # the last round that had opened when `too_few_in_a_row` last grew

    def __post_init__(self) -> None:
        self.owed.ahead = self.line.goes_ahead = self.delay > 0

    @property
    def version(self) -> int:
        """Return the number of the latest model version."""
        return self.bases.version

    def had_s(self, device: str, number: int) -> float:
        """Return how many seconds a device was given in round `number`, whose assignment it has not answered."""
        return self.deadlines[number] if self.delay else self.owed.had_s(device)  # else only one is in flight

    def will_hold(self, device: str, but: str = "") -> int | None:
        """Return the model version that a device holds when its next assignment (`but`) is delivered; None if it is not
        known.

        It is the version of the last other assignment in flight. If there is none, it is the version of the last reply.
        """
        due = [number for ask_id, number in self.owed.of(device).items() if ask_id != but]
        return self.bases.asked_from[due[-1]] if due else self.bases.held.get(device)

    def apply(self, event: Event) -> None:
        """Apply one event of the journal."""
        self._tell_time(event)
        for fold in (self.first, self.outcomes, self.bases):
            fold.apply(event)
        match event:
            case RunStatusChanged():
                self.status, self.status_text = event.status, event.text
            case RoundOpened():
                self._open(event)
            case HeadTaken():
                self.line.take(event)
            case ClientAsked() | AskedInFull():
                self._ask_since(event)
            case UpdateAccepted():
                self._answer(event.device, event.ask_id, event.update_id)
                self.line.accept(event)
                self.paces.answered(event)
                self._time(event)
                self.scores.measure(event, self.version)
                self.codecs.answered(event)
            case UpdateFolded():
                self.line.now.folded.add(event.update_id)
            case UpdateDropped():
                self._answer(event.device, event.ask_id, event.update_id)
                self.dropped.add(event.update_id)
                self.line.now.since.append(event)
                self.told.dropped(event.update_id)
            case ClientFailed() | ClientBack():
                self._gone_or_back(event)
            case RoundClosed():
                self._close(event)
            case Evaluated():
                self.scores.evaluate(event)

    def _tell_time(self, event: Event) -> None:
        elapsed_s = getattr(event, "elapsed_s", -1.0)
        if isinstance(event, RoundTakenUp):
            self.line.now.missed_s = self.missed_s(event.gone_at, event.at, elapsed_s, event.set_by_s)
        if elapsed_s >= self.elapsed_s:
            self.elapsed_s, self.elapsed_at = elapsed_s, event.at

    def missed_s(self, gone_at: float, at: float, elapsed_s: float, set_by_s: float = 0.0) -> float:
        """Return how many seconds of the current round the run's clock does not count.

        The clock shows `elapsed_s` at the wall time `at`, after the aggregator was down since `gone_at`. The result
        covers the time from the last event to `gone_at`, and the downtime after it. A part whose length is not known
        counts as 0. `set_by_s` is how far the wall clock is known to have been set during the downtime.
        """
        stood_s = (absence_s(self.elapsed_at, gone_at) or 0.0) + (absence_s(gone_at, at, set_by_s) or 0.0)
        return self.line.now.missed_s + max(0.0, stood_s - (elapsed_s - self.elapsed_s))

    def round_of(self, device: str, ask_id: str) -> int:
        """Return the round in which the device got this assignment; 0 if it never did, or too long ago to be known."""
        number = asked_round(ask_id)
        return number if self.asks.get(number, {}).get(ask_id) == device else 0

    def goes_on(self, ask_id: str) -> bool:
        """Return True if this is a follow-up assignment whose first assignment in the same round is known.

        Only the first one evaluates the model.
        """
        return is_further(ask_id) and first_of(ask_id) in self.asks.get(asked_round(ask_id), {})

    def _open(self, event: RoundOpened) -> None:
        self.rounds_opened = event.round
        self.line.open(event)
        self.there = {*event.candidates, *event.asks, *event.later, *event.reasons}
        self.deadlines[event.round] = event.deadline_s
        if event.references_from != self.references_from:
            self.references_from, self.weights = event.references_from, {}
        self.asks[event.round], self.drawn[event.round] = {}, len(event.asks) + len(event.later)
        self.drawn.pop(event.round - KEPT, None)
        for device, ask_id in event.asks.items():
            self._ask(event.round, device, ask_id, event.elapsed_s, event.deadline_s)
        self.codecs.opened(event)
        if old := self.asks.pop(event.round - KEPT, None):
            self.answered.difference_update(old)
            for ask_id in old:
                self.sent.pop(ask_id, None)
                self.told.forget(ask_id)

    def _ask_since(self, event: ClientAsked | AskedInFull) -> None:
        """Record how many bytes go with an assignment, and the assignment itself if its round did not open with it."""
        self.sent[event.ask_id] = event.payload_bytes
        if isinstance(event, AskedInFull):
            return
        self.codecs.asked(event)
        self.paces.asked(event)
        if self.line.head and event.ask_id not in self.asks[event.round]:
            self.line.now.since.append(event)
            self._ask(event.round, event.device, event.ask_id, event.elapsed_s, event.deadline_s)

    def _ask(self, number: int, device: str, ask_id: str, elapsed_s: float, deadline_s: float) -> None:
        self.asks[number][ask_id] = device
        self.here.add(device)
        self.told.asked(device, ask_id)
        self.owed.ask(number, device, ask_id, elapsed_s, deadline_s)

    def _time(self, event: UpdateAccepted) -> None:
        """Record how long a reply took, if it answers the device's last assignment."""
        took_s = self.owed.took_s(event.device, event.ask_id, event.elapsed_s)
        if took_s is None:
            return
        took = self.took[event.device]
        took.append(took_s)
        del took[:-TIMES]
        if not event.late:
            self.line.now.slowest_s = max(self.line.now.slowest_s, took[-1])

    def _answer(self, device: str, ask_id: str, update_id: str) -> None:
        self.decided.add(update_id)
        self.answered.add(ask_id)
        self.owed.release(device, ask_id)

    def _gone_or_back(self, event: ClientFailed | ClientBack) -> None:
        if isinstance(event, ClientFailed):
            self._fail(event)
        else:
            self.line.now.since.append(event)
            self.here.add(event.device)
            self.owed.back(event.round, event.device, event.ask_id)

    def _fail(self, event: ClientFailed) -> None:
        self.line.lose(event, self.round_of(event.device, event.ask_id))
        if event.kind in ("left", "refused"):
            self.here.discard(event.device)
        self.owed.release(event.device, event.ask_id)
        self.barred.failed(event)

    def _close(self, event: RoundClosed) -> None:
        stepped = made_step(event)
        for accepted in self.line.now.accepted:
            if stepped and accepted.update_id in event.folded:
                capped = event.capped.get(accepted.update_id, {})
                counted = capped.get("counted", int(accepted.head.get("examples", 0)))
                self.weights.setdefault(accepted.device, counted)
        for text in event.folded:
            self.told.folded(text, event.version)
        for text in event.dropped:
            if text not in self.dropped:
                self.dropped.add(text)
                self.told.dropped(text)
        if self.delay and event.reason == "stopped":
            for ask_id, device in self.asks[event.round].items():
                self.owed.release(device, ask_id)
        self.steps_made += stepped
        if stepped:
            self.too_few_in_a_row = 0
        elif event.round > self._failed_with:
            self.too_few_in_a_row, self._failed_with = self.too_few_in_a_row + 1, self.rounds_opened
        if self.line.now.slowest_s:
            self.slowest.append(self.line.now.slowest_s)
        self.line.close(event)
        self.scores.close(event)
