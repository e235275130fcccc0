"""For how long a device holds one of the places that `max_concurrency` leaves in rounds.

Until it has answered or is lost; but one that is frozen says nothing, and those who wait for its place are to be asked
in time. So no longer than its group's share of the round's deadline, or than twice its slowest answer of late where
that is more, and in no case longer than the deadline: who is known to be slow keeps its place, but one that once took
hours, since it slept, keeps none for hours. From its share on it keeps none in the time that the fewest answers which
make a step still need, at a share each: else one frozen device would cost the round.

Once its round is closed, such a device holds a place of the next ones until twice its slowest answer's time has passed
since it was asked, and at most once more as long as it was given for its answer; one that is not known holds none.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from thinwire.server.moves import AtWork, Terms
from thinwire.server.recorded.past import Past

PATIENCE = 2.0  # times a device's slowest answer of late, and times what it was given for its last ask


def share_s(deadline_s: float, target: int, most: int) -> float:
    """Seconds of one group, in a round that wants `target` answers of which `most` are made at once.

    >>> share_s(100.0, target=7, most=2)
    25.0
    """
    return deadline_s / max(1, math.ceil(target / most))


def place_s(deadline_s: float, share_s: float, slowest_s: float) -> float:
    """Seconds from its ask on, for a device whose slowest answer of late took so long.

    >>> [place_s(100.0, share_s=25.0, slowest_s=seconds) for seconds in (0.0, 20.0, 28_800.0)]
    [25.0, 40.0, 100.0]
    """
    return min(deadline_s, max(share_s, PATIENCE * slowest_s))


@dataclass
class Places:
    """Who has a place in one round; nobody where the plan leaves as many as are wanted."""

    terms: Terms
    _working: dict[str, AtWork] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._working |= self.terms.earlier

    @property
    def _share_s(self) -> float:
        return share_s(self.terms.deadline_s, self.terms.target, self.terms.max_concurrency)

    def take(self, device: str, ask_id: str, now: float) -> None:
        """It has been asked."""
        if self.terms.max_concurrency:
            until_s = now + place_s(self.terms.deadline_s, self._share_s, self.terms.slowest_s(device))
            self._working[device] = AtWork(ask_id, until_s, now + self._share_s)

    def free(self, device: str, ask_id: str = "") -> None:
        """It works on this no more; on nothing, where no ask is named."""
        if device in self._working and ask_id in ("", self._working[device].ask_id):
            del self._working[device]

    def silent(self, asks: Mapping[str, str], held: Container[str]) -> list[str]:
        """Who works on one of these asks, and has none of the places that are `held`."""
        working = self._working.items()
        return [device for device, work in working if device not in held and asks.get(device) == work.ask_id]

    def held(self, now: float, lacking: int) -> dict[str, AtWork]:
        """Who has one; `lacking`: answers without which the round makes no step, and of which those may come that were
        asked no longer than a share ago.
        """
        left_s = self.terms.opened_s + self.terms.deadline_s - now
        lacking -= sum(now < work.yields_s < math.inf for work in self._working.values())
        scarce = lacking > 0 and left_s <= self._share_s * math.ceil(lacking / self.terms.max_concurrency)
        return {
            device: work
            for device, work in self._working.items()
            if now < (min(work.until_s, work.yields_s) if scarce else work.until_s)
        }


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
