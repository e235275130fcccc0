"""A process and all that it started, stopped as a machine is that sleeps, and woken again."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

from benchmarks.processes import descendants


def children(pid: int) -> set[int]:
    """All that a process started, and what those started."""
    return set(descendants(pid)) - {pid}


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """They stand still until the block ends; who has ended meanwhile is left alone."""
    stopped = sorted({pid} | children(pid))
    for each in stopped:
        os.kill(each, signal.SIGSTOP)
    try:
        yield
    finally:
        for each in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGCONT)
