"""What a run has decided so far, as a fold over its journal.

The driver applies each event here as it records it, and a resume applies the same events from the journal: so a
run that goes on knows exactly what the one that was killed knew. Nothing is decided in this file. What makes an idea of
its own stands beside it: the rounds that are open (`line`), what devices train from (`bases`), how good that is
(`scores`), which asks wait for an outcome (`outcomes`), what each device owes (`owed`) and was told (`told`).
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
from thinwire.server.policy.codec_ladder import AskedCodecs
from thinwire.server.policy.local_work import Paces
from thinwire.server.state.assignment_ledger import Outcomes, Owed, Told
from thinwire.server.state.backoff import Barred, FirstAsks
from thinwire.server.state.model_history import Bases, Scores, made_step
from thinwire.server.state.open_rounds import Line

TIMES = 3  # answers of a device whose times are remembered
KEPT = 1024  # rounds, and verdicts of one device: far more than a plan waits for an answer


@dataclass
class Past:
    """The state of a run between two events. `delay`: rounds that are opened ahead of the one that is folded."""

    delay: int = 0
    status: RunStatus = "queued"
    status_text: str = ""
    first: FirstAsks = field(default_factory=FirstAsks)  # while there is no model
    bases: Bases = field(default_factory=lambda: Bases(KEPT))
    scores: Scores = field(default_factory=lambda: Scores(KEPT))
    line: Line = field(default_factory=Line)
    rounds_opened: int = 0
    steps_made: int = 0
    too_few_in_a_row: int = 0  # those that were asked before the last of these closed failed with it
    asks: dict[int, dict[str, str]] = field(default_factory=dict)  # round -> ask_id -> device, of the last KEPT rounds
    drawn: dict[int, int] = field(default_factory=dict)  # round -> devices that it opened with and for
    sent: dict[str, int] = field(default_factory=dict)  # ask_id -> bytes of the model that went with it last
    decided: set[str] = field(default_factory=set)  # every update_id that was accepted or dropped
    dropped: set[str] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)  # every one of `asks` that was answered
    outcomes: Outcomes = field(default_factory=Outcomes)  # which asks have none yet
    took: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # device -> s, its last answers
    paces: Paces = field(default_factory=Paces)
    owed: Owed = field(default_factory=Owed)
    here: set[str] = field(default_factory=set)  # asked and not seen to leave
    there: set[str] = field(default_factory=set)  # as the last round opened, whether asked or not
    barred: Barred = field(default_factory=Barred)
    told: Told = field(default_factory=lambda: Told(KEPT))
    deadlines: dict[int, float] = field(default_factory=dict)  # round -> seconds that it opened with
    codecs: AskedCodecs = field(default_factory=lambda: AskedCodecs(KEPT))
    weights: dict[str, int] = field(default_factory=dict)  # device -> its examples in the first round that counted it
    references_from: int = 0  # the round since which `weights` are collected
    slowest: list[float] = field(default_factory=list)
    elapsed_s: float = 0.0
    elapsed_at: float = 0.0  # the wall clock when it was so much
    _failed_with: int = 0  # the last round that was open when the last of `too_few_in_a_row` closed

    def __post_init__(self) -> None:
        self.owed.ahead = self.line.goes_ahead = self.delay > 0

    @property
    def version(self) -> int:
        """Of the newest model."""
        return self.bases.version

    def had_s(self, device: str, number: int) -> float:
        """How long a device was given in a round for which it owes an answer."""
        return self.deadlines[number] if self.delay else self.owed.had_s(device)  # else it owes its last ask alone

    def will_hold(self, device: str, but: str = "") -> int | None:
        """The version that a device holds when it takes up its next ask (`but`): of the ask before, or its answer."""
        due = [number for ask_id, number in self.owed.of(device).items() if ask_id != but]
        return self.bases.asked_from[due[-1]] if due else self.bases.held.get(device)

    def apply(self, event: Event) -> None:
        """Take in one event of the journal."""
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
        """What the run's clock will not have counted of the round when it shows `elapsed_s` at this time of day, after
        an absence since `gone_at`: from the last event until then, and from then on; nothing where that is not known.
        """
        stood_s = (absence_s(self.elapsed_at, gone_at) or 0.0) + (absence_s(gone_at, at, set_by_s) or 0.0)
        return self.line.now.missed_s + max(0.0, stood_s - (elapsed_s - self.elapsed_s))

    def round_of(self, device: str, ask_id: str) -> int:
        """The round in which this device was asked this; 0 when it was not, or too long ago to be known."""
        number = asked_round(ask_id)
        return number if self.asks.get(number, {}).get(ask_id) == device else 0

    def goes_on(self, ask_id: str) -> bool:
        """Whether its device was asked something in the same round before: then that measured their version."""
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
        """How much goes with an ask; nothing else is new for one that its round opened with."""
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
        """How long this answer took, if it is one to the device's last ask."""
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
