"""A process and all that it started, stopped as a machine is that sleeps, and woken again."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator

from benchmarks.processes import descendants
from tests.support.fork_server import is_server


def children(pid: int) -> set[int]:
    """All that a process started, and what those started, without the servers that fork them."""
    return {child for child in descendants(pid) if child != pid and not is_server(child)}


def signal_all(number: int, pids: Iterable[int]) -> None:
    """Who has ended meanwhile is left alone."""
    for pid in sorted(pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """They stand still until the block ends."""
    stopped = {pid} | children(pid)
    signal_all(signal.SIGSTOP, stopped)
    try:
        yield
    finally:
        signal_all(signal.SIGCONT, stopped)
