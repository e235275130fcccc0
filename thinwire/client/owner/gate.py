"""What every ask but a stop passes before anything is loaded: its plan is known, and the owner's policy lets it in."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from thinwire.client.compute.clock import Clock
from thinwire.client.disk.plans import Plans
from thinwire.client.disk.state import Write
from thinwire.client.failures import CannotAnswer
from thinwire.client.owner import metered
from thinwire.client.owner.day import Day, DayFile, believed, key_of
from thinwire.client.owner.limit import Limit
from thinwire.client.owner.rules import Facts, decide
from thinwire.client.policy import Kind, Policy
from thinwire.core.errors import DataLost
from thinwire.core.home import MB, write_atomically
from thinwire.core.types import Ask

CARRIES: frozenset[str] = (
    frozenset()
)  # sections of a plan that this version carries out: neither secure nor privacy yet


def local_time() -> datetime:
    return datetime.now().astimezone()


class Gate:
    """One for a device, shared by its sessions.

    Laws: `admit` raises before the task's data or model are touched; what it counts is on disk when it returns; an
    assignment that comes again is counted again, unless this process was restarted in the middle of it (owner/day.py).
    Three threads call it: one that fetches (`wanted`), one that works (`admit`), one that finishes (`ended`).
    """

    def __init__(
        self,
        policy: Policy | None = None,
        folder: Path | None = None,
        *,
        now: Callable[[], datetime] = local_time,
        link_is: Callable[..., bool | None] = metered.metered,
        skew_s: Callable[[], float] = lambda: 0.0,
        write: Write = write_atomically,
    ) -> None:
        self._skew_s, self._lock = skew_s, threading.Lock()
        self._owned = policy is not None  # a simulated device has no owner, and nothing ends its work
        self.policy, self._now, self._link_is = policy or Policy(), now, link_is
        self.plans = Plans(folder / "plans" if folder else None, write)
        self._file = DayFile(folder, write) if folder else None
        self._open: dict[str, str] = {}  # key of an assignment under way that was counted -> its kind

    def renew(self, policy: Policy) -> None:
        """From the next ask on; what was let in goes on, and what was counted stays counted."""
        with self._lock:
            self.policy, self._owned = policy, True

    @property
    def min_free_bytes(self) -> int:
        """How much of the disk downloads and answers leave free."""
        return self.policy.min_free_disk_mb * MB if self._owned else 0

    def limit(self, clock: Clock) -> Limit | None:
        """The owner's end of work that begins now, by the policy of now; None where there is no owner."""
        with self._lock:
            return Limit(self.policy, clock, self._now) if self._owned else None

    def allows(self, kind: Kind) -> bool:
        """Whether the owner lets this be done at all, also as a part of something else."""
        with self._lock:
            return self.policy.kinds is None or kind in self.policy.kinds

    def admit(self, ask: Ask) -> Mapping[str, Any]:
        """The ask's resolved plan; CannotAnswer: need-plan or declined."""
        with self._lock:
            plan = self.plans.of(ask)
            day, facts = self._facts(ask)
            declined = decide(self.policy, ask.task, ask.kind, plan, facts)
            if declined is not None:
                raise CannotAnswer("declined", declined.text)
            if day is not None and self._file is not None:
                self._file.keep(day.with_one(ask.kind, key_of(ask)))
                self._open[key_of(ask)] = ask.kind
            return plan

    def ended(self, ask: Ask) -> None:
        """Record that an admitted assignment has ended: with a reply, with a failure, or withdrawn by the aggregator.

        Not called when this process itself ends: then the work is begun again. A disk that refuses leaves the key
        open, and the aggregator has at most the free attempts of a restart.
        """
        with self._lock:
            kind = self._open.pop(key_of(ask), "")
            if kind and self._file is not None:
                with contextlib.suppress(DataLost):
                    if (day := self._file.read()) is not None:
                        self._file.keep(day.with_end(kind, key_of(ask)))

    def wanted(self, ask: Ask) -> bool:
        """Whether the ask's parts are worth their way here: not where `admit` would say no whatever came.

        Nothing is counted; a day that is used up keeps out all but an assignment whose attempt is still open.
        """
        with self._lock:
            if (plan := self.plans.known(ask)) is None:
                return False
            _, facts = self._facts(ask)
            return decide(self.policy, ask.task, ask.kind, plan, facts) is None

    def _facts(self, ask: Ask) -> tuple[Day | None, Facts]:
        """What the policy has to know, and no more is looked up; with the day, where it is counted."""
        policy = self.policy
        counted = self._file is not None and (policy.rounds_a_day is not None or bool(policy.hours))
        day, facts = self._today(ask) if counted else (None, Facts(self._now(), None))
        price = self._link_is(policy.link) if policy.metered == "refuse" else None
        return day, facts.beside(price, CARRIES)

    def _today(self, ask: Ask) -> tuple[Day | None, Facts]:
        """What was let in today, and what of it and of the clock can be believed."""
        assert self._file is not None
        now = self._now()
        try:
            last = self._file.read()
        except DataLost as error:
            why = f"{error.what}; its owner can look at it and delete it"
            return None, Facts(None, None, no_clock=why, no_counts=why)
        if doubt := believed(now, last, self._skew_s()):
            return None, Facts(None, None, no_clock=doubt, no_counts=doubt)
        day = (last or Day(now.date(), now)).on(now)
        return day, Facts(now, day.count(ask.kind) - day.is_free(ask.kind, key_of(ask)))
