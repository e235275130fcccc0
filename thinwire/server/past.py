"""What a run has decided so far, as a fold over its journal.

The driver applies each event here as it records it, and a resume applies the same events from the journal: so a
run that goes on knows exactly what the one that was killed knew. Nothing is decided in this file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from thinwire.core.events import (
    AskedInFull,
    ClientAsked,
    ClientFailed,
    Evaluated,
    Event,
    HeadTaken,
    ModelStored,
    RoundClosed,
    RoundOpened,
    RunStatus,
    RunStatusChanged,
    ShadowStored,
    UpdateAccepted,
    UpdateDropped,
    UpdateFolded,
)
from thinwire.core.types import Metrics, UpdateId, Verdict
from thinwire.server.asked_codecs import AskedCodecs
from thinwire.server.barred import barred_s
from thinwire.server.first_asks import FirstAsks
from thinwire.server.pace import Paces

TIMES = 3  # answers of a device whose times are remembered
KEPT = 1024  # rounds, and verdicts of one device: far more than a plan waits for an answer


def ask_id_of(run_id: str, number: int, device: str) -> str:
    """The id of what a device is asked in a round."""
    return f"{run_id}.{number}.{device}"


def asked_round(ask_id: str) -> int:
    """The round that an ask belonged to stands in its id, RUN.ROUND.DEVICE; 0 where none does."""
    try:
        return int(ask_id.rsplit(".", 2)[1])
    except (IndexError, ValueError):
        return 0


@dataclass
class Past:
    """The state of a run between two events. `delay`: rounds that are opened ahead of the one that is folded."""

    delay: int = 0
    status: RunStatus = "queued"
    status_text: str = ""
    first: FirstAsks = field(default_factory=FirstAsks)  # while there is no model
    model: ModelStored | None = None
    models: dict[int, ModelStored] = field(default_factory=dict)  # version -> the model, of the last KEPT versions
    shadow: ShadowStored | None = None  # of the newest version; None: devices hold the model itself
    changes: dict[int, ShadowStored] = field(default_factory=dict)  # version -> the change that leads to it
    held: dict[str, int] = field(default_factory=dict)  # device -> the version that its last answer was made from
    rounds_opened: int = 0
    steps_made: int = 0
    too_few_in_a_row: int = 0  # those that were asked before the last of these closed failed with it
    open_round: RoundOpened | None = None  # the one whose answers are folded: the head of the line
    head_since_s: float = 0.0  # since when its time runs, elapsed_s
    head_taken: int = 0  # the last round of a line whose answers were taken
    ahead: list[RoundOpened] = field(default_factory=list)  # opened after it, in order: they wait to be the head
    lost_ahead: dict[int, dict[str, tuple[str, str]]] = field(default_factory=dict)  # of those: who will not answer
    accepted: list[UpdateAccepted] = field(default_factory=list)  # of the open round, in fold order
    folded_now: set[str] = field(default_factory=set)  # of the open round
    lost_now: dict[str, tuple[str, str]] = field(default_factory=dict)  # of the open round: device -> (kind, text)
    dropped_now: list[str] = field(default_factory=list)  # of the open round
    asked_now: list[ClientAsked] = field(default_factory=list)  # of the open round, those after its opening
    asks: dict[int, dict[str, str]] = field(default_factory=dict)  # round -> ask_id -> device, of the last KEPT rounds
    sent: dict[str, int] = field(default_factory=dict)  # ask_id -> bytes of the model that went with it last
    decided: set[str] = field(default_factory=set)  # every update_id that was accepted or dropped
    dropped: set[str] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)  # every one of `asks` that was answered
    busy: dict[str, tuple[str, int]] = field(default_factory=dict)  # device -> (ask_id, round) without an answer
    queued: dict[str, dict[str, int]] = field(default_factory=dict)  # device -> ask_id -> round: asked while busy
    heard: dict[str, int] = field(default_factory=dict)  # ask_id -> how many verdicts there were on its device
    due: dict[str, float] = field(default_factory=dict)  # device -> when its last ask should be answered, elapsed_s
    measured: dict[int, list[Metrics]] = field(default_factory=dict)  # version -> by answers, until it is evaluated
    took: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # device -> s, its last answers
    paces: Paces = field(default_factory=Paces)
    here: set[str] = field(default_factory=set)  # asked and not seen to leave
    barred: dict[str, str] = field(default_factory=dict)  # device -> why it is not asked again until it comes anew
    barred_until: dict[str, float] = field(default_factory=dict)  # of those: when its reason may have passed by itself
    verdicts: dict[str, list[Verdict]] = field(default_factory=lambda: defaultdict(list))
    bases: dict[int, int] = field(default_factory=dict)  # round -> the version that its asks train from
    codecs: AskedCodecs = field(default_factory=lambda: AskedCodecs(KEPT))
    weights: dict[str, int] = field(default_factory=dict)  # device -> its examples in the first round that counted it
    references_from: int = 0  # the round since which `weights` are collected
    made_by: dict[int, int] = field(default_factory=lambda: {0: 0})  # version -> the round that made it
    evaluated: dict[int, dict[str, float]] = field(default_factory=dict)
    best: Evaluated | None = None
    slowest: list[float] = field(default_factory=list)
    elapsed_s: float = 0.0
    deadline_s: float = 0.0  # of the last round
    _slowest_now: float = 0.0
    _failed_with: int = 0  # the last round that was open when the last of `too_few_in_a_row` closed
    _told: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # device -> verdicts on it so far
    _asked_s: dict[str, tuple[str, float]] = field(default_factory=dict)  # device -> its last ask, and when

    @property
    def version(self) -> int:
        return self.model.version if self.model else 0

    @property
    def base(self) -> ModelStored | ShadowStored:
        """What devices train from: the newest version as they hold it."""
        assert self.model is not None, "a run that is driven has a model"
        return self.shadow or self.model

    def base_of(self, asked_round: int) -> ModelStored | ShadowStored:
        """What the asks of a round trained from, as devices hold it."""
        version = self.bases[asked_round]
        return self.changes.get(version) or self.models[version]

    @property
    def line(self) -> list[RoundOpened]:
        """All rounds that are open, the head first: they close in this order."""
        return [self.open_round, *self.ahead] if self.open_round else []

    @property
    def taken(self) -> bool:
        """Whether the answers to the open round are taken: the head of a line may have to wait for devices first."""
        return self.open_round is not None and (not self.delay or self.open_round.round == self.head_taken)

    def opened(self, number: int) -> RoundOpened | None:
        """A round that is open; the head where it is not one of those ahead."""
        return next((opened for opened in self.ahead if opened.round == number), self.open_round)

    def asked_of(self, device: str) -> dict[str, int]:
        """ask_id -> round of what a device has not answered, in the order asked."""
        if device not in self.busy:
            return {}
        first, number = self.busy[device]
        return {first: number, **self.queued.get(device, {})}

    def will_hold(self, device: str, but: str = "") -> int | None:
        """The version that a device holds when it takes up its next ask (`but`): of the ask before, or its answer."""
        bases = [self.bases[number] for ask_id, number in self.asked_of(device).items() if ask_id != but]
        return bases[-1] if bases else self.held.get(device)

    def asked_at(self, device: str) -> float:
        """When the device was asked last, elapsed_s."""
        return self._asked_s[device][1]

    def had_s(self, device: str) -> float:
        """How long the device was given for its last ask."""
        return self.due[device] - self.asked_at(device)

    def apply(self, event: Event) -> None:
        """Take in one event of the journal."""
        self.elapsed_s = max(self.elapsed_s, getattr(event, "elapsed_s", 0.0))
        self.first.apply(event)
        match event:
            case RunStatusChanged():
                self.status, self.status_text = event.status, event.text
            case ModelStored():
                self.model, self.shadow = event, None
                self.models[event.version] = event
                self.models.pop(event.version - KEPT, None)
            case ShadowStored():
                self.shadow = self.changes[event.version] = event
                self.changes.pop(event.version - KEPT, None)
            case RoundOpened():
                self._open(event)
            case HeadTaken():
                self.head_taken, self.head_since_s = event.round, event.elapsed_s
            case ClientAsked() | AskedInFull():
                self._ask_since(event)
            case UpdateAccepted():
                self._answer(event.device, event.ask_id, event.update_id)
                self.held[event.device] = int(event.head.get("base_version", 0))
                self.accepted.append(event)
                self.paces.answered(event)
                self._time(event)
                self._measure(event.head)
                self.codecs.answered(event)
            case UpdateFolded():
                self.folded_now.add(event.update_id)
            case UpdateDropped():
                self._answer(event.device, event.ask_id, event.update_id)
                self.dropped.add(event.update_id)
                self.dropped_now.append(event.update_id)
                self._tell(Verdict(UpdateId.parse(event.update_id), "dropped"))
            case ClientFailed():
                self._fail(event)
            case RoundClosed():
                self._close(event)
            case Evaluated():
                self.evaluated[event.version] = event.metrics
                self.measured.pop(event.version, None)
                if event.best:
                    self.best = event

    def round_of(self, device: str, ask_id: str) -> int:
        """The round in which this device was asked this; 0 when it was not, or too long ago to be known."""
        number = asked_round(ask_id)
        return number if self.asks.get(number, {}).get(ask_id) == device else 0

    def _open(self, event: RoundOpened) -> None:
        self.rounds_opened = event.round
        if self.open_round is None:
            self.open_round, self.head_since_s = event, event.elapsed_s
        else:
            self.ahead.append(event)
        self.bases[event.round], self.deadline_s = event.base_version, event.deadline_s
        if event.references_from != self.references_from:
            self.references_from, self.weights = event.references_from, {}
        self.asks[event.round] = {}
        for device, ask_id in event.asks.items():
            self._ask(event.round, device, ask_id, event.elapsed_s, event.deadline_s)
        self.codecs.opened(event)
        if old := self.asks.pop(event.round - KEPT, None):
            self.answered.difference_update(old)
            for ask_id in old:
                self.sent.pop(ask_id, None)
                self.heard.pop(ask_id, None)

    def _ask_since(self, event: ClientAsked | AskedInFull) -> None:
        """How much goes with an ask; nothing else is new for one that its round opened with."""
        self.sent[event.ask_id] = event.payload_bytes
        if isinstance(event, AskedInFull):
            return
        self.codecs.asked(event)
        self.paces.asked(event)
        if self.open_round and event.ask_id not in self.asks[event.round]:
            self.asked_now.append(event)
            self._ask(event.round, event.device, event.ask_id, event.elapsed_s, event.deadline_s)

    def _ask(self, number: int, device: str, ask_id: str, elapsed_s: float, deadline_s: float) -> None:
        self.asks[number][ask_id] = device
        self.here.add(device)
        self.heard[ask_id] = self._told[device]
        if self.delay and device in self.busy:
            self.queued.setdefault(device, {})[ask_id] = number
        else:
            self.busy[device] = ask_id, number
        self._asked_s[device] = ask_id, elapsed_s
        self.due[device] = elapsed_s + deadline_s

    def _time(self, event: UpdateAccepted) -> None:
        """How long this answer took, if it is one to the device's last ask."""
        ask_id, asked_s = self._asked_s.get(event.device, ("", 0.0))
        if ask_id != event.ask_id:
            return
        took = self.took[event.device]
        took.append(event.elapsed_s - asked_s)
        del took[:-TIMES]
        if not event.late:
            self._slowest_now = max(self._slowest_now, took[-1])

    def _measure(self, head: Mapping[str, Any]) -> None:
        """What an answer says of a version that is not evaluated yet."""
        version, metrics = int(head.get("base_version", 0)), head.get("metrics", {})
        if version not in self.evaluated and any(name.startswith("eval/") for name in metrics):
            found = {name: (float(total), float(count)) for name, (total, count) in metrics.items()}
            self.measured.setdefault(version, []).append(found)
            self.measured.pop(self.version - KEPT, None)

    def _tell(self, verdict: Verdict) -> None:
        self._told[verdict.update_id.device] += 1
        told = self.verdicts[verdict.update_id.device]
        told.append(verdict)
        del told[:-KEPT]

    def _answer(self, device: str, ask_id: str, update_id: str) -> None:
        self.decided.add(update_id)
        self.answered.add(ask_id)
        self.release(device, ask_id)

    def release(self, device: str, ask_id: str) -> None:
        """Nothing more is waited for from this ask: the device is busy with what it was asked next, if anything."""
        queued = self.queued.get(device, {})
        queued.pop(ask_id, None)
        if self.busy.get(device, ("", 0))[0] == ask_id:
            del self.busy[device]
            if queued:
                following = next(iter(queued))
                self.busy[device] = following, queued.pop(following)

    def _fail(self, event: ClientFailed) -> None:
        asked = self.round_of(event.device, event.ask_id)
        if self.open_round and asked == self.open_round.round:
            self.lost_now[event.device] = (event.kind, event.text)
        elif asked in [opened.round for opened in self.ahead]:
            self.lost_ahead.setdefault(asked, {})[event.device] = (event.kind, event.text)
        if event.kind in ("left", "refused"):
            self.here.discard(event.device)
        self.release(event.device, event.ask_id)
        if event.kind in ("task-missing", "task-mismatch", "layout-mismatch", "declined", "protocol"):
            self.barred[event.device] = f"{event.kind}: {event.text}"
            self.barred_until[event.device] = event.elapsed_s + barred_s(event.kind, event.text)

    def _close(self, event: RoundClosed) -> None:
        stepped = event.reason not in ("too-few", "stopped")
        for accepted in self.accepted:
            if stepped and accepted.update_id in event.folded:
                self.weights.setdefault(accepted.device, int(accepted.head.get("examples", 0)))
        for text in event.folded:
            update_id = UpdateId.parse(text)
            self._tell(Verdict(update_id, "folded", event.version))
        for text in event.dropped:
            if text not in self.dropped:
                self.dropped.add(text)
                self._tell(Verdict(UpdateId.parse(text), "dropped"))
        if self.delay and event.reason == "stopped":
            for ask_id, device in self.asks[event.round].items():
                self.release(device, ask_id)
        self.steps_made += stepped
        if stepped:
            self.too_few_in_a_row = 0
        elif event.round > self._failed_with:
            self.too_few_in_a_row, self._failed_with = self.too_few_in_a_row + 1, self.rounds_opened
        if stepped:
            self.made_by[event.version] = event.round
        if self._slowest_now:
            self.slowest.append(self._slowest_now)
        self.open_round, self.accepted, self.lost_now, self._slowest_now = None, [], {}, 0.0
        self.folded_now, self.asked_now, self.dropped_now = set(), [], []
        if self.ahead:
            self.open_round, self.head_since_s = self.ahead.pop(0), event.elapsed_s
            self.lost_now = self.lost_ahead.pop(self.open_round.round, {})

    def bars(self, elapsed_s: float) -> dict[str, str]:
        """Devices that are not asked now, with the reason."""
        return {device: why for device, why in self.barred.items() if elapsed_s < self.barred_until[device]}

    def verdicts_for(self, device: str, most: int, ask_id: str = "") -> tuple[Verdict, ...]:
        """The device's last `most` verdicts: told again until they are old, since being told twice does no harm.

        Those that there were when it was asked `ask_id`, where one is named: an ask that is sent again says the same.
        """
        since = self._told[device] - self.heard[ask_id] if ask_id in self.heard else 0
        told = self.verdicts.get(device, [])
        return tuple(told[: len(told) - since][-most:])
