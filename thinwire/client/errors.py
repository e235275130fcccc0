"""What may be said of an error outside this device: its class and its place in the task's code, never its text.

An exception's message and the locals of its frames may hold data. The whole traceback is kept in the client's own
folder: `thinwire client logs --last-error`.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import thinwire
from thinwire.client.train import errors
from thinwire.client.train.errors import BadUsage, NotFinite, Wrong
from thinwire.core.errors import BadPayload, DataLost, NonFiniteUpdate, TaskError, ThinwireError, UsageError
from thinwire.core.formatting import plain
from thinwire.core.statedir import write_atomically
from thinwire.core.types import Ask, Failure

LAST_ERROR = "last-error.txt"
KINDS: tuple[tuple[type[Exception], str], ...] = (
    (NonFiniteUpdate, "non-finite"),
    (NotFinite, "non-finite"),
    (BadPayload, "base-mismatch"),
    (DataLost, "disk"),
)
NOT_WRONG = ("declined", "need-plan")  # nothing went wrong: the last error is still the last error
OURS = os.path.dirname(os.path.abspath(thinwire.__file__)) + os.sep


class CannotAnswer(Exception):
    """An ask that this device cannot answer, for a reason with a name; the text is ours and holds no data.

    `said` may hold some: it is for this device's owner alone.
    """

    def __init__(self, kind: str, why: str, said: str = "") -> None:
        super().__init__(why)
        self.kind, self.said = kind, said or why


def told(error: Exception, ask: Ask, device: str, file: str, folder: Path) -> Failure:
    """What is sent of an error in a task whose code is `file`; the rest of it is kept in `folder`."""
    kind, text = next((kind for types, kind in KINDS if isinstance(error, types)), "task-error"), place(error, file)
    if isinstance(error, CannotAnswer):
        kind, text = error.kind, str(error)
    if kind not in NOT_WRONG:
        with contextlib.suppress(DataLost):  # a full disk must not hide what went wrong
            remember(folder, error, f"{ask.run}, round {ask.round}: {kind}")
    return Failure(kind, text, ask.ask_id, device, identity=ask.identity)


def place(error: BaseException, file: str) -> str:
    """As `compute/failures.py` says it; a refusal that Thinwire itself raised is told in its own words too."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, ThinwireError) and (not frames or os.path.abspath(frames[-1].filename).startswith(OURS)):
        return error.what
    return errors.place(error, file)


def remember(folder: Path, error: BaseException, what: str) -> None:
    """Keep the traceback of the newest error where only this device's owner reads it."""
    lines = [plain(line.expandtabs()) for line in "".join(traceback.format_exception(error)).split("\n")]
    text = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {what}\n\n" + "\n".join(lines)
    write_atomically(folder / LAST_ERROR, text.encode(errors="replace"))


# Where thinwire's own side calls `compute/` in its own process, what is wrong gets the name that exit codes go by.


def named(wrong: Wrong) -> ThinwireError:
    """The same words as one of our errors."""
    kinds: tuple[tuple[type[Wrong], type[ThinwireError]], ...] = ((BadUsage, UsageError), (NotFinite, NonFiniteUpdate))
    made = next((ours for theirs, ours in kinds if isinstance(wrong, theirs)), TaskError)
    return made(wrong.what, wrong.why, wrong.hint)


@contextlib.contextmanager
def in_our_words() -> Iterator[None]:
    """Around a call, or as a decorator."""
    try:
        yield
    except Wrong as wrong:
        raise named(wrong) from wrong
