"""A quantile of a few values that were seen."""

from __future__ import annotations

import math
from collections.abc import Iterable

SHARE = 0.9


def p90(values: Iterable[float]) -> float:
    """The least of the values that 9 of 10 do not exceed.

    >>> p90([1.0, 9.0]), p90(range(1, 11))
    (9.0, 9)
    """
    ordered = sorted(values)
    return ordered[math.ceil(SHARE * len(ordered)) - 1]
