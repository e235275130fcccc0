"""Ctrl-C that is never lost, and waiting for another process.

Python drops a KeyboardInterrupt that is raised inside a callback. `remembered` keeps it and raises it again later.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def remembered(*numbers: signal.Signals) -> Iterator[Callable[[], None]]:
    """Make signals raise KeyboardInterrupt at once, and again at the next call of the yielded `look`.

    `numbers` are the signals; SIGINT is the default. The caller must call `look` regularly. A signal that was ignored
    (nohup) stays ignored, and outside the main thread nothing changes.
    """
    asked: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        asked.append(number)
        raise KeyboardInterrupt

    def look() -> None:
        if asked:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield look
        return
    ends = numbers or (signal.SIGINT,)
    before = {each: signal.signal(each, interrupt) for each in ends if signal.getsignal(each) != signal.SIG_IGN}
    try:
        yield look
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


LOOK_S = 0.05


def until(true: Callable[[], bool], within_s: float) -> bool:
    """Call `true` until it returns True; return False if it did not within `within_s` seconds."""
    end = time.monotonic() + within_s
    while not (found := true()) and time.monotonic() < end:
        time.sleep(LOOK_S)
    return found
