"""Time as a value that is passed in, so that a protocol runs the same on a script as on a network."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """`now` decides (seconds, monotonic, any origin); `wall` is shown (seconds since 1970)."""

    def now(self) -> float: ...
    def wall(self) -> float: ...


class RealClock:
    """This machine's clocks."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


@dataclass
class VirtualClock:
    """A clock that stands still until it is told to move.

    >>> clock = VirtualClock(); clock.advance(2.5); clock.now()
    2.5
    """

    at: float = 0.0
    origin: float = 1_700_000_000.0

    def now(self) -> float:
        return self.at

    def wall(self) -> float:
        return self.origin + self.at

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time does not run backwards: {seconds}")
        self.at += seconds
