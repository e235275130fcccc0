"""Calls to the aggregator that are made again until they go through."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from thinwire.client.link.outage import Outage
from thinwire.core.errors import Refused, ThinwireError, Unreachable

T = TypeVar("T")
GIVE_UP_S = 60.0  # how long an outage may last with --once
LOOK_S = 0.5  # between two looks whether the other thread's call went through


class BrokenOff(Exception):
    """This program is about to end: the call was not made again."""


@dataclass
class Calls:
    """Both threads of a service call through one of these."""

    ending: threading.Event
    say: Callable[[str], None]
    give_up: bool = False
    outage: Outage = field(default_factory=Outage)

    def until_done(self, call: Callable[[], T], patience_s: float = GIVE_UP_S) -> T:
        """What the call gave. `Refused` at once; `Unreachable` only where giving up is allowed; `BrokenOff`."""
        since: float | None = None  # this call's first failure
        followed = False  # whether it was tried because another thread's had gone through
        while not self.ending.is_set():
            try:
                got = call()
            except Refused:
                raise
            except ThinwireError as error:  # unreachable, or this disk is full, or an ask cannot be read: try again
                if self.ending.is_set():
                    break
                since = self.outage.now() if since is None else since
                followed = self._wait(error, patience_s, since, not followed) or followed
                continue
            if self.outage.worked():
                self.say("connected again")
            return got
        raise BrokenOff

    def _wait(self, error: ThinwireError, patience_s: float, since: float, may_follow: bool) -> bool:
        """Until the next try is due, or (True) another thread's call went through where the aggregator gave no time.

        Once for a call: one that fails though others go through is tried at its own growing intervals. Once a minute it
        is said what, why and what to try.
        """
        away = isinstance(error, Unreachable)
        after_s, within_s = (error.after_s, error.within_s) if isinstance(error, Unreachable) else (0.0, 0.0)
        wait_s, due = self.outage.failed(after_s, within_s, since)
        if self.give_up and away and self.outage.lasts_s >= patience_s:
            raise error
        if due:
            self.say(f"{error}; trying again" + (f"\ntry:   {error.hint}" if error.hint else ""))
        until = self.outage.now() + wait_s
        while (left_s := until - self.outage.now()) > 0 and not self.ending.wait(min(LOOK_S, left_s)):
            if may_follow and not after_s and self.outage.over:
                return True
        return False
