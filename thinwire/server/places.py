"""For how long a device holds one of the places that `max_concurrency` leaves in rounds.

Until it has answered or is lost; but one that is frozen says nothing, and those who wait for its place are to be asked
in time. So no longer than its group's share of the round's deadline, or than twice its slowest answer of late where
that is more, and in no case longer than the deadline: who is known to be slow keeps its place, but one that once took
hours, since it slept, keeps none for hours. Once its round is closed, such a device holds a place of the next ones
until twice its slowest answer's time has passed since it was asked, and at most once more as long as it was given for
its answer; one that is not known holds none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from thinwire.server.moves import AtWork
from thinwire.server.past import Past

PATIENCE = 2.0  # times a device's slowest answer of late, and times what it was given for its last ask


def place_s(deadline_s: float, target: int, most: int, slowest_s: float) -> float:
    """Seconds from its ask on, in a round that wants `target` answers of which `most` are made at once.

    >>> [place_s(100.0, target=4, most=1, slowest_s=seconds) for seconds in (0.0, 20.0, 28_800.0)]
    [25.0, 40.0, 100.0]
    """
    return min(deadline_s, max(deadline_s / max(1, math.ceil(target / most)), PATIENCE * slowest_s))


def slowest_s(past: Past, device: str) -> float:
    """The slowest of a device's last answers; 0 where it has given none."""
    return max(past.took.get(device, ()), default=0.0)


def at_work_before(past: Past, number: int) -> Mapping[str, AtWork]:
    """Who is busy with a round before this one, and until when it holds a place."""
    return {
        device: AtWork(
            ask_id,
            past.owed.asked_at(device) + PATIENCE * min(slowest_s(past, device), past.owed.had_s(device)),
        )
        for device, (ask_id, asked) in past.owed.busy.items()
        if asked != number
    }
