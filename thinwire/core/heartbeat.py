"""When a process was last known to be alive: the time of a file, which is there to be read however it ended."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from thinwire.core import clock_set

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
