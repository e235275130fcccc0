"""What the demo does to its clients: one is slow all the time, one is killed half-way and comes back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thinwire.core.events import Event

SLOW_STEP_S = 0.01  # 50 steps then take half a second longer than anybody else's
AWAY_S = 1.5


def names_of(count: int) -> list[str]:
    return [f"client-{number}" for number in range(1, count + 1)]


def roles(names: list[str]) -> tuple[str, str]:
    """(who is slow, who is killed): two different ones wherever there are two."""
    return names[-1], names[len(names) // 2 - 1 if len(names) > 1 else 0]


@dataclass
class Disturbance:
    """Kills `victim` when round `at` opens and starts it again `AWAY_S` later; gives the lines that say so."""

    victim: str
    at: int
    kill: Callable[[str], None]
    start: Callable[[str], None]
    killed_at: float | None = None
    back: bool = False

    def hear(self, event: Event) -> list[str]:
        from thinwire.core.events import RoundOpened

        if not isinstance(event, RoundOpened) or event.round != self.at or self.killed_at is not None:
            return []
        self.kill(self.victim)
        self.killed_at = time.monotonic()
        return [f"       {self.victim} is killed (kill -9) in round {self.at}"]

    def look(self, now: float) -> list[str]:
        """Bring it back when it has been away long enough."""
        if self.killed_at is None or self.back or now - self.killed_at < AWAY_S:
            return []
        self.back = True
        self.start(self.victim)
        return [f"       {self.victim} is started again"]
