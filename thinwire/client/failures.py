"""What may be said of an error outside this device: its class and its place in the task's code, never its text.

An exception's message and the locals of its frames may hold data. The whole traceback is kept in the client's own
folder: `thinwire client logs --last-error`.
"""

from __future__ import annotations

import os
import time
import traceback
from pathlib import Path

import thinwire
from thinwire.core.errors import ThinwireError
from thinwire.core.home import write_atomically

LAST_ERROR = "last-error.txt"
OURS = os.path.dirname(os.path.abspath(thinwire.__file__)) + os.sep


class CannotAnswer(Exception):
    """An ask that this device cannot answer, for a reason with a name; the text is ours and holds no data."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


def place(error: BaseException, file: str) -> str:
    """`ValueError at task.py:7`: the innermost line of the task's own file that the error passed through.

    A refusal that Thinwire itself raised is told in its own words: they are ours and hold no data.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, ThinwireError) and (not frames or os.path.abspath(frames[-1].filename).startswith(OURS)):
        return error.what
    said = type(error).__name__
    own = [frame for frame in frames if file and os.path.abspath(frame.filename) == file]
    return f"{said} at {os.path.basename(file)}:{own[-1].lineno}" if own else said


def remember(folder: Path, error: BaseException, what: str) -> None:
    """Keep the traceback of the newest error where only this device's owner reads it."""
    lines = traceback.format_exception(error)
    text = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {what}\n\n{''.join(lines)}"
    write_atomically(folder / LAST_ERROR, text.encode(errors="replace"))
