"""The owner's end of one assignment's work: `max_assignment_minutes`, and `hours` where `hours_end_work` is true."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime

from thinwire.client.compute.clock import Clock
from thinwire.client.owner.rules import Declined, until
from thinwire.client.policy import Policy

SAMPLE_S = 30.0  # of training, before it says how long the rest takes: first steps are slow
SLACK = 2.0  # times the limit, that an estimate must come to


class Limit:
    """Counts from the moment when it is made. `clock` measures seconds, `local` gives the device's time of day.

    Law: what has ended stays ended, for the reason that came first.
    """

    def __init__(self, policy: Policy, clock: Clock, local: Callable[[], datetime]) -> None:
        self._policy, self._clock, self._local = policy, clock, local
        self._began, self._trains_since = clock.now(), math.inf
        self._ended: Declined | None = None

    @property
    def left_s(self) -> float:
        """Seconds until the work ends at the latest; infinite where nothing ends it."""
        minutes, left_s = self._policy.max_assignment_minutes, math.inf
        if minutes:
            left_s = 60.0 * minutes - (self._clock.now() - self._began)
        if self._policy.hours and self._policy.hours_end_work:
            now, (_, end) = self._local(), self._policy.span
            left_s = min(left_s, until(now, end) if self._policy.is_open(now.time()) else 0.0)
        return left_s

    def over(self) -> Declined | None:
        """Why the work ends now; None while it goes on."""
        if self._ended is None and self.left_s <= 0:
            policy = self._policy
            if policy.hours and policy.hours_end_work and not policy.is_open((now := self._local()).time()):
                why = f"hours_end_work = true: work ends with {policy.hours} of this device's time"
                self._ended = Declined("hours", why, until(now, policy.span[0]))
            else:
                why = f"stopped after {policy.max_assignment_minutes:g} minutes, the most that is allowed here"
                self._ended = Declined("max_assignment_minutes", why)
        return self._ended

    def progressed(self, done: int, total: int) -> None:
        """Take in that so many steps of `total` are made (0: not known); what would take far too long ends now."""
        minutes, now = self._policy.max_assignment_minutes, self._clock.now()
        self._trains_since = min(self._trains_since, now)
        spent_s = now - self._trains_since
        if self._ended is not None or not minutes or done < 2 or spent_s < min(SAMPLE_S, 60.0 * minutes / 10):
            return
        if (whole_s := spent_s / (done - 1) * total) > SLACK * 60.0 * minutes:
            why = f"{total:,} steps would take {whole_s / 60.0:,.0f} minutes, at most {minutes:g} are allowed here"
            self._ended = Declined("max_assignment_minutes", why)
