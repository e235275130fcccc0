"""This module gives time as a value that is passed in, and finds out how long a stopped process was down.

A round gets a `Clock`, so it runs the same with simulated time as with real time.

A process sets the modification time of a file while it is alive (`beating`). The file shows when the process was last
alive, however it ended. A new aggregator sets this time before it serves. It therefore first copies the old time into
what it writes about itself (`DOWN_SINCE`).

The wall clock may be set while no process runs. `downtime_s` reports a length that no downtime has as unknown.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from thinwire.core.statedir import private_opener


class Clock(Protocol):
    """Gives two times: `now` decides (seconds, monotonic, any origin), `wall` is shown (seconds since 1970)."""

    def now(self) -> float:
        """Return monotonic seconds from any origin, for decisions."""

    def wall(self) -> float:
        """Return seconds since 1970, for display."""


class RealClock:
    """Reads this machine's clocks."""

    def now(self) -> float:
        """Return monotonic seconds, from `time.monotonic`."""
        return time.monotonic()

    def wall(self) -> float:
        """Return seconds since 1970, from `time.time`."""
        return time.time()


@dataclass
class VirtualClock:
    """Holds a time that changes only through `advance`.

    >>> clock = VirtualClock(); clock.advance(2.5); clock.now()
    2.5
    """

    at: float = 0.0
    origin: float = 1_700_000_000.0

    def now(self) -> float:
        """Return the time in seconds."""
        return self.at

    def wall(self) -> float:
        """Return `origin` plus the time, in seconds since 1970."""
        return self.origin + self.at

    def advance(self, seconds: float) -> None:
        """Add seconds to the time; raise ValueError for a negative number."""
        if seconds < 0:
            raise ValueError(f"time does not run backwards: {seconds}")
        self.at += seconds


@dataclass
class StoppableClock:
    """Holds the time of another clock without the spans in which it was stopped; the wall clock always goes on.

    >>> clock = StoppableClock(VirtualClock(5.0)); clock.stop(); clock.inner.advance(2.0)
    >>> clock.go_on(), clock.now()
    (2.0, 5.0)
    """

    inner: Clock
    lost_s: float = 0.0
    stopped_at: float | None = None

    def now(self) -> float:
        """Return the time in seconds, as of when it was stopped."""
        return (self.inner.now() if self.stopped_at is None else self.stopped_at) - self.lost_s

    def wall(self) -> float:
        """Return the other clock's seconds since 1970."""
        return self.inner.wall()

    def stop(self) -> None:
        """Let the time stand still from now on."""
        if self.stopped_at is None:
            self.stopped_at = self.inner.now()

    def go_on(self) -> float:
        """Let the time go on, and return for how many seconds it stood still."""
        stood_s = 0.0 if self.stopped_at is None else self.inner.now() - self.stopped_at
        self.lost_s, self.stopped_at = self.lost_s + stood_s, None
        return stood_s


class SteadyClock:
    """Holds the times of another clock, except that its wall clock never goes back: it goes on where a step back began.

    >>> inner = VirtualClock(); clock = SteadyClock(inner); began = clock.wall()
    >>> inner.origin -= 3600.0; inner.advance(2.0); clock.wall() - began
    2.0
    """

    def __init__(self, inner: Clock) -> None:
        self._inner, self._ahead = inner, float("-inf")  # the most by which the wall clock was ahead of `now`
        self.wall()

    def now(self) -> float:
        """Return the other clock's monotonic seconds."""
        return self._inner.now()

    def wall(self) -> float:
        """Return the seconds since 1970, never fewer than before."""
        wall = self._inner.wall()  # read first: a delay between the two may not make it look further ahead
        now = self._inner.now()
        self._ahead = max(self._ahead, wall - now)
        return now + self._ahead


MAX_DOWNTIME_S = 30 * 86_400.0  # a longer one means that the wall clock was set


def downtime_s(down_since: float, back_at: float) -> float | None:
    """Return the seconds between two readings of the wall clock.

    The result is None if the clock was set in between: if it would be negative, or more than MAX_DOWNTIME_S.

    >>> downtime_s(100.0, 160.0), downtime_s(100.0, 40.0), downtime_s(100.0, 1e9)
    (60.0, None, None)
    """
    took = back_at - down_since
    return took if 0.0 <= took <= MAX_DOWNTIME_S else None


log = logging.getLogger("thinwire.clock")
DOWN_SINCE = "down_since"
HEARD = "heard.json"  # in the lock's directory: time of the last message from each device
BEAT_S = 2.0  # seconds, the uncertainty of a downtime; each beat may be a write to a flash card


@contextlib.contextmanager
def beating(descriptor: int) -> Iterator[None]:
    """Set the file's modification time to now, every `BEAT_S` seconds and at the end; its content is unchanged."""
    with repeating(lambda: os.utime(descriptor), BEAT_S, "heartbeat"):
        yield


@contextlib.contextmanager
def repeating(work: Callable[[], object], every_s: float, name: str) -> Iterator[None]:
    """Call `work` in a thread now, every `every_s` seconds and at the end, whatever it raises.

    An `OSError` (a full disk) is ignored, and any other error is logged: the next call may succeed.
    """
    over = threading.Event()

    def run() -> None:
        while True:
            last = over.is_set()
            try:
                work()
            except OSError:
                pass
            except Exception:
                log.exception("%s: this time it failed, and the next one is in %g s", name, every_s)
            if last:
                return
            over.wait(every_s)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def last_beat(file: Path | int) -> float:
    """Return when the process that beats on this file was last alive, in wall-clock seconds; 0 without a file."""
    try:
        return os.stat(file).st_mtime
    except OSError:
        return 0.0


def write_heard(path: Path, heard: Mapping[str, float]) -> None:
    """Replace the record of the last message from each device.

    The record is not synced: after a power cut every device has to reconnect.
    """
    draft = path.with_name(f".{path.name}.new")
    with contextlib.suppress(OSError):
        with open(draft, "w", encoding="utf-8", opener=private_opener) as file:
            json.dump({name: round(at, 1) for name, at in heard.items()}, file)
        os.replace(draft, path)


def heard_by(lock: Path) -> dict[str, float]:
    """Return the wall-clock time of the last message from each connected device, from the record beside this lock."""
    try:
        return {str(name): float(at) for name, at in json.loads(lock.with_name(HEARD).read_bytes()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def is_starting(about: Mapping[str, Any]) -> bool:
    """Return True if the aggregator that wrote `about` does not serve yet."""
    return DOWN_SINCE in about


def down_since_of(lock: Path) -> float:
    """Return when an aggregator last served by this lock, in wall-clock seconds; 0 if unknown."""
    try:
        return float(json.loads(lock.read_bytes())[DOWN_SINCE])
    except (OSError, ValueError, KeyError, TypeError):
        return last_beat(lock)
