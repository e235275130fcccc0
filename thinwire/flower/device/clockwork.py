"""The aggregator's time on a device whose own clock may be wrong: a Pi boots without one, and time servers step it.

What is learned is kept as an offset to the time since boot, which no one steps and which runs on in suspend.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

from thinwire.core.errors import Unreachable
from thinwire.flower.wire.refusals import LATEST

_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # macOS has no other


def since_boot() -> float:
    return time.clock_gettime(_BOOT)


class Clockwork:
    """Before anything was learned it is this machine's clock, and afterwards the aggregator's. Any thread may ask.

    >>> clock = Clockwork(wall=lambda: 0.0, boot=lambda: 30.0)   # 1970, half a minute after the start
    >>> clock.learn(1_800_000_000.0); clock.now().year, clock.skew_s
    (2027, 1800000000.0)
    """

    def __init__(self, wall: Callable[[], float] = time.time, boot: Callable[[], float] = since_boot) -> None:
        self._wall, self._boot = wall, boot
        self._offset: float | None = None
        self.doubted = False  # what was learned was forgotten again, and nothing was learned since
        self._lock = threading.Lock()

    def wall(self) -> float:
        with self._lock:
            return self._wall() if self._offset is None else self._boot() + self._offset

    def now(self) -> datetime:
        """What is signed: a time that can be written, whatever was learned."""
        return datetime.fromtimestamp(min(max(self.wall(), 0.0), LATEST), UTC)

    def learn(self, now: float) -> None:
        """The aggregator's clock said `now` a moment ago: half a round trip late is within what it takes."""
        with self._lock:
            self._offset, self.doubted = now - self._boot(), False

    @property
    def known(self) -> bool:
        with self._lock:
            return self._offset is not None

    @property
    def skew_s(self) -> float:
        """How far this machine's clock is behind the aggregator's at this moment; 0 while that is not known."""
        return self.wall() - self._wall() if self.known else 0.0

    def require_valid(self, not_before: float, not_after: float, url: str) -> None:
        """`Unreachable` for a certificate that is not valid now. TLS did not look: it had no clock to trust.

        What was learned is then forgotten: it may be the time that is wrong, and the next hello asks for it again.
        """
        if not self.known:
            return
        now = self.wall()
        if not_before <= now <= not_after:
            return
        with self._lock:
            self._offset, self.doubted = None, True
        past = now > not_after
        when = datetime.fromtimestamp(not_after if past else not_before, UTC).strftime("%Y-%m-%d %H:%M")
        raise Unreachable(
            f"the certificate of the aggregator at {url} is not valid now",
            why=f"it {'ended' if past else 'begins'} on {when} UTC",
            hint="ask its operator: thinwire aggregator doctor",
        )
