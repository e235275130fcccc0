"""When a process was last known to be alive: the time of a file, which is there to be read however it ended.

An aggregator that starts beats before it serves: since when none did is then in what it wrote about itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from thinwire.core import clock_set
from thinwire.core.home import private_opener

GONE_AT = "gone_at"
HEARD = "heard.json"  # beside the lock: when the aggregator heard each device last
BEAT_S = 2.0  # so much of an absence is not known; on a card that wears, every beat may become a write


@contextlib.contextmanager
def beating(descriptor: int, clock: Path | None = None, every_s: float = BEAT_S) -> Iterator[None]:
    """Set the file's time to now, every so often and at the end; what is in the file stays as it is. The file `clock`
    says by which setting of the wall clock that is (core/clock_set.py).
    """
    over = threading.Event()

    def beat() -> None:
        setting = clock_set.kept(clock) if clock is not None else None
        while True:
            last = over.is_set()
            with contextlib.suppress(OSError):  # a disk that takes no more: then nobody learns of it
                os.utime(descriptor)
            if clock is not None:
                setting = clock_set.keep(clock, setting)
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
