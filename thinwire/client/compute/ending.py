"""The end of a process: at once where it is ours to end, and an error where a task's code asks for it."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn

from .errors import Exited

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Handler = Callable[[int, Any], Any]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # by which a person or a system ends a process


@contextlib.contextmanager
def task_code() -> Iterator[None]:
    """Raise `Exited` where the task's code inside calls sys.exit() or os._exit(), or raises KeyboardInterrupt.

    Invariants: a signal that comes meanwhile (Ctrl-C) ends the block as it would without this. A process that the
    task's code has forked ends as it wants to.
    """
    came: list[int] = []
    here = os.getpid()
    inside, _local.pid = getattr(_local, "pid", None), here
    if os._exit is not _exit:
        os._exit = _exit
    noted = {number: _noting(came, handler) for number, handler in _handlers().items()}
    before = {number: signal.signal(number, note) for number, note in noted.items()}
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as error:
        if os.getpid() != here:
            raise
        if signal.SIGINT in came:  # what a library made of it: Lightning ends the process at Ctrl-C
            raise KeyboardInterrupt from error
        if came:
            raise
        raise Exited(type(error).__name__).with_traceback(error.__traceback__) from error
    finally:
        _local.pid = inside
        for number, handler in before.items():
            if signal.getsignal(number) is noted[number]:  # else the task's code has its own, which stays
                signal.signal(number, handler)


_local = threading.local()
_real_exit = os._exit


def _exit(status: int) -> NoReturn:
    """Stand in for `os._exit`: nothing else sees that a task's code calls it."""
    ours = str(sys._getframe(1).f_globals.get("__name__", "")).startswith("thinwire.")
    if getattr(_local, "pid", None) != os.getpid() or ours:
        _real_exit(status)
    raise Exited("os._exit")


def _handlers() -> dict[int, Handler]:
    """Return the handlers that Python calls in this thread."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    found = {number: signal.getsignal(number) for number in SIGNALS}
    return {number: handler for number, handler in found.items() if callable(handler)}


def _noting(came: list[int], handler: Handler) -> Handler:
    def note(number: int, frame: Any) -> Any:
        came.append(number)
        return handler(number, frame)

    return note


class Ending:
    """Made when a process begins. Once `code` is set, the process ends with it without the interpreter's own end,
    which with torch takes longer than many a command.

    Law: threads that are no daemons have ended before, whatever `atexit` has was called, and what was printed is out.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        atexit.register(self._end)  # before any other: it is called after them

    def _end(self) -> None:
        if self.code is None:
            return
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):  # nobody reads it, or there is none: as the interpreter tells it
            return
        os._exit(self.code)
