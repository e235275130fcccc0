"""For how long a device is not asked again that could not do what it was asked."""

from __future__ import annotations

import math
import re

PASSING = ("hours", "rounds_a_day", "metered")  # rules of a device's policy whose answer changes with the time
PASSING_S, DAY_S = 600.0, 90_000.0  # so long at least and at most a device is left alone that declined by one of them
AGAIN = re.compile(r"\(again in (\d{1,6}) s\)$")


def barred_s(kind: str, text: str) -> float:
    """How long a device is not asked after such a failure, unless it says something else meanwhile.

    >>> barred_s("declined", "hours: at night (again in 7200 s)"), barred_s("declined", "tasks: not this one")
    (7200.0, inf)
    """
    if kind != "declined" or text.partition(":")[0] not in PASSING:
        return math.inf
    told = AGAIN.search(text)
    return min(max(float(told[1]) if told else 0.0, PASSING_S), DAY_S)
