"""Moments at which something breaks: drawn by a seed, recognised in the journal and at the gate, never timed."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.system.gate import Answer
from tests.system.journal import Journal
from tests.system.processes import PATIENCE_S, Site

ANSWERS = ("arriving", "given", "answered", "UpdateAccepted")  # the last one as the journal has it


@dataclass(frozen=True)
class Moment:
    """`what` of a round, of one device's answer where that has a `device`."""

    round: int
    what: str
    device: str = ""

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


def spaced(count: int, devices: Sequence[str], seed: int) -> list[Moment]:
    """So many, one of every second round: a device that was struck has answered again before the next."""
    draw = random.Random(seed)
    each = len(all_moments(1, devices))
    every = all_moments(2 * count, devices)
    return [every[2 * each * number + draw.randrange(each)] for number in range(count)]


class Striker:
    """Does what `strike` is at the moment that it waits for. `watch` is the gate's."""

    def __init__(self, site: Site, journal: Journal) -> None:
        self.site, self.journal = site, journal
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
            if self._is_past(moment) or self.journal.ended():
                self._strike()
        raise AssertionError(f"{moment}: not within {PATIENCE_S:g} s\n{self.site.said()}")

    def _is_past(self, moment: Moment) -> bool:
        if moment.device:
            return self.journal.has_answer(moment.round, moment.device)
        return self.journal.has(moment.what, moment.round)

    def _strike(self) -> None:
        with self._lock:
            if self._armed is not None:
                self._armed = None
                self.strike()
                self._struck.set()
