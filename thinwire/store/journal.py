"""The journal: appending a run's events and reading them, in the order in which they became durable.

`Recorder` is the only way in which a run's facts become durable. Invariant: journal, read tables and measurements are
written in one transaction.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from sqlalchemy import func, insert, select, update

from thinwire.core.clock import SLACK_S
from thinwire.core.errors import NotFound
from thinwire.core.events import (
    AggregatorStarted,
    DeviceJoined,
    DeviceLeft,
    Event,
    HeadTaken,
    RoundClosed,
    RunStatusChanged,
)
from thinwire.core.serialization import from_json, to_json
from thinwire.store import queries
from thinwire.store.database import Database
from thinwire.store.device_tables import Device
from thinwire.store.projection import Facts, Projection
from thinwire.store.read_models import MeasureRow
from thinwire.store.run_tables import Journal, Run


def events(database: Database, run_id: str | None, after: int = 0, limit: int | None = None) -> list[tuple[int, Event]]:
    """Return (seq, event) with seq above `after`, of one run or, with None, of the devices."""
    wanted = select(Journal.seq, Journal.kind, Journal.body).where(Journal.run_id == run_id, Journal.seq > after)
    with database.reading() as connection:
        rows = connection.execute(wanted.order_by(Journal.seq).limit(limit)).all()
    return [(seq, from_json({**body, "event": kind})) for seq, kind, body in rows]


def head_taken(database: Database, run_id: str) -> HeadTaken | None:
    """Return the event by which the current round of a pipelined run became current, or None.

    The search starts at the end of the journal.
    """
    wanted = select(Journal.body).where(Journal.run_id == run_id, Journal.kind == HeadTaken.__name__)
    with database.reading() as connection:
        body = connection.scalar(wanted.order_by(Journal.seq.desc()).limit(1))
    return None if body is None else HeadTaken(**body)


def gone(database: Database, seq: int, at: float, now: float) -> tuple[float, float]:
    """Return (last_alive_at, clock_step_s) of the aggregator process that wrote event `seq` at time `at`.

    `last_alive_at` comes from the first `AggregatorStarted` after `seq`, or is `at` if there is none. If it lies after
    `now`, an unknown cause has set the clock, and `at` is returned as a lower bound. `clock_step_s` is the sum of all
    known steps of the wall clock since.
    """
    wanted = (
        select(Journal.body)
        .where(Journal.run_id.is_(None), Journal.kind == AggregatorStarted.__name__)
        .order_by(Journal.seq)
    )
    with database.reading() as connection:
        starts = [AggregatorStarted(**body) for body in connection.scalars(wanted.where(Journal.seq > seq))]
    found = max(at, starts[0].gone_at) if starts else at
    # a process that died before its first heartbeat has its successor's `gone_at`: only the successor's step counts
    set_since = {start.gone_at: start.set_by_s for start in starts}
    set_by_s = sum(set_since.values())
    return (at if at <= now < found + set_by_s - SLACK_S else found), set_by_s


_LAST = select(func.coalesce(func.max(Journal.seq), 0))


def last_seq(database: Database, run_id: str | None = None) -> int:
    """Return the latest event's number, of one run or of all; 0 before the first event."""
    wanted = _LAST if run_id is None else _LAST.where(Journal.run_id == run_id)
    with database.reading() as connection:
        return int(connection.scalar(wanted) or 0)


GATHERED_S = 0.5  # longest delay of events for a user who watches a simulation


class Recorder:
    """Appends events.

    Invariant: when `record` returns, its events survive a power cut; when it raises, none of them is recorded.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._facts: dict[str, Facts] = {}
        self._gathered: dict[str, list[Event]] = {}  # run -> events that `gathering` has not written yet
        self._noted: dict[str, list[Event]] = {}  # run -> events that wait for its next record
        self._written_at: dict[str, float] = {}  # run -> time of the last write of its gathered events

    @contextlib.contextmanager
    def gathering(self, run_id: str) -> Iterator[None]:
        """Write this run's events together every GATHERED_S seconds, for a run that nobody resumes after a crash."""
        self._gathered[run_id] = []
        try:
            yield
        finally:
            self._written_at.pop(run_id, None)
            self.record(run_id, self._gathered.pop(run_id))

    def note(self, run_id: str, events: Sequence[Event]) -> None:
        """Keep events that decide nothing until the run's next `record`, or until `record_noted`."""
        self._noted.setdefault(run_id, []).extend(events)

    def record_noted(self) -> None:
        """Write the noted events of all runs; after an error they stay noted, as they do when `record` raises."""
        for run_id in list(self._noted):
            self.record(run_id, ())

    def record(self, run_id: str, events: Sequence[Event], measured: Sequence[MeasureRow] = ()) -> None:
        """Append a run's noted events, then `events`; apply them to the read tables, and store the measurements.

        Raise `DataLost` on an error of the database.
        """
        if (gathered := self._gathered.get(run_id)) is not None:
            gathered += events
            if not _ends(events) and time.monotonic() - self._written_at.get(run_id, 0.0) < GATHERED_S:
                return
            events, self._gathered[run_id] = gathered, []
            self._written_at[run_id] = time.monotonic()
        events = [*self._noted.get(run_id, ()), *events]
        if not events:
            return
        facts = self._facts.get(run_id) or self._find(run_id)
        with self._database.writing() as connection:
            connection.execute(_JOURNAL, [_row(run_id, event) for event in events])
            projection = Projection(connection, facts)
            for event in events:
                projection.apply(event)
            projection.finish()
            queries.keep(connection, measured)
        self._noted.pop(run_id, None)

    def record_device(self, event: DeviceJoined | DeviceLeft) -> None:
        """Journal that a device has connected or disconnected, and set its online state."""
        if online := isinstance(event, DeviceJoined):
            heard = {"seen_at": event.at}
        else:
            heard = {"heard_at": event.heard_at or event.at}
        with self._database.writing() as connection:
            connection.execute(_JOURNAL, [_row(None, event)])
            connection.execute(update(Device).where(Device.name == event.device), {"online": online, **heard})

    def record_restart(self, at: float, gone_at: float, set_by_s: float) -> None:
        """Journal the start of the aggregator, and set every device offline until it registers again."""
        with self._database.writing() as connection:
            connection.execute(_JOURNAL, _row(None, AggregatorStarted(at, gone_at, set_by_s)))
            online = connection.scalars(select(Device.name).where(Device.online.is_(True))).all()
            if online:
                heard_at = min(gone_at + set_by_s, at) if gone_at else 0.0  # online until the aggregator ended
                left = [_row(None, DeviceLeft(at, name, "the aggregator started anew", heard_at)) for name in online]
                connection.execute(_JOURNAL, left)
                there = update(Device).where(Device.online.is_(True))
                connection.execute(there.values(online=False, heard_at=heard_at or None))

    def _find(self, run_id: str) -> Facts:
        with self._database.reading() as connection:
            found = connection.execute(select(Run.size, Run.plan).where(Run.run_id == run_id)).first()
        if found is None:
            raise NotFound(f"no run {run_id!r}")
        return self._facts.setdefault(run_id, Facts(run_id, found.size, found.plan["run"]["metric"]))


def _ends(events: Sequence[Event]) -> bool:
    """Return True if a round or a run has ended, which must be visible at once."""
    return any(
        isinstance(e, RoundClosed) or (isinstance(e, RunStatusChanged) and e.status != "running") for e in events
    )


def _row(run_id: str | None, event: Event) -> dict[str, object]:
    body = to_json(event)
    return {"run_id": run_id, "at": event.at, "kind": body.pop("event"), "body": body}


_JOURNAL = insert(Journal)
