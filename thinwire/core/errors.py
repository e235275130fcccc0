"""These are Thinwire's errors: each says what failed, why, and what to type next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final


def numbered(texts: Sequence[str], whats: Sequence[str] = ()) -> str:
    """Return a line for each reason or hint of several problems, with the number of the problem, and with `whats`.

    A text that several problems have stands once.

    >>> print(numbered(["leave it out", "c = 1", "leave it out"]))
    1, 3. leave it out
    2. c = 1
    """
    found: dict[str, list[int]] = {}
    for place, text in enumerate(texts):
        found.setdefault(text, []).append(place)
    lines = []
    for text, places in found.items():
        named = f"{', '.join(whats[place] for place in places)}: " if whats else ""
        lines.append(f"{', '.join(str(place + 1) for place in places)}. {named}{text}")
    return "\n".join(lines)


class ThinwireError(Exception):
    """An error that a person can act on: `what` failed, `why`, and a `hint` that can be typed.

    `exit_code` is the exit code of a command that ends with this error (docs/reference/exit-codes.md).

    >>> print(ThinwireError("no codec 'topq'", why="it is not registered", hint="topk(0.01)").text())
    error: no codec 'topq'
    why:   it is not registered
    try:   topk(0.01)
    """

    exit_code = 1

    def __init__(self, what: str, why: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what, self.why, self.hint = what, why, hint

    def text(self) -> str:
        """Return the lines `error:`, `why:` and `try:`, each only if its text is not empty."""
        rows = [("error: ", self.what), ("why:   ", self.why), ("try:   ", self.hint)]
        return "\n".join(label + said.replace("\n", "\n       ") for label, said in rows if said)

    def as_result(self) -> dict[str, Any]:
        """Return the error as the result of a command in the store."""
        return {"done": False, "error": self.what, "why": self.why, "try": self.hint, "exit_code": self.exit_code}

    def __str__(self) -> str:
        return self.what if not self.why else f"{self.what} ({self.why})"


class UsageError(ThinwireError):
    """The command line is not valid."""

    exit_code = 2


class PlanError(ThinwireError):
    """The plan has an unknown key, or a value that is not valid."""

    exit_code = 3


class CodecError(PlanError):
    """A codec's spec names an unknown codec, or has an argument that is not valid."""


class TaskError(ThinwireError):
    """The task's code does not import, raises an exception, or returns a value that a task must not return."""

    exit_code = 3


class Unreachable(ThinwireError):
    """The peer does not reply, or is busy: retry after `after_s`, at a random moment within `within_s` seconds."""

    exit_code = 4

    def __init__(
        self, what: str, why: str = "", hint: str = "", *, after_s: float = 0.0, within_s: float = 0.0
    ) -> None:
        super().__init__(what, why, hint)
        self.after_s, self.within_s = after_s, within_s


class Refused(ThinwireError):
    """The peer replies, and refuses this device."""

    exit_code = 5


class NotAccepted(Refused):
    """The aggregator rejected this reply for good: sending it again is useless. The client itself may go on."""


class NotOffered(NotAccepted):
    """The client does not send this reply, because the program at the aggregator's address does not have its run."""


class ReplyUnreadable(NotAccepted):
    """The client cannot read a reply that it has on its own disk, so that this reply is never sent."""


class NotInvited(Refused):
    """The invitation is not valid; `why` (unknown, used, expired, withdrawn) is shown to the operator only."""


class TooFewClients(ThinwireError):
    """Fewer clients replied than the plan requires."""

    exit_code = 6


class BudgetSpent(ThinwireError):
    """Another round would pass a privacy budget; nothing of it was released."""

    exit_code = 7


class DataLost(ThinwireError):
    """Data on disk is damaged, missing, or written by a newer version of Thinwire."""

    exit_code = 8


class NotWritten(DataLost):
    """A write failed because the disk is full or read-only, or a reply could not be opened for want of open files.

    Existing data is unchanged, so another try is possible.
    """

    exit_code = 1


TRANSIENT: Final = (NotWritten, Unreachable)
"""Errors of a store after which the same call may succeed later: the disk is full, or the database does not answer."""


class TooLittleSpace(ThinwireError):
    """The disk has too little free space for what one run needs, and is large enough for it: that run waits."""


class NotFound(ThinwireError):
    """The run, device or round does not exist."""

    exit_code = 9


class NonFiniteUpdate(ThinwireError):
    """An update holds NaN or infinity; nothing was changed."""

    def __init__(
        self,
        what: str = "the update holds NaN or infinity",
        why: str = "training diverged on this device",
        hint: str = "a smaller [local] lr, or [local] clip_grad = 1.0",
    ) -> None:
        super().__init__(what, why, hint)


class BadPayload(ThinwireError):
    """The received bytes are not what their header says; nothing was changed and nothing was allocated."""


class ReplyLost(BadPayload, DataLost):
    """A reply in the spool is not readable: the aggregator set it aside, and the run goes on without it."""
