"""Where thinwire's own side calls `compute/` in its own process, what is wrong gets the name that exit codes go by."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from thinwire.client.compute.errors import BadUsage, NotFinite, Wrong
from thinwire.core.errors import NonFiniteUpdate, TaskError, ThinwireError, UsageError


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
