"""Who was asked for the first model and what came of it, as a fold over the journal: a resumed run knows the same."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from thinwire.core.events import Event, FirstModelAsked, FirstModelFailed
from thinwire.server.barred import barred_s
from thinwire.server.spares import in_drawn_order


@dataclass
class FirstAsks:
    """`open` is the ask whose answer is waited for: no other answer is taken. `times`: how often each was asked.

    Who left may be asked again as soon as it is back, who declined for now when that has passed, and everybody else
    when it comes anew and says something else of itself.
    """

    open: FirstModelAsked | None = None
    failed: FirstModelFailed | None = None  # the last one
    times: Counter[str] = field(default_factory=Counter)
    _said: dict[str, tuple[str, float]] = field(default_factory=dict)  # device -> why it gave none, and until when

    def apply(self, event: Event) -> None:
        """Take in an event, if it is one of these asks."""
        match event:
            case FirstModelAsked():
                self.open, self.times[event.device] = event, self.times[event.device] + 1
            case FirstModelFailed():
                again_s = 0.0 if event.kind == "left" else barred_s(event.kind, event.reason)
                self.open, self.failed = None, event
                self._said[event.device] = f"{event.kind}: {event.reason}", event.elapsed_s + again_s

    def came_anew(self, device: str) -> None:
        self._said.pop(device, None)

    def bars(self, elapsed_s: float) -> dict[str, str]:
        """Devices that are not asked now, with the reason."""
        return {device: why for device, (why, until) in self._said.items() if elapsed_s < until}

    @property
    def may_pass(self) -> dict[str, str]:
        """Devices that gave none for a reason that passes by itself."""
        return {device: why for device, (why, until) in self._said.items() if math.isfinite(until)}

    def next_of(self, able: Iterable[str], seed: int) -> str:
        """Whom the seed draws of those that were asked least often."""
        return min(in_drawn_order(able, seed, 0), key=lambda device: self.times[device])
