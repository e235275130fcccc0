"""Turn an error into the failure that leaves this device: its class and its place in the task's code, never its text.

An exception's message and the locals of its frames may hold data. The whole traceback is kept in the client's own
folder: `thinwire client logs --last-error`.

`as_thinwire_error` and `translate_errors` are for calls of `client/train/` in this process: they turn its errors into
those of `thinwire.core.errors`, which have exit codes.
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
from thinwire.client.train.errors import BadUsage, NotFinite, TrainError
from thinwire.core.errors import BadPayload, DataLost, NonFiniteUpdate, TaskError, ThinwireError, UsageError
from thinwire.core.formatting import plain
from thinwire.core.statedir import private_folder, write_atomically
from thinwire.core.types import Assignment, Failure, ReplyHeader, Timings

LAST_ERROR = "last-error.txt"
KINDS: tuple[tuple[type[Exception], str], ...] = (
    (NonFiniteUpdate, "non-finite"),
    (NotFinite, "non-finite"),
    (BadPayload, "base-mismatch"),
    (DataLost, "disk"),
)
FAILED = "failed"  # the kind of a failure in a secure round; its text is one of a few fixed words
REVEALING_KINDS = ("task-error", "non-finite", "worker", "disk")  # that reveal something of a device's data
WORK = "work"  # the text that replaces theirs in a secure round
NO_ERROR_KINDS = ("declined", "need-plan")  # no errors: they do not replace the stored last error
OURS = os.path.dirname(os.path.abspath(thinwire.__file__)) + os.sep


class CannotReply(Exception):
    """Raised if this device cannot work on an assignment: the reply is a failure.

    `kind` is the failure's kind. The text `why` is Thinwire's and holds no data. `owner_text` may hold data: only this
    device's owner may see it.
    """

    def __init__(self, kind: str, why: str, owner_text: str = "") -> None:
        super().__init__(why)
        self.kind, self.owner_text = kind, owner_text or why


def failure_of(error: Exception, assignment: Assignment, device: str, file: str, folder: Path) -> Failure:
    """Return the failure to send for an error in a task whose code is `file`; the traceback is kept in `folder`."""
    kind, text = next((kind for types, kind in KINDS if isinstance(error, types)), "task-error"), place(error, file)
    if isinstance(error, CannotReply):
        kind, text = error.kind, str(error)
    if kind not in NO_ERROR_KINDS:
        with contextlib.suppress(DataLost):  # a full disk must not hide what went wrong
            save_last_error(folder, error, f"{assignment.run}, round {assignment.round}: {kind}")
    return Failure(kind, text, assignment.assignment_id, device, identity=assignment.identity)


def without_details(failure: Failure) -> Failure:
    """Return the failure that is sent in a secure round, without a kind or a text that reveals a client's data."""
    return replace(failure, kind=FAILED, text=WORK) if failure.kind in REVEALING_KINDS else failure


def unreadable(reply: ReplyHeader, device: str) -> Failure:
    """Return the failure that is sent instead of a reply that this disk has lost.

    A reply without times is protected, and so is its failure.
    """
    text = "its reply is not readable on its disk"
    failure = Failure("disk", text, reply.assignment_id, device, identity=reply.identity)
    return failure if reply.timings != Timings() else without_details(failure)


def place(error: BaseException, file: str) -> str:
    """Return the class and place of an error, by `client/train/errors.py`.

    An error that Thinwire itself raised is given in its own words.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, ThinwireError) and (not frames or os.path.abspath(frames[-1].filename).startswith(OURS)):
        return error.what
    return errors.place(error, file)


def save_last_error(folder: Path, error: BaseException, what: str) -> None:
    """Store the traceback of the latest error in the client's own folder."""
    lines = [plain(line.expandtabs()) for line in "".join(traceback.format_exception(error)).split("\n")]
    text = f"{time.strftime('%Y-%m-%d %H:%M:%S')} {what}\n\n" + "\n".join(lines)
    write_atomically(private_folder(folder) / LAST_ERROR, text.encode(errors="replace"))


def last_error(folder: Path) -> str:
    """Return the class and the text of the error that `save_last_error` stored, without the traceback; "" if none.

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


def as_thinwire_error(wrong: TrainError) -> ThinwireError:
    """Return an error of `client/train/` as the corresponding Thinwire error, with the same texts."""
    classes: tuple[tuple[type[TrainError], type[ThinwireError]], ...]
    classes = ((BadUsage, UsageError), (NotFinite, NonFiniteUpdate))
    made = next((ours for theirs, ours in classes if isinstance(wrong, theirs)), TaskError)
    return made(wrong.what, wrong.why, wrong.hint)


@contextlib.contextmanager
def translate_errors() -> Iterator[None]:
    """Translate errors of `client/train/` into Thinwire's, around a block or as a decorator."""
    try:
        yield
    except TrainError as wrong:
        raise as_thinwire_error(wrong) from wrong
