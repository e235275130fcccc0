"""What devices were asked and have not answered."""

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
class Owed:
    """`ahead`: whether a device is asked for the next round before it has answered for this one."""

    ahead: bool = False
    busy: dict[str, tuple[str, int]] = field(default_factory=dict)  # device -> (ask_id, round), the first it owes
    due: dict[str, float] = field(default_factory=dict)  # device -> when its last ask should be answered, elapsed_s
    _queued: dict[str, dict[str, int]] = field(default_factory=dict)  # device -> ask_id -> round: those after the first
    _last: dict[str, tuple[str, float]] = field(default_factory=dict)  # device -> its last ask, and when

    def of(self, device: str) -> dict[str, int]:
        """ask_id -> round of what a device has not answered, in the order asked."""
        if device not in self.busy:
            return {}
        first, number = self.busy[device]
        return {first: number, **self._queued.get(device, {})}

    def asked_at(self, device: str) -> float:
        """When the device was asked last, elapsed_s."""
        return self._last[device][1]

    def had_s(self, device: str) -> float:
        """How long the device was given for its last ask."""
        return self.due[device] - self.asked_at(device)

    def took_s(self, device: str, ask_id: str, elapsed_s: float) -> float | None:
        """How long its last ask took it, answered now; None for another one."""
        last, asked_s = self._last.get(device, ("", 0.0))
        return elapsed_s - asked_s if last == ask_id else None

    def ask(self, number: int, device: str, ask_id: str, elapsed_s: float, deadline_s: float) -> None:
        if self.ahead and device in self.busy:
            self._queued.setdefault(device, {})[ask_id] = number
        else:
            self.busy[device] = ask_id, number
        self._last[device] = ask_id, elapsed_s
        self.due[device] = elapsed_s + deadline_s

    def back(self, number: int, device: str, ask_id: str) -> None:
        """It is waited for again, before what the device was asked since."""
        since = {id_: of for id_, of in self.of(device).items() if id_ != ask_id}
        self.busy[device] = ask_id, number
        if since:
            self._queued[device] = since

    def release(self, device: str, ask_id: str) -> None:
        """Nothing more is waited for from this ask: the device is busy with what it was asked next, if anything."""
        queued = self._queued.get(device, {})
        queued.pop(ask_id, None)
        if self.busy.get(device, ("", 0))[0] == ask_id:
            del self.busy[device]
            if queued:
                following = next(iter(queued))
                self.busy[device] = following, queued.pop(following)


# What devices are told of their updates: a verdict on each, again and again until it is old.


@dataclass
class Told:
    """The last `kept` verdicts on each device's updates, oldest first. Being told one twice does no harm."""

    kept: int
    _verdicts: dict[str, deque[Verdict]] = field(default_factory=dict)
    _count: Counter[str] = field(default_factory=Counter)  # device -> verdicts on it so far
    _when_asked: dict[str, int] = field(default_factory=dict)  # ask_id -> how many there were then

    def dropped(self, update_id: str) -> None:
        self._tell(Verdict(UpdateId.parse(update_id), "dropped"))

    def folded(self, update_id: str, version: int) -> None:
        self._tell(Verdict(UpdateId.parse(update_id), "folded", version))

    def asked(self, device: str, ask_id: str) -> None:
        self._when_asked[ask_id] = self._count[device]

    def forget(self, ask_id: str) -> None:
        """Nobody will send this ask again."""
        self._when_asked.pop(ask_id, None)

    def of(self, device: str, most: int, ask_id: str = "") -> tuple[Verdict, ...]:
        """The device's last `most` verdicts. Those that there were when it was asked `ask_id`, where one is named: an
        ask that is sent again says the same.
        """
        since = self._count[device] - self._when_asked[ask_id] if ask_id in self._when_asked else 0
        told = list(self._verdicts.get(device, ()))
        return tuple(told[: len(told) - since][-most:])

    def _tell(self, verdict: Verdict) -> None:
        device = verdict.update_id.device
        self._count[device] += 1
        self._verdicts.setdefault(device, deque(maxlen=self.kept)).append(verdict)


# What comes of an ask, and what of one that nothing came of when its run is over.
#
# Every ask has exactly one outcome once its run is over, which is what the last fact about it says:
#
#     UpdateAccepted   its answer counts; or it is dropped after all, where it cannot be folded or its round had no step
#     UpdateDropped    its answer does not count
#     ClientFailed     it has no answer
#
# An answer is the first that is decided about: what a device sends for the same ask after it is a duplicate, and no
# fact of the ask. Nothing follows these facts but in one case. `left` and `stale` say only that nobody waits for the
# answer any more: if the device is back while its round is open, a ClientBack says that it is waited for again, and
# an answer that comes after all is taken or dropped by the plan's rules, like any other. An ask of which there is no
# fact when the run ends, or only a ClientBack, fails with OVER, in one transaction with the end: no kill comes
# between the two.


UNTAKEN = "no answer was taken before the run's end"


@dataclass
class Outcomes:
    """The asks without an outcome, as a fold over the journal."""

    missing: dict[str, tuple[int, str]] = field(default_factory=dict)  # ask_id -> (round, device), in the order asked
    first: FirstModelAsked | None = None  # the ask for a first model of which nothing came yet

    def apply(self, event: Event) -> None:
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
        """The end of the run, behind the outcomes that it gives to asks."""
        facts: list[Event] = [
            ClientFailed(end.at, number, device, ask_id, OVER, UNTAKEN, elapsed_s)
            for ask_id, (number, device) in self.missing.items()
        ]
        if asked := self.first:
            facts.append(FirstModelFailed(end.at, asked.device, asked.ask_id, OVER, UNTAKEN, elapsed_s))
        return [*facts, end]
