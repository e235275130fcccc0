"""Ctrl-C that is not lost: an interrupt that falls into a callback, where Python drops the exception, counts later."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def remembered(*numbers: signal.Signals) -> Iterator[Callable[[], None]]:
    """These signals (SIGINT alone where none is named) raise KeyboardInterrupt, at once or when `look` is called next.

    What it gives is `look`: to be called now and then. A signal that was ignored (nohup) stays ignored.
    """
    asked: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        asked.append(number)
        raise KeyboardInterrupt

    def look() -> None:
        if asked:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # no other thread is told of signals
        yield look
        return
    ends = numbers or (signal.SIGINT,)
    before = {each: signal.signal(each, interrupt) for each in ends if signal.getsignal(each) != signal.SIG_IGN}
    try:
        yield look
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# Waiting for something that another process does.


LOOK_S = 0.05


def until(true: Callable[[], bool], within_s: float) -> bool:
    """Look until it is so; False when it was not within `within_s` seconds."""
    end = time.monotonic() + within_s
    while not (found := true()) and time.monotonic() < end:
        time.sleep(LOOK_S)
    return found
