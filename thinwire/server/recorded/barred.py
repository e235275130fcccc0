"""For how long a device is not asked again that could not do what it was asked."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from thinwire.core.events import ClientFailed

PASSING = ("hours", "rounds_a_day", "metered")  # rules of a device's policy whose answer changes with the time
PASSING_S, DAY_S = 600.0, 90_000.0  # so long at least and at most a device is left alone that declined by one of them
AGAIN = re.compile(r"\(again in (\d{1,6}) s\)$")
MISSING = "task-missing"
BARRING = (
    MISSING,
    "task-mismatch",
    "layout-mismatch",
    "declined",
    "protocol",
)  # asked again it would fail again


def barred_s(kind: str, text: str) -> float:
    """How long a device is not asked after such a failure, unless it says something else meanwhile.

    >>> barred_s("declined", "hours: at night (again in 7200 s)"), barred_s("declined", "tasks: not this one")
    (7200.0, inf)
    """
    if kind != "declined" or text.partition(":")[0] not in PASSING:
        return math.inf
    told = AGAIN.search(text)
    return min(max(float(told[1]) if told else 0.0, PASSING_S), DAY_S)


@dataclass
class Barred:
    """Devices whose failure was one that would come again, for as long as they say of themselves what they said then.

    `said` gives a digest of what a device says now; that of then is in the journal, so that a restart changes nothing.
    """

    _failed: dict[str, tuple[ClientFailed, float]] = field(default_factory=dict)  # and until when, elapsed_s

    def failed(self, event: ClientFailed) -> None:
        if event.kind in BARRING:
            until_s = event.elapsed_s + barred_s(event.kind, event.text)
            self._failed[event.device] = event, until_s

    def bars(self, device: str, elapsed_s: float, said: Callable[[str], str]) -> bool:
        """Whether it is not asked now."""
        if device not in self._failed:
            return False
        event, until_s = self._failed[device]
        return elapsed_s < until_s and event.said == said(device)

    def same_until(self, elapsed_s: float) -> float:
        """When the next of those who are barred now may be asked again by time alone, elapsed_s."""
        return min((until_s for _, until_s in self._failed.values() if elapsed_s < until_s), default=math.inf)

    def now(self, elapsed_s: float, said: Callable[[str], str]) -> dict[str, str]:
        """Devices that are not asked now, with the reason."""
        return {
            device: "said that it has no such task" if event.kind == MISSING else f"{event.kind}: {event.text}"
            for device, (event, _) in self._failed.items()
            if self.bars(device, elapsed_s, said)
        }
