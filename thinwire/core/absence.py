"""For how long nobody was there, by two readings of a wall clock that somebody may have set in between."""

from __future__ import annotations

LONGEST_S = 30 * 86_400.0  # who is back after longer than this has a clock that was set, as far as anybody can tell
SLACK_S = 1.0  # two clocks of one machine may differ by so much


def absence_s(gone_at: float, back_at: float, set_by_s: float = 0.0) -> float | None:
    """Seconds; None where it is not known: less than none, or longer than LONGEST_S.

    `set_by_s`: by how much the clock is known to have been set in between (core/clock_set.py).

    >>> absence_s(100.0, 160.0), absence_s(100.0, 40.0), absence_s(100.0, 1e9), absence_s(100.0, 3760.0, 3600.0)
    (60.0, None, None, 60.0)
    """
    took = back_at - gone_at - set_by_s
    return max(0.0, took) if -SLACK_S <= took <= LONGEST_S else None
