"""The end of a process, at once: the system takes back what was imported, and need not have it taken apart before."""

from __future__ import annotations

import atexit
import os
import sys


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
