"""How long a round may take when the plan says `auto`."""

from __future__ import annotations

from collections.abc import Sequence

FIRST_S = 60.0  # nothing is known yet: a device may have to import its task and read its data
LEAST_S = 10.0  # a machine may stand still for a moment, and who is gone is known after 4 s: neither may cost an update
FACTOR = 3.0
ROUNDS = 3


def auto_deadline(slowest: Sequence[float]) -> float:
    """Seconds: 3 times the slowest reply of the last 3 rounds; 60 while no round has had one.

    `slowest` holds for each closed round the seconds from its opening to its last reply, oldest first.

    >>> auto_deadline([]), auto_deadline([40.0, 9.0, 2.0, 3.0]), auto_deadline([0.2])
    (60.0, 27.0, 10.0)
    """
    recent = slowest[-ROUNDS:]
    return max(LEAST_S, FACTOR * max(recent)) if recent else FIRST_S
