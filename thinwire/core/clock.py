"""This module gives time as a value that is passed in, and finds out how long a stopped process was down.

A round gets a `Clock`, so it runs the same with simulated time as with real time.

A process sets the modification time of a file while it is alive (`beating`). The file shows when the process was last
alive, however it ended. A new aggregator sets this time before it serves. It therefore first copies the old time into
what it writes about itself (`starting`).

The wall clock may be set while no process runs (`Beside`). The kernel counts seconds since the machine's start, sleep
included, and nobody can set that count. The difference between wall clock and kernel count therefore changes only when
the wall clock is set. After a restart of the machine the count begins at 0, so a difference from before says nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from thinwire.core.errors import ThinwireError
from thinwire.core.statedir import private_opener, write_atomically


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


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Beside:
    """Holds the wall clock minus the kernel's count, in seconds, and the id of the machine's start."""

    boot_id: str
    ahead_s: float

    def set_by_s(self, before: Beside | None) -> float:
        """Return by how much the wall clock was set since `before`; 0 if unknown, or not more than SLACK_S.

        >>> now = Beside("a", 100.0)
        >>> now.set_by_s(Beside("a", 40.0)), now.set_by_s(Beside("a", 99.9)), now.set_by_s(Beside("b", 40.0))
        (60.0, 0.0, 0.0)
        """
        if before is None or before.boot_id != self.boot_id:
            return 0.0
        by = self.ahead_s - before.ahead_s
        return by if abs(by) > SLACK_S else 0.0


def beside() -> Beside | None:
    """Return the current difference; None on a system without these clocks."""
    try:
        return Beside(BOOT_ID.read_text().strip(), time.time() - time.clock_gettime(time.CLOCK_BOOTTIME))
    except (OSError, AttributeError):  # only Linux has CLOCK_BOOTTIME
        return None


def kept(file: Path) -> Beside | None:
    """Return the difference that was last written to the file; None if there is none, or it cannot be read."""
    try:
        found = json.loads(file.read_bytes())
        said = Beside(str(found["boot_id"]), float(found["ahead_s"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return said if math.isfinite(said.ahead_s) else None


def keep(file: Path, before: Beside | None) -> Beside | None:
    """Write the current difference to the file if it differs from `before`; return the file's content.

    If the disk accepts no more data, the file is deleted: an old difference would count the same setting of the clock
    again.
    """
    now = beside()
    if now is None or (before is not None and now.boot_id == before.boot_id and not now.set_by_s(before)):
        return before
    try:
        write_atomically(file, json.dumps(asdict(now)).encode())
    except ThinwireError:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
        return None
    return now


def set_since_s(file: Path) -> float:
    """Return by how much the wall clock was set since the file was last written; 0 if unknown."""
    now = beside()
    return now.set_by_s(kept(file)) if now else 0.0


LONGEST_S = 30 * 86_400.0  # a longer absence means that the wall clock was set
SLACK_S = 1.0  # two clocks of one machine may differ by this much


def absence_s(gone_at: float, back_at: float, set_by_s: float = 0.0) -> float | None:
    """Return the seconds between two readings of the wall clock; None if less than 0 or more than LONGEST_S.

    `set_by_s` is by how much the clock is known to have been set in between.

    >>> absence_s(100.0, 160.0), absence_s(100.0, 40.0), absence_s(100.0, 1e9), absence_s(100.0, 3760.0, 3600.0)
    (60.0, None, None, 60.0)
    """
    took = back_at - gone_at - set_by_s
    return max(0.0, took) if -SLACK_S <= took <= LONGEST_S else None


GONE_AT = "gone_at"
HEARD = "heard.json"  # in the lock's directory: time of the last message from each device
BEAT_S = 2.0  # seconds, the uncertainty of a downtime; each beat may be a write to a flash card


@contextlib.contextmanager
def beating(descriptor: int, clock: Path | None = None, every_s: float = BEAT_S) -> Iterator[None]:
    """Set the file's modification time to now, every `every_s` seconds and at the end; its content is unchanged.

    The file `clock` says to which setting of the wall clock that time belongs.
    """
    over = threading.Event()

    def beat() -> None:
        setting = kept(clock) if clock is not None else None
        while True:
            last = over.is_set()
            with contextlib.suppress(OSError):  # the disk accepts no writes: the time stays old
                os.utime(descriptor)
            if clock is not None:
                setting = keep(clock, setting)
            if last:
                return
            over.wait(every_s)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
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


def starting(gone_at: float) -> dict[str, Any]:
    """Return what an aggregator writes about itself until it serves; `gone_at` is when the one before it was last
    alive.
    """
    return {GONE_AT: gone_at}


def is_starting(about: Mapping[str, Any]) -> bool:
    """Return True if the aggregator that wrote `about` does not serve yet."""
    return GONE_AT in about


def gone_since(lock: Path) -> float:
    """Return when an aggregator last served by this lock, in wall-clock seconds; 0 if unknown."""
    try:
        return float(json.loads(lock.read_bytes())[GONE_AT])
    except (OSError, ValueError, KeyError, TypeError):
        return last_beat(lock)
