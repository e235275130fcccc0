"""For how long a device is not asked again that could not do what it was asked."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from thinwire.core.events import ClientFailed, Event, FirstModelAsked, FirstModelFailed
from thinwire.server.policy.cohort import in_drawn_order
from thinwire.server.policy.deadlines import FIRST_S, Deadline

PASSING = ("hours", "rounds_a_day", "metered")  # rules of a device's policy whose answer changes with the time
PASSING_S, DAY_S = 600.0, 90_000.0  # so long at least and at most a device is left alone that declined by one of them
AGAIN = re.compile(r"\(again in (\d{1,6}) s\)$")
MISSING = "task-missing"
BARRING = (
    MISSING,
    "task-mismatch",
    "layout-mismatch",
    "declined",
    "protocol",
)  # asked again it would fail again


def barred_s(kind: str, text: str) -> float:
    """How long a device is not asked after such a failure, unless it says something else meanwhile.

    >>> barred_s("declined", "hours: at night (again in 7200 s)"), barred_s("declined", "tasks: not this one")
    (7200.0, inf)
    """
    if kind != "declined" or text.partition(":")[0] not in PASSING:
        return math.inf
    told = AGAIN.search(text)
    return min(max(float(told[1]) if told else 0.0, PASSING_S), DAY_S)


@dataclass
class Barred:
    """Devices whose failure was one that would come again, for as long as they say of themselves what they said then.

    `said` gives a digest of what a device says now; that of then is in the journal, so that a restart changes nothing.
    """

    _failed: dict[str, tuple[ClientFailed, float]] = field(default_factory=dict)  # and until when, elapsed_s

    def failed(self, event: ClientFailed) -> None:
        if event.kind in BARRING:
            until_s = event.elapsed_s + barred_s(event.kind, event.text)
            self._failed[event.device] = event, until_s

    def bars(self, device: str, elapsed_s: float, said: Callable[[str], str]) -> bool:
        """Whether it is not asked now."""
        if device not in self._failed:
            return False
        event, until_s = self._failed[device]
        return elapsed_s < until_s and event.said == said(device)

    def same_until(self, elapsed_s: float) -> float:
        """When the next of those who are barred now may be asked again by time alone, elapsed_s."""
        return min((until_s for _, until_s in self._failed.values() if elapsed_s < until_s), default=math.inf)

    def now(self, elapsed_s: float, said: Callable[[str], str]) -> dict[str, str]:
        """Devices that are not asked now, with the reason."""
        return {
            device: "said that it has no such task" if event.kind == MISSING else f"{event.kind}: {event.text}"
            for device, (event, _) in self._failed.items()
            if self.bars(device, elapsed_s, said)
        }


# Who was asked for the first model and what came of it, as a fold over the journal: a resumed run knows the same.


TRIED = ("left", "stale")  # what may be another time: it was away, slow, or at other work
OWN = ("declined", "refused")  # what is the device's own affair, and says nothing of the task
ENOUGH = 10  # devices that failed for good: it is the task then, and one after the other thousands would take days
MOST_TIMES = 8  # over the first deadline, as the last ask has where nothing is said: nobody else is asked meanwhile
AWAY_S = MOST_TIMES * FIRST_S  # who is not there is waited for no longer than who is, and says nothing
Said = Callable[[str], str]  # a digest of what a device says of itself now; "" where it has said nothing yet


@dataclass
class FirstAsks:
    """`open` is the ask whose answer is waited for: no other answer is taken. `times`: how often each was asked.

    Who left or let its time pass may be asked again, until that came of `most` asks; who declined for now when that has
    passed; and everybody else when it says something else of itself than it did then, over a restart too.
    """

    open: FirstModelAsked | None = None
    failed: FirstModelFailed | None = None  # the last one
    times: Counter[str] = field(default_factory=Counter)
    tried: Counter[str] = field(default_factory=Counter)  # device -> asks of which nothing came, for one of TRIED
    late: Counter[str] = field(default_factory=Counter)  # device -> of these asks, those whose time was over
    _failed: dict[str, FirstModelFailed] = field(default_factory=dict)  # the last one of each, in order

    def apply(self, event: Event) -> None:
        """Take in an event, if it is one of these asks."""
        match event:
            case FirstModelAsked():
                self.open, self.times[event.device] = event, self.times[event.device] + 1
            case FirstModelFailed(device=device):
                self.open, self.failed = None, event
                self._failed.pop(device, None)
                self._failed[device] = event
                if event.kind in TRIED:
                    self.tried[device] += 1
                if event.kind == "stale":
                    self.late[device] += 1

    def bars(self, elapsed_s: float, most: int, said: Said) -> dict[str, str]:
        """Devices that are not asked now, with the reason. How often one was tried counts whatever it says since, for
        who dies of it comes anew each time.
        """
        now = {device: _text(event) for device, event in self._unchanged(said).items() if elapsed_s < _until_s(event)}
        return now | self._given_up(most)

    def reasons(self, said: Said) -> dict[str, str]:
        """Why devices gave none, of all that say nothing else of themselves since."""
        return {device: _text(event) for device, event in self._unchanged(said).items()}

    def may_pass(self, elapsed_s: float, most: int, said: Said) -> set[str]:
        """Devices whose reason passes by itself, or passed AWAY_S ago at most: who can be asked then is asked, and the
        others may have left for good.
        """
        untils = {device: _until_s(event) for device, event in self._unchanged(said).items()}
        passing = {d for d, until in untils.items() if math.isfinite(until) and elapsed_s < until + AWAY_S}
        return passing - self._given_up(most).keys()

    def for_good(self, most: int) -> dict[str, str]:
        """Devices that failed for good, the last one first, but for what is only their own affair."""
        given_up = self._given_up(most)
        return {
            device: given_up.get(device, _text(event))
            for device, event in reversed(self._failed.items())
            if device in given_up or (event.kind not in OWN and math.isinf(_again_s(event)))
        }

    def next_of(self, able: Sequence[str], seed: int) -> str:
        """Whom the seed draws of those that were asked least often; where ENOUGH were tried, of these before others."""
        tried = [device for device in able if self.tried[device]] if len(self.tried) >= ENOUGH else []
        return min(in_drawn_order(tried or able, seed, 0), key=lambda device: self.times[device])

    def _unchanged(self, said: Said) -> dict[str, FirstModelFailed]:
        """The last failure of each device that says nothing else of itself since."""
        return {device: event for device, event in self._failed.items() if said(device) in ("", event.said)}

    def _given_up(self, most: int) -> dict[str, str]:
        given_up = [device for device, tried in self.tried.items() if tried >= most]
        return {device: f"{_text(self._failed[device])} (asks: {self.times[device]})" for device in given_up}


def patient(one: Deadline, late: int) -> Deadline:
    """The deadline of a device that was late so often: twice as long each time, up to MOST_TIMES.

    >>> patient(Deadline(60.0, "60 s: because"), 2)
    Deadline(seconds=240.0, reason='240 s: 4 times over, for its time was over before; 60 s: because', usual_s=None)
    """
    if not late:
        return one
    times = min(2**late, MOST_TIMES)
    seconds = times * one.seconds
    return Deadline(seconds, f"{seconds:g} s: {times} times over, for its time was over before; {one.reason}")


def _text(event: FirstModelFailed) -> str:
    return f"{event.kind}: {event.reason}"


def _until_s(event: FirstModelFailed) -> float:
    return event.elapsed_s + _again_s(event)


def _again_s(event: FirstModelFailed) -> float:
    return 0.0 if event.kind in TRIED else barred_s(event.kind, event.reason)
