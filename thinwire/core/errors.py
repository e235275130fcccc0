"""What went wrong, why, and what to try: the one form in which Thinwire refuses."""

from __future__ import annotations


class ThinwireError(Exception):
    """A refusal that a person can act on; `exit_code` is the process's (design, exit codes).

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
        rows = [("error: ", self.what), ("why:   ", self.why), ("try:   ", self.hint)]
        return "\n".join(label + said.replace("\n", "\n       ") for label, said in rows if said)

    def __str__(self) -> str:
        return self.what if not self.why else f"{self.what} ({self.why})"


class UsageError(ThinwireError):
    """The command line cannot be understood."""

    exit_code = 2


class PlanError(ThinwireError):
    """The plan holds a key or a value that cannot be."""

    exit_code = 3


class CodecError(PlanError):
    """A codec's spec names no codec, or one with an impossible argument."""


class TaskError(ThinwireError):
    """The task's code cannot be imported, raises, or answers with what a task may not."""

    exit_code = 3


class Unreachable(ThinwireError):
    """The other end does not answer, or not now: come again after `after_s`, at a moment drawn within `within_s`."""

    exit_code = 4

    def __init__(
        self, what: str, why: str = "", hint: str = "", *, after_s: float = 0.0, within_s: float = 0.0
    ) -> None:
        super().__init__(what, why, hint)
        self.after_s, self.within_s = after_s, within_s


class Refused(ThinwireError):
    """The other end answers, and does not let us in."""

    exit_code = 5


class NotTaken(Refused):
    """The other end will never take this answer: it is of no use to send it again. The device itself may go on."""


class NotOffered(NotTaken):
    """This device does not send the reply: whoever answers at the aggregator's address has no such run."""


class NotInvited(Refused):
    """No invitation that can be used; `why` (unknown, used, expired, withdrawn) is for the operator alone."""


class TooFewClients(ThinwireError):
    """Fewer clients answered than the plan demands."""

    exit_code = 6


class DataLost(ThinwireError):
    """What is on disk is damaged, missing, or newer than this program."""

    exit_code = 8


class NotWritten(DataLost):
    """The disk took no more. What was there before is as it was, so who was writing can be begun again when it does."""


class NotFound(ThinwireError):
    """There is no such run, device or round."""

    exit_code = 9


class NonFiniteUpdate(ThinwireError):
    """An update holds NaN or infinity; nothing was changed."""


class BadPayload(ThinwireError):
    """Received bytes are not what their header says; nothing was changed and nothing allocated."""


class ReplyLost(BadPayload, DataLost):
    """A reply that is in the spool cannot be read: it was set aside, and what it was for goes on without it."""
