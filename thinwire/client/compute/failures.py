"""What may be said of an error outside this device: its class and its place in the task's code, never its text."""

from __future__ import annotations

import os
import traceback

from .errors import Exited, NotFinite, Wrong

OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep


def place(error: BaseException, file: str) -> str:
    """`ValueError at task.py:7`: the innermost line of the task's own file that the error passed through.

    A refusal that these modules themselves raised is told in its own words: they are ours and hold no data.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, Wrong) and (not frames or os.path.abspath(frames[-1].filename).startswith(OURS)):
        return error.what
    own = [frame for frame in frames if file and os.path.abspath(frame.filename) == file]
    said = error.by if isinstance(error, Exited) else type(error).__name__
    return f"{said} at {os.path.basename(file)}:{own[-1].lineno}" if own else said


def in_full(error: BaseException) -> str:
    """Return an error's own text, with what to try where it is a refusal: for this device's owner alone."""
    hint = getattr(error, "hint", "")
    return f"{error}; try: {hint}" if hint else str(error)


def kind(error: BaseException) -> str:
    """The failure's kind (docs/reference/failures.md)."""
    return "non-finite" if isinstance(error, NotFinite) else "task-error"
