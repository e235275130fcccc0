"""Moments at which something breaks: drawn by a seed, recognised in the journal, at the gate and in what a device says
of itself, never timed.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.support.journal import Journal
from tests.support.passing import Answer
from tests.support.processes import PATIENCE_S, Site

ANSWERS = ("arriving", "given", "answered", "UpdateAccepted")  # the last one as the journal has it
APART = 6  # rounds between two of `spaced`: the device that was struck has answered again before the next


@dataclass(frozen=True)
class Moment:
    """`what` of a round, of one device's answer where that has a `device`: an event, what the gate watches, or
    `training`, while the device says that it trains.
    """

    round: int
    what: str
    device: str = ""

    @property
    def answer(self) -> Answer:
        return Answer(self.round, self.device)

    @property
    def held_before(self) -> float:
        """The first round whose answers would let the moment pass before it is waited for."""
        return self.round - 1 if self.what in ("RoundOpened", "training") else self.round

    @property
    def held_for(self) -> float:
        """The first round whose answers are not approved while it is waited for: it comes without them."""
        return self.round if self.what in ("RoundOpened", "training") else math.inf

    def __str__(self) -> str:
        return f"{self.what} of {f'the answer of {self.device} in ' if self.device else ''}round {self.round}"


def all_moments(rounds: int, devices: Sequence[str]) -> list[Moment]:
    """In the order in which they come."""
    found = list[Moment]()
    for number in range(1, rounds + 1):
        found.append(Moment(number, "RoundOpened"))
        found += [Moment(number, what, device) for device in devices for what in ANSWERS]
        found.append(Moment(number, "RoundClosed"))
    return found


def drawn(count: int, rounds: int, devices: Sequence[str], seed: int) -> list[Moment]:
    """So many different ones, in their order."""
    every = all_moments(rounds, devices)
    return [every[at] for at in sorted(random.Random(seed).sample(range(len(every)), count))]


def spaced(count: int, seed: int, kinds: Sequence[Moment]) -> list[Moment]:
    """So many of these kinds, from the second round on, `APART` rounds from each other."""
    draw = random.Random(seed)
    chosen = [draw.choice(kinds) for _ in range(count)]
    return [Moment(2 + APART * number, kind.what, kind.device) for number, kind in enumerate(chosen)]


class Striker:
    """Does what `strike` is at the moment that it waits for. `watch` is the gate's; `trains` says whether a device says
    that it trains for a round.
    """

    def __init__(self, site: Site, journal: Journal, trains: Callable[[Answer], bool] = lambda answer: False) -> None:
        self.site, self.journal, self.trains = site, journal, trains
        self.strike: Callable[[], None] = lambda: None
        self.late = 0  # moments that had passed unseen
        self._armed: Moment | None = None
        self._struck, self._lock = threading.Event(), threading.Lock()

    def watch(self, what: str, answer: Answer) -> None:
        if self._armed == Moment(answer.round, what, answer.device):
            self._strike()

    def at(self, moment: Moment, armed: Callable[[], None] = lambda: None) -> None:
        """Return when it is done; `armed` is called before anything is waited for. What has passed unseen has passed:
        then it is done at once.
        """
        self._struck.clear()
        self.late += self._is_past(moment)
        self._armed = moment
        armed()
        for _ in range(int(PATIENCE_S / 0.001)):
            if self._struck.wait(0.001):
                return
            if self._is_past(moment) or self._has_begun(moment) or self.journal.ended():
                self._strike()
        raise AssertionError(f"{moment}: not within {PATIENCE_S:g} s\n{self.site.said()}")

    def _has_begun(self, moment: Moment) -> bool:
        return moment.what == "training" and self.trains(moment.answer)

    def _is_past(self, moment: Moment) -> bool:
        if moment.device:
            return self.journal.has_answer(moment.answer)
        return self.journal.has(moment.what, moment.round)

    def _strike(self) -> None:
        with self._lock:
            if self._armed is not None:
                self._armed = None
                self.strike()
                self._struck.set()
