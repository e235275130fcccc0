"""The log of an aggregator in the background: its own output goes there, and stays within two files of a bound."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

FILE = "service.log"  # and service.log.1, the one before
MAX_LOG_BYTES = 1 << 20
LOOK_S = 1.0
OUTPUT = (1, 2)  # descriptors: also what C code prints


@contextlib.contextmanager
def bounded(log: Path, most: int = MAX_LOG_BYTES, every_s: float = LOOK_S) -> Iterator[None]:
    """Begin the file again whenever it has outgrown `most` bytes, looked at `every_s` seconds; what was there becomes
    LOG.1. No line is lost, and one that a crash prints is in the file: nothing stands between this process and it.

    Output that goes elsewhere (a terminal, systemd's journal) is left alone.
    """
    if not _is_output(log):
        yield
        return
    over = threading.Event()

    def look() -> None:
        while not over.wait(every_s):
            with contextlib.suppress(OSError):  # a full disk ends no training
                turn_over(log, most)

    thread = threading.Thread(target=look, name=FILE, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def turn_over(log: Path, most: int) -> None:
    """Have the output go into a fresh file where the one that it goes to is larger than `most` bytes."""
    from thinwire.core.home import private_opener

    if not _is_output(log) or os.fstat(OUTPUT[0]).st_size <= most:
        return
    os.replace(log, log.with_name(f"{log.name}.1"))
    with open(log, "ab", opener=private_opener) as fresh:
        for descriptor in OUTPUT:
            os.dup2(fresh.fileno(), descriptor)


def _is_output(log: Path) -> bool:
    """Whether both of the process' outputs are this file."""
    try:
        there = log.stat()
        return all(os.path.samestat(os.fstat(descriptor), there) for descriptor in OUTPUT)
    except OSError:
        return False
