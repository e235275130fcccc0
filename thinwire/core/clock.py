"""Time as a value that is passed in, so that a protocol runs the same on a script as on a network."""

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


# Whether somebody set the wall clock while nobody was there, by a clock of this machine that nobody can set.
#
# The kernel counts seconds since its start, sleep included. That count beside the wall clock's stays as it is until the
# wall clock is set; with the next start of the machine it begins anew, and nothing can be said.


BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Beside:
    """The wall clock less the kernel's, in seconds, and of which start of the machine that is."""

    boot_id: str
    ahead_s: float

    def set_by_s(self, before: Beside | None) -> float:
        """By how much the wall clock was set since `before`, as far as that can be told; 0: by nothing that counts.

        >>> now = Beside("a", 100.0)
        >>> now.set_by_s(Beside("a", 40.0)), now.set_by_s(Beside("a", 99.9)), now.set_by_s(Beside("b", 40.0))
        (60.0, 0.0, 0.0)
        """
        if before is None or before.boot_id != self.boot_id:
            return 0.0
        by = self.ahead_s - before.ahead_s
        return by if abs(by) > SLACK_S else 0.0


def beside() -> Beside | None:
    """Now; None on a system that does not tell."""
    try:
        return Beside(BOOT_ID.read_text().strip(), time.time() - time.clock_gettime(time.CLOCK_BOOTTIME))
    except (OSError, AttributeError):  # CLOCK_BOOTTIME is Linux's
        return None


def kept(file: Path) -> Beside | None:
    """What was written there last; None where that is nothing, or cannot be read."""
    try:
        found = json.loads(file.read_bytes())
        said = Beside(str(found["boot_id"]), float(found["ahead_s"]))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return said if math.isfinite(said.ahead_s) else None


def keep(file: Path, before: Beside | None) -> Beside | None:
    """Write it there if it is another than `before`, and give what is there. Where a disk takes no more nothing is
    there: what was written for an earlier setting would count that one again.
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
    """By how much the wall clock was set since that was written last, as far as that can be told."""
    now = beside()
    return now.set_by_s(kept(file)) if now else 0.0


# For how long nobody was there, by two readings of a wall clock that somebody may have set in between.


LONGEST_S = 30 * 86_400.0  # who is back after longer than this has a clock that was set, as far as anybody can tell
SLACK_S = 1.0  # two clocks of one machine may differ by so much


def absence_s(gone_at: float, back_at: float, set_by_s: float = 0.0) -> float | None:
    """Seconds; None where it is not known: less than none, or longer than LONGEST_S.

    `set_by_s`: by how much the clock is known to have been set in between (core/clock.py).

    >>> absence_s(100.0, 160.0), absence_s(100.0, 40.0), absence_s(100.0, 1e9), absence_s(100.0, 3760.0, 3600.0)
    (60.0, None, None, 60.0)
    """
    took = back_at - gone_at - set_by_s
    return max(0.0, took) if -SLACK_S <= took <= LONGEST_S else None


# When a process was last known to be alive: the time of a file, which is there to be read however it ended.
#
# An aggregator that starts beats before it serves: since when none did is then in what it wrote about itself.


GONE_AT = "gone_at"
HEARD = "heard.json"  # beside the lock: when the aggregator heard each device last
BEAT_S = 2.0  # so much of an absence is not known; on a card that wears, every beat may become a write


@contextlib.contextmanager
def beating(descriptor: int, clock: Path | None = None, every_s: float = BEAT_S) -> Iterator[None]:
    """Set the file's time to now, every so often and at the end; what is in the file stays as it is. The file `clock`
    says by which setting of the wall clock that is (core/clock.py).
    """
    over = threading.Event()

    def beat() -> None:
        setting = kept(clock) if clock is not None else None
        while True:
            last = over.is_set()
            with contextlib.suppress(OSError):  # a disk that takes no more: then nobody learns of it
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
    """When the process that beats on this file was last alive, wall-clock seconds; 0 where there is no file."""
    try:
        return os.stat(file).st_mtime
    except OSError:
        return 0.0


def write_heard(path: Path, heard: Mapping[str, float]) -> None:
    """Replace what is said of when each device was heard last. It is not synced: after a power cut nobody is there."""
    draft = path.with_name(f".{path.name}.new")
    with contextlib.suppress(OSError):
        with open(draft, "w", encoding="utf-8", opener=private_opener) as file:
            json.dump({name: round(at, 1) for name, at in heard.items()}, file)
        os.replace(draft, path)


def heard_by(lock: Path) -> dict[str, float]:
    """When the aggregator of this lock heard each device that is there last, wall-clock seconds."""
    try:
        return {str(name): float(at) for name, at in json.loads(lock.with_name(HEARD).read_bytes()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def starting(gone_at: float) -> dict[str, Any]:
    """What an aggregator writes about itself until it serves; `gone_at`: when the one before it was last alive."""
    return {GONE_AT: gone_at}


def is_starting(about: Mapping[str, Any]) -> bool:
    """Whether who wrote this about itself does not serve yet."""
    return GONE_AT in about


def gone_since(lock: Path) -> float:
    """When an aggregator last served by this lock, where none does now: wall-clock seconds; 0 where it is not known."""
    try:
        return float(json.loads(lock.read_bytes())[GONE_AT])
    except (OSError, ValueError, KeyError, TypeError):
        return last_beat(lock)
