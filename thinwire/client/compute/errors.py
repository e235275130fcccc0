"""What can be wrong with a task or with what it was given. Thinwire's own side turns these into its errors."""

from __future__ import annotations

import inspect
from typing import Any

MAX_NAMED = 4  # elements of a tuple whose types are named


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


def given(value: Any) -> str:
    """Return what a task's function gave, by types and shapes alone: nothing here tells of the data.

    >>> given(0.5), given(None), given(int), given((1, "b"))
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
    """Return whether this is a tensor or an array, of whatever library."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "ndim")


def _article(name: str) -> str:
    vowels = "AEFHILMNORSX" if name.isupper() else "AEIOUaeiou"  # an SGD, an LBFGS
    return f"{'an' if name[:1] in vowels else 'a'} {name}"
