"""Partial work: training ends while there is still time to send what was done.

What was not trained on is not counted: an example weighs by the share of the work that was done with it, and the
normaliser is of the steps really made, so that a device that was stopped is averaged with the others as it should be.
"""

from __future__ import annotations

from dataclasses import dataclass

from .clock import REAL, Clock


@dataclass(frozen=True)
class Partial:
    """When training has to be over. `least` steps are made whatever it takes.

    >>> Partial(until=10.0, least=2, clock=Clock(now=lambda: 9.5)).over(steps=3, step_s=1.0)
    True
    """

    until: float  # on the clock
    least: int = 1
    clock: Clock = REAL

    def over(self, steps: int, step_s: float) -> bool:
        """Whether another step, which will take as long as the last one did, would end too late."""
        now = self.clock.now()
        return steps >= self.least and (now >= self.until or now + step_s > self.until)


def weight(examples: int, share: float) -> int:
    """The examples that weigh a change, of those here, when this share of the work was done with them.

    >>> weight(1000, 0.5), weight(3, 0.1)
    (500, 1)
    """
    return max(1, min(examples, round(examples * share)))
