"""Ways to meet a signal that ends a program, and waiting for another process.

`interruptible` raises KeyboardInterrupt now and later, because Python drops one that is raised inside a callback.
`undisturbed` ignores signals during a clean-up, and `ended_by_signals` sets an event. `handled` has any other handler.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 130  # exit code of Ctrl-C: 128 + SIGINT


@contextmanager
def handled(
    numbers: Sequence[signal.Signals], handler: Callable[[int, Any], object] | signal.Handlers
) -> Iterator[None]:
    """Handle signals by `handler` and restore their handlers at the end; outside the main thread nothing changes."""
    main = threading.current_thread() is threading.main_thread()  # only the main thread may handle signals
    before = {number: signal.signal(number, handler) for number in numbers if main}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def interruptible(*numbers: signal.Signals) -> Iterator[Callable[[], None]]:
    """Make signals raise KeyboardInterrupt at once, and again at the next call of the yielded `look`.

    `numbers` are the signals; SIGINT is the default. The caller must call `look` regularly. A signal that was ignored
    (nohup) stays ignored.
    """
    selected: list[int] = []

    def interrupt(number: int, _frame: object) -> None:
        selected.append(number)
        raise KeyboardInterrupt

    def look() -> None:
        if selected:
            raise KeyboardInterrupt

    with handled([n for n in numbers or (signal.SIGINT,) if signal.getsignal(n) != signal.SIG_IGN], interrupt):
        yield look


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore SIGINT, SIGTERM and SIGHUP while the block cleans up."""
    with handled(ENDS, signal.SIG_IGN):
        yield


@contextmanager
def ended_by_signals(ending: threading.Event) -> Iterator[threading.Event]:
    """Yield the event, which SIGTERM, SIGINT and SIGHUP set; a second SIGTERM or SIGINT ends the process at once.

    A terminal that is closed may send SIGHUP twice. One that was ignored (nohup) stays ignored.
    """

    def end(number: int, _frame: object) -> None:
        if ending.is_set() and number != signal.SIGHUP:
            os._exit(128 + number)
        ending.set()

    with handled([n for n in ENDS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN], end):
        yield ending


UNTIL_CHECK_S = 0.05


def until(true: Callable[[], bool], within_s: float) -> bool:
    """Call `true` until it returns True; return False if it did not within `within_s` seconds."""
    end = time.monotonic() + within_s
    while not (is_true := true()) and time.monotonic() < end:
        time.sleep(UNTIL_CHECK_S)
    return is_true
