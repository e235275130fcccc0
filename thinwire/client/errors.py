"""Turn an error into the failure that leaves this device: its class and its place in the task's code, never its text.

An exception's message and the locals of its frames may hold data. The whole traceback is kept in the client's own
folder: `thinwire client logs --last-error`.

`named` and `in_our_words` are used where this process calls `client/train/` itself. They turn its errors into the
errors of `thinwire.core.errors`, which exit codes are assigned to.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import thinwire
from thinwire.client.train import errors
from thinwire.client.train.errors import BadUsage, NotFinite, Wrong
from thinwire.core.errors import BadPayload, DataLost, NonFiniteUpdate, TaskError, ThinwireError, UsageError
from thinwire.core.formatting import plain
from thinwire.core.statedir import private_folder, write_atomically
from thinwire.core.types import Assignment, Failure

LAST_ERROR = "last-error.txt"
KINDS: tuple[tuple[type[Exception], str], ...] = (
    (NonFiniteUpdate, "non-finite"),
    (NotFinite, "non-finite"),
    (BadPayload, "base-mismatch"),
    (DataLost, "disk"),
)
FAILED = "failed"  # the kind of a failure in a secure round; its text is one of a few fixed words
TELLING = ("task-error", "non-finite", "worker", "disk")  # kinds that tell something of a device's data or work
WORK = "work"  # the word for all of these
NOT_WRONG = ("declined", "need-plan")  # nothing went wrong: the last error is still the last error
OURS = os.path.dirname(os.path.abspath(thinwire.__file__)) + os.sep


class CannotReply(Exception):
    """The reason why this device cannot work on an assignment.

    `kind` is its name; the text is Thinwire's and holds no data. `said` may hold data: it is for this device's owner
    alone.
    """

    def __init__(self, kind: str, why: str, said: str = "") -> None:
        super().__init__(why)
        self.kind, self.said = kind, said or why


def failure_of(error: Exception, assignment: Assignment, device: str, file: str, folder: Path) -> Failure:
    """Return the failure to send for an error in a task whose code is `file`; the traceback is kept in `folder`."""
    kind, text = next((kind for types, kind in KINDS if isinstance(error, types)), "task-error"), place(error, file)
    if isinstance(error, CannotReply):
        kind, text = error.kind, str(error)
    if kind not in NOT_WRONG:
        with contextlib.suppress(DataLost):  # a full disk must not hide what went wrong
            remember(folder, error, f"{assignment.run}, round {assignment.round}: {kind}")
    return Failure(kind, text, assignment.assignment_id, device, identity=assignment.identity)


def without_details(failure: Failure) -> Failure:
    """Return a failure as a secure round tells it: without a kind or a text that would be a fact of a single client."""
    return replace(failure, kind=FAILED, text=WORK) if failure.kind in TELLING else failure


def place(error: BaseException, file: str) -> str:
    """Return the class and place of an error, by `client/train/errors.py`.

    An error that Thinwire itself raised is given in its own words.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, ThinwireError) and (not frames or os.path.abspath(frames[-1].filename).startswith(OURS)):
        return error.what
    return errors.place(error, file)


def remember(folder: Path, error: BaseException, what: str) -> None:
    """Keep the traceback of the latest error, where only this device's owner reads it."""
    lines = [plain(line.expandtabs()) for line in "".join(traceback.format_exception(error)).split("\n")]
    text = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {what}\n\n" + "\n".join(lines)
    write_atomically(private_folder(folder) / LAST_ERROR, text.encode(errors="replace"))


def recalled(folder: Path) -> str:
    """Return the class and the text of the error that `remember` kept in a folder, without the traceback; "" if none.

    Only this device's owner may see it.
    """
    try:
        lines = (folder / LAST_ERROR).read_text(errors="replace").rstrip().split("\n")
    except OSError:
        return ""
    after = max((number + 1 for number, line in enumerate(lines) if line.startswith('  File "')), default=2)
    while lines[after:] and lines[after].startswith("    "):  # the code of the frame
        after += 1
    return "\n".join(lines[after:])


def named(wrong: Wrong) -> ThinwireError:
    """Return the Thinwire error with the same words."""
    kinds: tuple[tuple[type[Wrong], type[ThinwireError]], ...] = ((BadUsage, UsageError), (NotFinite, NonFiniteUpdate))
    made = next((ours for theirs, ours in kinds if isinstance(wrong, theirs)), TaskError)
    return made(wrong.what, wrong.why, wrong.hint)


@contextlib.contextmanager
def in_our_words() -> Iterator[None]:
    """Translate errors of `client/train/` into Thinwire's, around a block or as a decorator."""
    try:
        yield
    except Wrong as wrong:
        raise named(wrong) from wrong
