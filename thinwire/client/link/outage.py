"""When the aggregator does not answer: how long to wait before the next try, and when to say so."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

FIRST_S, MOST_S = 0.5, 300.0
SAY_EVERY_S = 60.0


@dataclass
class Outage:
    """Waits with full jitter that grow with the outage: devices that lost an aggregator together do not come back
    together, and of a few none is late by more than half of what they missed anyway.

    A wait is drawn from 0 to half of what the outage has lasted, from half a second on up to five minutes: by the time,
    not by the number of tries, which two threads make; some 30 in ten minutes, and then one in two and a half. Where
    `within_s`, which the aggregator gave by the number of its devices, asks for more, it is drawn from 0 to that, and
    after the first try to twice that: a try in `within_s` on average, so that 10 000 come back at some 100 a second,
    whenever it is there again. Any thread may call it; all wait for one moment, or a device with two would come back at
    the sooner of two draws.
    """

    now: Callable[[], float] = time.monotonic
    draw: Callable[[], float] = random.random  # not a key's: no two devices may draw the same
    _since: float | None = None
    _said_at: float | None = None
    _next_at: float = -math.inf  # the moment of the next try
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def failed(self, after_s: float = 0.0, within_s: float = 0.0, since: float | None = None) -> tuple[float, bool]:
        """(seconds to wait, whether to say that nobody answers): at the first failure, then once a minute.

        `after_s`: the aggregator said not to come before; the draw comes on top, for it said so to others too.
        `since`: when this call failed first, where others may have gone through since.
        """
        with self._lock:
            now = self.now()
            first, self._since = self._since is None, now if self._since is None else self._since
            lasted_s = now - (self._since if since is None else min(since, self._since))
            spread_s = within_s if first and not lasted_s else 2 * within_s
            window_s = min(max(MOST_S, 2 * within_s), max(FIRST_S, lasted_s / 2, spread_s))
            if self._next_at <= now + after_s:
                self._next_at = now + after_s + self.draw() * window_s
            say = self._said_at is None or now - self._said_at >= SAY_EVERY_S
            self._said_at = now if say else self._said_at
            return self._next_at - now, say

    def worked(self) -> bool:
        """A call went through; True when the one before had not."""
        with self._lock:
            failed = self._since is not None
            self._since, self._said_at, self._next_at = None, None, -math.inf
            return failed

    @property
    def over(self) -> bool:
        """Whether the last call went through, whichever thread made it."""
        with self._lock:
            return self._since is None

    @property
    def lasts_s(self) -> float:
        with self._lock:
            return 0.0 if self._since is None else self.now() - self._since
