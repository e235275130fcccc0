"""Errors of tasks, what may leave the device about them, and how a process ends.

`TrainError` and its subclasses report what is invalid in a task or its input. The client turns them into its own
errors.
Outside this device an error appears as its class and its line in the task's code, never with its text. `task_code`
turns a task's attempt to end the process into an error; `FastExit` ends a process fast.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import os
import signal
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


if TYPE_CHECKING:
    Handler = Callable[[int, Any], Any]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # a user or the system ends a process by these


@contextlib.contextmanager
def task_code() -> Iterator[None]:
    """Raise `Exited` if the task's code in this block calls sys.exit() or os._exit(), or raises KeyboardInterrupt.

    Invariants: a signal that comes meanwhile (Ctrl-C) ends the block as it would without this. A process that the
    task's code has forked ends as it wants to.
    """
    here = os.getpid()
    inside, _local.pid = getattr(_local, "pid", None), here
    if os._exit is not _exit:
        os._exit = _exit
    with note_signals() as noted:
        earlier = len(noted)
        try:
            yield
        except (SystemExit, KeyboardInterrupt) as error:
            if os.getpid() != here:
                raise
            came = noted[earlier:]
            if signal.SIGINT in came:  # a library turned the signal into SystemExit: Lightning does at Ctrl-C
                raise KeyboardInterrupt from error
            if came:
                raise
            raise Exited(type(error).__name__).with_traceback(error.__traceback__) from error
        finally:
            _local.pid = inside


_blocks: list[tuple[list[int], dict[int, Handler]]] = []  # of `note_signals`: the list, and the handlers that fill it


@contextlib.contextmanager
def note_signals() -> Iterator[list[int]]:
    """Append to a list each signal that comes in this block, then call its handler.

    A block within another one gets the list of that one, unless task code has set a handler of its own since. To set
    handlers takes longer than the work of a small client, so a simulation has one block for all its clients.
    """
    handlers = _handlers()
    if _blocks and handlers == _blocks[-1][1]:
        yield _blocks[-1][0]
        return
    came: list[int] = []
    noted = {number: _noting(came, handler) for number, handler in handlers.items()}
    for number, note in noted.items():
        signal.signal(number, note)
    _blocks.append((came, noted))
    try:
        yield came
    finally:
        _blocks.remove((came, noted))
        for number, handler in handlers.items():
            if signal.getsignal(number) is noted[number]:  # otherwise task code set its own handler
                signal.signal(number, handler)


_local = threading.local()
_real_exit = os._exit


def _exit(status: int) -> NoReturn:
    """Replace `os._exit`, since nothing else notices that a task's code calls it."""
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


class FastExit:
    """Ends the process at once when `code` is set, without the interpreter's own shutdown.

    With torch that shutdown takes longer than many a command. A `FastExit` is made when the process begins. Invariant:
    before the end, threads that are no daemons have ended, every `atexit` function has run, and printed output is
    flushed.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        atexit.register(self._end)  # registered first, so called last

    def _end(self) -> None:
        if self.code is None:
            return
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):  # stdout is missing or closed, which the interpreter reports
            return
        os._exit(self.code)


MAX_NAMED = 4  # elements of a tuple whose types are printed


class TrainError(Exception):
    """The base of errors whose texts are Thinwire's own and hold no data: what failed, why, and what to try."""

    def __init__(self, what: str, why: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what, self.why, self.hint = what, why, hint

    def __str__(self) -> str:
        return self.what if not self.why else f"{self.what} ({self.why})"


class BadTask(TrainError):
    """Raised if the task's code fails to import, or returns a value that a task may not return."""


class BadSplit(BadTask):
    """Raised if a task's data do not divide among so many clients; then no client has data."""


class BadUsage(TrainError):
    """Raised for an invalid option: a split, a device."""


class NotFinite(TrainError):
    """Raised if training produced NaN or infinity."""


class Cancelled(Exception):
    """Raised if the aggregator has withdrawn the assignment, so that nobody waits for its reply."""


class Exited(Exception):
    """Raised if the task's code tried to end its process. `by` is the way: SystemExit, os._exit."""

    def __init__(self, by: str) -> None:
        super().__init__("it would end the whole process; a task raises an error, or returns")
        self.by = by


def describe(value: Any) -> str:
    """Describe a task function's return value by types and shapes alone, so that no data appear in the text.

    >>> describe(0.5), describe(None), describe(int), describe((1, "b"))
    ('a float', 'None', 'the class int', 'a tuple of 2 (int, str)')
    """
    if value is None:
        return "None"
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    name = type(value).__name__
    if is_array(value) and hasattr(value, "tolist") and not name.startswith(("float", "int", "bool", "uint")):
        kind = "a tensor" if hasattr(value, "requires_grad") else "an array"
        return f"{kind} of shape {tuple(value.shape)} ({str(value.dtype).split('.')[-1]})"
    if isinstance(value, (tuple, list)) and value:
        types = ", ".join(type(one).__name__ for one in value[:MAX_NAMED]) + (", ..." if len(value) > MAX_NAMED else "")
        return f"{_article(name)} of {len(value)} ({types})"
    return _article(name)


def is_array(value: Any) -> bool:
    """Return True if the value is a tensor or an array of any library."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "ndim")


def _article(name: str) -> str:
    vowels = "AEFHILMNORSX" if name.isupper() else "AEIOUaeiou"  # an SGD, an LBFGS
    return f"{'an' if name[:1] in vowels else 'a'} {name}"


OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep


def place(error: BaseException, file: str) -> str:
    """Return an error's class and its line in the task's own file, as in `ValueError at task.py:7`.

    The line is the innermost one that the error passed through. A refusal that these modules raised is returned in its
    own words, which hold no data.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, TrainError) and (not frames or os.path.abspath(frames[-1].filename).startswith(OURS)):
        return error.what
    own = [frame for frame in frames if file and os.path.abspath(frame.filename) == file]
    said = error.by if isinstance(error, Exited) else type(error).__name__
    return f"{said} at {os.path.basename(file)}:{own[-1].lineno}" if own else said


def full_text(error: BaseException) -> str:
    """Return an error's own text, with what to try if it is a refusal. Only this device's owner may see it."""
    hint = getattr(error, "hint", "")
    return f"{error}; try: {hint}" if hint else str(error)


def kind(error: BaseException) -> str:
    """Return the failure's kind (docs/reference/failures.md)."""
    return "non-finite" if isinstance(error, NotFinite) else "task-error"
