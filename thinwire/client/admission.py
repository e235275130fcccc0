"""Admit or decline each assignment before anything is loaded, and end work that takes too long.

`AdmissionController` admits an assignment if its plan is known and `policy_rules` allow it by the owner's policy. A
stop needs no admission. `DailyQuota` and `QuotaFile` count what was admitted today. `WorkLimit` ends the work on one
assignment by the owner's `max_assignment_minutes`, and by `hours` if `hours_end_work` is true.

The count is on disk before the work begins, so that a kill does not undo it. One file, `policy.json`, holds the day,
the number of attempts that have ended (with a reply, with a failure, or withdrawn), and the open ones:

- `KEY` is open: its work may continue.
- `KEY+` is an open attempt that began again after a restart of this process. That is free, `FREE_RESTARTS` times.

An assignment that comes again after its end is a new attempt and counts.

Invariant: of each kind at most `rounds_a_day` attempts begin on one day, whatever the aggregator repeats or renames.
Only a restart of the client repeats an attempt for free, and at most `FREE_RESTARTS` times. If the file is unreadable,
nothing is admitted, because the quota may have been used up.
"""

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
from thinwire.client.errors import CannotReply
from thinwire.client.policy import Kind, Policy
from thinwire.client.policy_rules import Denied, PolicyContext, decide, until
from thinwire.client.privacy_ledger import Account, Prospect
from thinwire.client.run_state import Write
from thinwire.client.run_store import PlanStore
from thinwire.client.train.schedule import Clock
from thinwire.core.errors import DataLost, PlanError, Refused
from thinwire.core.statedir import MB, write_atomically
from thinwire.core.types import Assignment

SPENDS_NOTHING = Prospect()  # the prospect of an assignment that spends no privacy


def local_time() -> datetime:
    """Return the time of day on this device, with its time zone."""
    return datetime.now().astimezone()


class AdmissionController:
    """The admission control of a device, shared by its handlers.

    Tests replace `now`, `is_metered` and `write`. `skew_s` returns how far this clock is behind the aggregator's.
    `carries` is what the device can do of a plan's [secure] table (`SecureIdentity.carries`). `account` is the device's
    privacy ledger; without one a device with an owner or a folder declines private plans.

    Invariant: `admit` raises before the task's data or model are touched, and what it counts is on disk when it
    returns, and so is what it spends of privacy. An assignment that comes again is counted again, unless this process
    was restarted during the work on it.
    Three threads call this class: one fetches (`is_wanted`), one trains (`admit`), one finishes (`mark_ended`).
    """

    def __init__(
        self,
        policy: Policy | None = None,
        folder: Path | None = None,
        *,
        now: Callable[[], datetime] = local_time,
        is_metered: Callable[..., bool | None] = device_info.metered,
        skew_s: Callable[[], float] = lambda: 0.0,
        write: Write = write_atomically,
        carries: frozenset[str] = frozenset(),
        account: Account | None = None,
    ) -> None:
        self._carries, self._account = carries, account
        self._keeps_ledger = (
            account is not None or policy is not None or folder is not None
        )  # a simulated client does not
        self._skew_s, self._lock = skew_s, threading.Lock()
        self._owned = policy is not None  # a simulated client has no owner, so no limit ends its work
        self.policy, self._now, self._is_metered = policy or Policy(), now, is_metered
        self.plans = PlanStore(folder / "plans" if folder else None, write)
        self._file = QuotaFile(folder, write) if folder else None
        self._decided: tuple[Any, Any, Denied | None] = None, None, None  # last plan, other inputs, and the decision
        self._open: dict[str, str] = {}  # key of an admitted assignment that was counted -> its kind

    def set_policy(self, policy: Policy) -> None:
        """Set the policy for the next assignments. Admitted work continues, and counts stay."""
        with self._lock:
            self.policy, self._owned = policy, True

    @property
    def min_free_bytes(self) -> int:
        """Return the bytes of the disk that downloads and replies leave free."""
        return self.policy.min_free_disk_mb * MB if self._owned else 0

    @property
    def max_state_bytes(self) -> int:
        """Return the most bytes that a task's own train() may keep in the state of one run."""
        return int(self.policy.max_state_mb * MB)

    def limit(self, clock: Clock) -> WorkLimit | None:
        """Return the limit of work that begins now, by the current policy; None if there is no owner."""
        with self._lock:
            return WorkLimit(self.policy, clock, self._now) if self._owned else None

    def allows(self, kind: Kind) -> bool:
        """Return True if the owner allows work of this kind, also as a part of other work."""
        with self._lock:
            return self.policy.kinds is None or kind in self.policy.kinds

    def admit(self, assignment: Assignment, sequence: int = 0) -> Mapping[str, Any]:
        """Return the assignment's resolved plan; `sequence` is the number of the run's last reply.

        Raises `CannotReply`: `need-plan` if only its digest is known, `declined` if the policy forbids the work.
        """
        with self._lock:
            plan = self.plans.of(assignment)
            prospect = self._prospect(assignment, plan, sequence)
            day, facts = self._facts(assignment, prospect)
            given = self.policy, assignment.task, assignment.kind, facts
            if self._decided[0] is not plan or self._decided[1] != given:  # equal for all simulated clients of a round
                declined = decide(self.policy, assignment.task, assignment.kind, plan, facts, self.plans.parsed)
                self._decided = plan, given, declined
            if (declined := self._decided[2]) is not None:
                raise CannotReply("declined", declined.text)
            if prospect.booking is not None and self._account is not None:
                try:
                    self._account.ledger.book(prospect.booking)
                except (DataLost, Refused) as error:
                    raise CannotReply("declined", f"privacy: {error.what}") from error
            if day is not None and self._file is not None:
                self._file.write(day.with_attempt(assignment.kind, key_of(assignment)))
                self._open[key_of(assignment)] = assignment.kind
            return plan

    def mark_answered(self, identity: str, assignment_id: str) -> None:
        """Record in the privacy ledger that the reply to an assignment is on disk."""
        if self._account is not None:
            self._account.ledger.mark_answered(identity, assignment_id)

    def mark_ended(self, assignment: Assignment) -> None:
        """Record that an admitted assignment has ended: with a reply, with a failure, or withdrawn by the aggregator.

        This is not called when this process itself ends, because the work begins again then. If the disk refuses, the
        key stays open, which gives the aggregator at most the free attempts of a restart.
        """
        with self._lock:
            kind = self._open.pop(key_of(assignment), "") if self._open else ""
            if kind and self._file is not None:
                with contextlib.suppress(DataLost):
                    if (day := self._file.read()) is not None:
                        self._file.write(day.with_ended(kind, key_of(assignment)))

    def is_wanted(self, assignment: Assignment) -> bool:
        """Return True if the assignment's parts should be fetched: False if `admit` is certain to decline it.

        Nothing is counted. If the quota is used up, only an assignment whose attempt is still open is wanted.
        """
        with self._lock:
            if (plan := self.plans.known(assignment)) is None:
                return False
            _, facts = self._facts(assignment, self._prospect(assignment, plan, None))
            return decide(self.policy, assignment.task, assignment.kind, plan, facts) is None

    def _prospect(self, assignment: Assignment, plan: Mapping[str, Any], sequence: int | None) -> Prospect:
        """Return what the assignment would spend of privacy; an unreadable plan spends nothing, and is declined.

        Before the run's state is read, `sequence` is None: then an assignment that was booked counts as booked.
        """
        if not self._keeps_ledger:
            return SPENDS_NOTHING
        try:
            known = self.plans.parsed(plan)
        except PlanError:
            return SPENDS_NOTHING
        if known.privacy.mode == "off":
            return SPENDS_NOTHING
        if self._account is None:
            return Prospect(unknown="this device keeps no privacy ledger")
        if sequence is None:
            sequence = self._account.ledger.sequence_of(assignment.identity, assignment.assignment_id)
        most = self.policy.max_epsilon
        limit = None if most is None else (most, self.policy.max_delta)
        return self._account.prospect(assignment, known, sequence, self._now().timestamp(), limit)

    def _facts(self, assignment: Assignment, prospect: Prospect) -> tuple[DailyQuota | None, PolicyContext]:
        """Return the day, if the policy has a quota, and the facts that the policy needs; no others are looked up."""
        day, facts = self._other_facts(assignment)
        return day, facts if prospect is SPENDS_NOTHING else replace(
            facts,
            epsilon_after=prospect.epsilon,
            participations=prospect.participations,
            no_ledger=prospect.unknown,
        )

    def _other_facts(self, assignment: Assignment) -> tuple[DailyQuota | None, PolicyContext]:
        policy = self.policy
        metered = self._is_metered(policy.link) if policy.metered == "refuse" else None
        selected = assignment.secure.selected if assignment.secure is not None else None
        if policy.rounds_a_day is None and not policy.hours:
            return None, PolicyContext(None, metered=metered, carries=self._carries, selected=selected)
        day, facts = self._today(assignment) if self._file else (None, PolicyContext(self._now(), None))
        return day, replace(facts, metered=metered, carries=self._carries, selected=selected)

    def _today(self, assignment: Assignment) -> tuple[DailyQuota | None, PolicyContext]:
        """Return the day and its facts, or facts with the reason why the clock or the counts are not trusted."""
        assert self._file is not None
        now = self._now()
        try:
            last = self._file.read()
        except DataLost as error:
            why = f"{error.what}; thinwire client doctor shows its owner what to do"
            return None, PolicyContext(None, None, no_clock=why, no_counts=why)
        if doubt := clock_doubt(now, last, self._skew_s()):
            return None, PolicyContext(None, None, no_clock=doubt, no_counts=doubt)
        day = (last or DailyQuota(now.date(), now)).on(now)
        return day, PolicyContext(now, day.count(assignment.kind) - day.is_free(assignment.kind, key_of(assignment)))


FILE = "policy.json"
FORMAT = 3
FIRST_RELEASE_AT = datetime(2026, 1, 1).astimezone()  # a clock that shows an earlier time was never set
FREE_RESTARTS = 3  # of one attempt: a device with a weak battery finishes its round, and a loop of crashes ends
RESUMED = "+"  # after a key
CLOCK_TOLERANCE = timedelta(hours=1)  # a correction sets the clock back by less; no day may be counted twice


@dataclass(frozen=True)
class DailyQuota:
    """The attempts admitted on one day: kind -> keys of the open ones with their marks, and number of the ended ones.

    `at` is when this was written: the latest time ever seen.
    """

    date: date
    at: datetime
    open: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ended: Mapping[str, int] = field(default_factory=dict)

    def is_free(self, kind: str, key: str) -> bool:
        """Return True if this key is open and may begin again without being counted."""
        keys = self.open.get(kind, ())
        return key in keys and keys.count(key + RESUMED) < FREE_RESTARTS

    def count(self, kind: str) -> int:
        """Return how many attempts of this kind were counted."""
        return self.ended.get(kind, 0) + sum(not key.endswith(RESUMED) for key in self.open.get(kind, ()))

    def on(self, now: datetime) -> DailyQuota:
        """Return this day, or a new one if one has begun; time never goes back."""
        if now.date() > self.date:
            return DailyQuota(now.date(), now)
        return replace(self, at=max(now, self.at))

    def with_attempt(self, kind: str, key: str) -> DailyQuota:
        """Return the day with one more attempt; an open one begins again for free as long as `is_free`."""
        if self.is_free(kind, key):
            return self._with(kind, (*self.open[kind], key + RESUMED))
        ended = self.with_ended(kind, key)
        return ended._with(kind, (*ended.open.get(kind, ()), key))

    def with_ended(self, kind: str, key: str) -> DailyQuota:
        """Return the day in which this key's attempt has ended; a key that is not open changes nothing."""
        keys = self.open.get(kind, ())
        if key not in keys:
            return self
        counted = replace(self, ended={**self.ended, kind: self.ended.get(kind, 0) + 1})
        return counted._with(kind, tuple(other for other in keys if other not in (key, key + RESUMED)))

    def _with(self, kind: str, keys: tuple[str, ...]) -> DailyQuota:
        return replace(self, open={**self.open, kind: keys})


class QuotaFile:
    """The file of one device's counts.

    `read` raises `DataLost` if the file is damaged, and `write` raises it if the disk refuses.
    """

    def __init__(self, folder: Path, write: Write = write_atomically) -> None:
        self.path, self._write = folder / FILE, write

    def read(self) -> DailyQuota | None:
        """Return the last day that was written; None before the first."""
        try:
            raw = json.loads(self.path.read_bytes())
            if (form := raw["format"]) != FORMAT:
                raise DataLost(
                    f"{FILE} on this device has another format than its client reads",
                    why=f"{self.path} has format {str(form)[:20]}, and this program reads {FORMAT}; it stays as it is",
                    hint=f"install the thinwire that wrote it, or delete it, and counting begins again: {self.path}",
                )
            kept = {str(kind): tuple(map(str, keys)) for kind, keys in raw["open"].items()}
            ended = {str(kind): int(count) for kind, count in raw["ended"].items()}
            at = datetime.fromisoformat(raw["at"])
            if at.tzinfo is None or not all(isinstance(keys, list) for keys in raw["open"].values()):
                raise ValueError("it is not what was written")
            return DailyQuota(date.fromisoformat(raw["date"]), at, kept, ended)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataLost(
                f"{FILE} on this device is not readable",
                why=f"{self.path}: {type(error).__name__}",
                hint=f"look at it, then delete it: counting begins again ({self.path})",
            ) from error

    def write(self, day: DailyQuota) -> None:
        """Write a day."""
        attempts = {"open": dict(day.open), "ended": dict(day.ended)}
        raw = {"format": FORMAT, "date": day.date.isoformat(), "at": day.at.isoformat(), **attempts}
        self._write(self.path, json.dumps(raw, separators=(",", ":")).encode())


def clock_doubt(now: datetime, last: DailyQuota | None, skew_s: float = 0.0) -> str:
    """Return the reason why this clock is not trusted, or "" if it is trusted. A Raspberry Pi boots without the time.

    `skew_s` is how far this clock is behind the aggregator's. The aggregator's clock can only add a doubt and never
    remove one. Otherwise the aggregator would decide what time it is on this device.
    """
    if now < FIRST_RELEASE_AT:
        return "this device's clock has not been set"
    if last is not None and now < last.at - CLOCK_TOLERANCE:
        return f"this device's clock was set back; where that is right, {FILE} on this device can be deleted"
    if abs(skew_s) > CLOCK_TOLERANCE.total_seconds():
        return f"this device's clock and the aggregator's are {abs(skew_s) / 3600:.1f} hours apart"
    return ""


def key_of(assignment: Assignment) -> str:
    """Return the key of this assignment in the counts."""
    said = json.dumps([assignment.run, assignment.identity, assignment.assignment_id])
    return hashlib.sha256(said.encode()).hexdigest()[:32]


SAMPLE_S = 30.0  # seconds of training before the rest is estimated: first steps are slow
ESTIMATE_SLACK = 2.0  # work ends early if its estimate is more than this multiple of the limit


class WorkLimit:
    """The owner's limit on the work for one assignment, counted from the moment when this is made.

    `clock` measures seconds, `local` returns the device's time of day.

    Invariant: work that has ended stays ended, for the reason that came first.
    """

    def __init__(self, policy: Policy, clock: Clock, local: Callable[[], datetime]) -> None:
        self._policy, self._clock, self._local = policy, clock, local
        self._began, self._trains_since = clock.now(), math.inf
        self._ended: Denied | None = None

    @property
    def left_s(self) -> float:
        """Return the seconds until the work ends at the latest; infinite if no limit is set."""
        minutes, left_s = self._policy.max_assignment_minutes, math.inf
        if minutes:
            left_s = 60.0 * minutes - (self._clock.now() - self._began)
        if self._policy.hours and self._policy.hours_end_work:
            now, (_, end) = self._local(), self._policy.span
            left_s = min(left_s, until(now, end) if self._policy.is_open(now.time()) else 0.0)
        return left_s

    def exceeded(self) -> Denied | None:
        """Return why the work ends now; None while it continues."""
        if self._ended is None and self.left_s <= 0:
            policy = self._policy
            if policy.hours and policy.hours_end_work and not policy.is_open((now := self._local()).time()):
                why = f"hours_end_work = true: work ends with {policy.hours} of this device's time"
                self._ended = Denied("hours", why, until(now, policy.span[0]))
            else:
                why = f"stopped after {policy.max_assignment_minutes:g} minutes, the most that is allowed here"
                self._ended = Denied("max_assignment_minutes", why)
        return self._ended

    def record_progress(self, done: int, total: int) -> None:
        """Record that `done` of `total` steps are made (0: not known), and end work that would take far too long."""
        minutes, now = self._policy.max_assignment_minutes, self._clock.now()
        self._trains_since = min(self._trains_since, now)
        spent_s = now - self._trains_since
        if self._ended is not None or not minutes or done < 2 or spent_s < min(SAMPLE_S, 60.0 * minutes / 10):
            return
        if (whole_s := spent_s / (done - 1) * total) > ESTIMATE_SLACK * 60.0 * minutes:
            why = f"{total:,} steps would take {whole_s / 60.0:,.0f} minutes, at most {minutes:g} are allowed here"
            self._ended = Denied("max_assignment_minutes", why)
