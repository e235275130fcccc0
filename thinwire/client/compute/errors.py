"""What can be wrong with a task or with what it was given. Thinwire's own side turns these into its errors."""

from __future__ import annotations


class Wrong(Exception):
    """A refusal in our own words, which hold no data: what, why, and what to try."""

    def __init__(self, what: str, why: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what, self.why, self.hint = what, why, hint

    def __str__(self) -> str:
        return self.what if not self.why else f"{self.what} ({self.why})"


class BadTask(Wrong):
    """The task's code cannot be imported, or answers with what a task may not."""


class BadUsage(Wrong):
    """What was typed cannot be: a split, a device."""


class NotFinite(Wrong):
    """Training gave NaN or infinity."""


class Cancelled(Exception):
    """The aggregator has withdrawn the ask: nobody waits for its answer."""


class Exited(Exception):
    """The task's code tried to end the process that it runs in. `by` names how: SystemExit, os._exit."""

    def __init__(self, by: str) -> None:
        super().__init__("it would end the whole process; a task raises an error, or returns")
        self.by = by
