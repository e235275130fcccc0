"""What every ask but a stop passes before anything is loaded: its plan is known, and the owner's policy lets it in."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

from thinwire.client import device_info
from thinwire.client.errors import CannotAnswer
from thinwire.client.policy import Declined, Facts, Kind, Policy, decide, until
from thinwire.client.run_state import Write
from thinwire.client.run_store import Plans
from thinwire.client.train.schedule import Clock
from thinwire.core.errors import DataLost
from thinwire.core.statedir import MB, write_atomically
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
        link_is: Callable[..., bool | None] = device_info.metered,
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


# Count the assignments that a device admitted today, on disk before the work begins: a kill does not undo a count.
#
# One file, `policy.json`: the day, and a key for each attempt at an assignment. `KEY` is open: its work may go on.
# `KEY-` has ended: with a reply, with a failure, or withdrawn. The same assignment after that is another attempt, and
# counts. `KEY+` is an open attempt that was begun again, after a restart of this process: that is free, `FREE` times.
#
# Invariant: of each kind at most `rounds_a_day` attempts begin on one day, whatever the aggregator repeats or renames;
# only a restart of the client repeats one for free, and at most `FREE` times. A file that cannot be read admits
# nothing: it may have been full.


FILE = "policy.json"
FORMAT = 1
RELEASED = datetime(2026, 1, 1).astimezone()  # this program is not older: a clock before it was never set
FREE = (
    3  # times that one attempt is begun again: a device with a bad battery finishes its round, a loop of crashes ends
)
ENDED, RESUMED = "-", "+"  # after a key
SLACK = timedelta(hours=1)  # a clock that is set right steps back by less; a day must not come twice


@dataclass(frozen=True)
class Day:
    """What was admitted on a day: kind -> keys with their marks. `at` is when this was written, the latest time ever
    seen.
    """

    date: date
    at: datetime
    let_in: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def is_free(self, kind: str, key: str) -> bool:
        """Return whether this key is open and may be begun again without being counted."""
        keys = self.let_in.get(kind, ())
        return key in keys and keys.count(key + RESUMED) < FREE

    def count(self, kind: str) -> int:
        """Return how many attempts of this kind were counted."""
        return sum(not key.endswith(RESUMED) for key in self.let_in.get(kind, ()))

    def on(self, now: datetime) -> Day:
        """This day, or a new one where one has begun; time never goes back here."""
        if now.date() > self.date:
            return Day(now.date(), now)
        return replace(self, at=max(now, self.at))

    def with_one(self, kind: str, key: str) -> Day:
        """Return the day with one more attempt; an open one is begun again for free as long as `is_free`."""
        if self.is_free(kind, key):
            return self._with(kind, (*self.let_in[kind], key + RESUMED))
        ended = self.with_end(kind, key)
        return ended._with(kind, (*ended.let_in.get(kind, ()), key))

    def with_end(self, kind: str, key: str) -> Day:
        """Return the day in which this key's attempt has ended; a key that is not open changes nothing."""
        keys = self.let_in.get(kind, ())
        if key not in keys:
            return self
        left = (other for other in keys if other != key + RESUMED)
        return self._with(kind, tuple(other + ENDED if other == key else other for other in left))

    def _with(self, kind: str, keys: tuple[str, ...]) -> Day:
        return replace(self, let_in={**self.let_in, kind: keys})


class DayFile:
    """The file of one device. `DataLost` from `read`: it is damaged; from `keep`: the disk refuses."""

    def __init__(self, folder: Path, write: Write = write_atomically) -> None:
        self.path, self._write = folder / FILE, write

    def read(self) -> Day | None:
        """The last day that was kept; None before the first."""
        try:
            raw = json.loads(self.path.read_bytes())
            if raw["format"] != FORMAT:
                raise ValueError(f"format {raw['format']!r}")
            kept = {str(kind): tuple(map(str, keys)) for kind, keys in raw["let_in"].items()}
            at = datetime.fromisoformat(raw["at"])
            if at.tzinfo is None or not all(isinstance(keys, list) for keys in raw["let_in"].values()):
                raise ValueError("it is not what was written")
            return Day(date.fromisoformat(raw["date"]), at, kept)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataLost(
                f"{FILE} on this device cannot be read",
                why=f"{self.path}: {type(error).__name__}",
                hint=f"look at it, then delete it: counting begins anew ({self.path})",
            ) from error

    def keep(self, day: Day) -> None:
        raw = {"format": FORMAT, "date": day.date.isoformat(), "at": day.at.isoformat(), "let_in": dict(day.let_in)}
        self._write(self.path, json.dumps(raw, separators=(",", ":")).encode())


def believed(now: datetime, last: Day | None, skew_s: float = 0.0) -> str:
    """Why this clock cannot be believed, or "" when it can: a Pi boots without one.

    The aggregator's clock (this one is `skew_s` behind it) can raise a doubt and never settle one: else who asks would
    also say what time it is.
    """
    if now < RELEASED:
        return "this device's clock has not been set"
    if last is not None and now < last.at - SLACK:
        return f"this device's clock was set back; where that is right, {FILE} on this device can be deleted"
    if abs(skew_s) > SLACK.total_seconds():
        return f"this device's clock and the aggregator's are {abs(skew_s) / 3600:.1f} hours apart"
    return ""


def key_of(ask: Ask) -> str:
    """Return what stands for this assignment in the counts."""
    said = json.dumps([ask.run, ask.identity, ask.ask_id])
    return hashlib.sha256(said.encode()).hexdigest()[:32]


# The owner's end of one assignment's work: `max_assignment_minutes`, and `hours` where `hours_end_work` is true.


SAMPLE_S = 30.0  # of training, before it says how long the rest takes: first steps are slow
ESTIMATE_SLACK = 2.0  # times the limit, that an estimate must come to


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
        if (whole_s := spent_s / (done - 1) * total) > ESTIMATE_SLACK * 60.0 * minutes:
            why = f"{total:,} steps would take {whole_s / 60.0:,.0f} minutes, at most {minutes:g} are allowed here"
            self._ended = Declined("max_assignment_minutes", why)
