"""When the aggregator does not answer: how long to wait before the next try, and when to say so."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

FIRST_S, MOST_S = 0.5, 300.0
SAY_EVERY_S = 60.0


@dataclass
class Outage:
    """Exponential backoff with full jitter: devices that lost an aggregator together do not come back together.

    The n-th wait is drawn from [0, w 2^n], up to five minutes. w is `within_s`, which the aggregator gave by the number
    of its devices: 10 000 of them come back at some 100 a second, whenever it is there again. Any thread may call it.
    """

    now: Callable[[], float] = time.monotonic
    draw: Callable[[], float] = random.random  # not a key's: no two devices may draw the same
    _tries: int = 0
    _since: float | None = None
    _said_at: float | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def failed(self, after_s: float = 0.0, within_s: float = 0.0) -> tuple[float, bool]:
        """(seconds to wait, whether to say that nobody answers): at the first failure, then once a minute.

        `after_s`: the aggregator said not to come before; the draw comes on top, for it said so to others too.
        """
        with self._lock:
            now = self.now()
            self._since = now if self._since is None else self._since
            window_s = min(max(MOST_S, within_s), max(FIRST_S, within_s) * 2.0**self._tries)
            self._tries = min(self._tries + 1, 16)
            say = self._said_at is None or now - self._said_at >= SAY_EVERY_S
            self._said_at = now if say else self._said_at
            return after_s + self.draw() * window_s, say

    def worked(self) -> bool:
        """A call went through; True when the one before had not."""
        with self._lock:
            failed = self._since is not None
            self._tries, self._since, self._said_at = 0, None, None
            return failed

    @property
    def lasts_s(self) -> float:
        with self._lock:
            return 0.0 if self._since is None else self.now() - self._since
