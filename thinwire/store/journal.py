"""The journal: appending a run's events and reading them, in the order in which they became durable.

`Recorder` is the only way in which a run's facts become durable. Invariant: journal, read tables and measurements are
written in one transaction.

The newest `SEGMENT_EVENTS` events of a run are rows, which every process may follow. When twice as many have come, the
oldest ones become a segment, in the transaction that appends the next events: compressed together they take a tenth of
their space, because a row repeats the ids and field names of its neighbours. Invariants: each event is in one segment
or one row. All events in segments are older than those in rows. Their numbers and bodies are those that they had as
rows.

An event is stored as JSON with the name of its class (`to_json`, `from_json`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import threading
import time
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Text, cast, delete, func, insert, select, update

from thinwire.core.errors import NotFound
from thinwire.core.events import (
    ENDED,
    AggregatorStarted,
    DeviceOffline,
    DeviceOnline,
    Event,
    RoundBecameCurrent,
    RoundClosed,
    RunStatusChanged,
)
from thinwire.core.run_events import ClockBelieved, PrivacyReserved, is_sampled
from thinwire.core.statedir import patiently
from thinwire.store.database import Database, upsert
from thinwire.store.explaining import RunFacts
from thinwire.store.projection import Projection
from thinwire.store.read_models import MeasureRow
from thinwire.store.tables import HAS_SAMPLES, Command, Device, Journal, Measure, Run, Segment, Snapshot
from thinwire.store.write_batch import KnownRows

_LAST = select(func.coalesce(func.max(Journal.c.seq), 0))
READ_EVENTS = 2000  # events of a run that one query reads


KINDS: Mapping[str, type[Event]] = {kind.__name__: kind for kind in Event.__subclasses__()}


def to_json(event: Event) -> dict[str, Any]:
    """Return the event's fields as JSON values, and its class under `event` (ClientFailed has a `kind` of its own).

    The values are the event's own, which are plain: nothing in them is copied.
    """
    return {"event": type(event).__name__, **vars(event)}


def from_json(raw: Mapping[str, Any]) -> Event:
    """Return the event of these JSON values; keys that a newer version wrote are ignored."""
    kind = KINDS[raw["event"]]
    names = {f.name for f in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in raw.items() if name in names})


class JournalReader:
    """Reads the journal, and the snapshots that stand for its earlier events."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._changes, self._shown, self._counting = 0, object(), threading.Lock()

    def events(self, run_id: str | None, after: int = 0, limit: int | None = None) -> list[tuple[int, Event]]:
        """Return (seq, event) with seq above `after`; `seq` rises over all runs.

        With None as the run, the events of the devices are returned.
        """
        wanted = select(Journal.c.seq, Journal.c.kind, Journal.c.body).where(
            Journal.c.run_id == run_id, Journal.c.seq > after
        )
        with self._database.reading() as connection:
            packed = packed_after(connection, run_id, after) if run_id is not None else iter(())
            rows = list(packed if limit is None else itertools.islice(packed, limit))
            more = None if limit is None else limit - len(rows)
            rows += [
                (seq, kind, body) for seq, kind, body in connection.execute(wanted.order_by(Journal.c.seq).limit(more))
            ]
        return [(seq, from_json({**body, "event": kind})) for seq, kind, body in rows]

    def newest_events(
        self, run_id: str, limit: int, kinds: Collection[type[Event]] | None = None
    ) -> list[tuple[int, Event]]:
        """Return (seq, event) of the newest events of a run, oldest first: at most `limit`, and those that are rows.

        With `kinds` only events of these classes count.
        """
        wanted = select(Journal.c.seq, Journal.c.kind, Journal.c.body).where(Journal.c.run_id == run_id)
        if kinds is not None:
            wanted = wanted.where(Journal.c.kind.in_([kind.__name__ for kind in kinds]))
        with self._database.reading() as connection:
            rows = connection.execute(wanted.order_by(Journal.c.seq.desc()).limit(limit)).all()
        return [(row.seq, from_json({**row.body, "event": row.kind})) for row in reversed(rows)]

    def stream(self, run_id: str, after: int = 0) -> Iterator[tuple[int, Event]]:
        """Yield (seq, event) of a run like `events`, with few of them in memory at once."""
        while found := self.events(run_id, after, READ_EVENTS):
            yield from found
            after = found[-1][0]

    def snapshot(self, run_id: str) -> tuple[int, str]:
        """Return (seq, text) of the run's snapshot: the state after all events up to `seq`; (0, "") without one."""
        with self._database.reading() as connection:
            found = connection.execute(
                select(Snapshot.c.seq, Snapshot.c.body).where(Snapshot.c.run_id == run_id)
            ).first()
        return (0, "") if found is None else (int(found.seq), found.body)

    def current_round(self, run_id: str) -> RoundBecameCurrent | None:
        """Return the event by which the current round of a pipelined run became current, or None if there is none."""
        wanted = select(Journal.c.body).where(Journal.c.run_id == run_id, Journal.c.kind == RoundBecameCurrent.__name__)
        with self._database.reading() as connection:
            body = connection.scalar(wanted.order_by(Journal.c.seq.desc()).limit(1))
            body = body or packed_latest(connection, run_id, RoundBecameCurrent.__name__)
        return None if body is None else RoundBecameCurrent(**body)

    def down_since(self, seq: int, at: float) -> float:
        """Return when the aggregator that wrote event `seq` at time `at` was last alive, never before `at`."""
        wanted = (
            select(Journal.c.body)
            .where(Journal.c.run_id.is_(None), Journal.c.kind == AggregatorStarted.__name__, Journal.c.seq > seq)
            .order_by(Journal.c.seq)
        )
        with self._database.reading() as connection:
            body = connection.scalar(wanted.limit(1))
        return max(at, AggregatorStarted(**body).down_since) if body else at

    def believed_at(self) -> float:
        """Return the time that `record_believed` kept; before it has, when the aggregator was last alive before its
        latest start, as far as it recorded that; 0 without.
        """
        own = (
            select(Journal.c.seq, Journal.c.at, Journal.c.body)
            .where(Journal.c.run_id.is_(None))
            .order_by(Journal.c.seq.desc())
        )
        with self._database.reading() as connection:
            if known := connection.execute(own.where(Journal.c.kind == ClockBelieved.__name__)).first():
                return float(known.at)
            row = connection.execute(own.where(Journal.c.kind == AggregatorStarted.__name__)).first()
            before = select(Journal.c.at).order_by(Journal.c.seq.desc()).limit(1)
            at = connection.scalar(before.where(Journal.c.seq < row.seq) if row else before) or 0.0
        return max(at, AggregatorStarted(**row.body).down_since) if row else at

    def last_seq(self, run_id: str | None = None) -> int:
        """Return the latest event's seq, of a run or of all; cheap enough for ten calls a second."""
        wanted = _LAST if run_id is None else _LAST.where(Journal.c.run_id == run_id)
        with self._database.reading() as connection:
            return int(connection.scalar(wanted) or 0)

    def changes(self) -> int:
        """Return a number that changes with what may be shown; cheap enough for ten calls a second.

        It is `last_seq()`, unless there is a run with Poisson sampling: each reply to such a run is an event, so these
        numbers would tell how many were sampled. Then this process counts the changes that it finds, and a sampled run
        changes only with its status, and as its rounds end.
        """
        with self._database.reading() as connection:
            sampled = connection.execute(_SAMPLED).all()
            if not sampled:
                return int(connection.scalar(_LAST) or 0)
            others = Journal.c.run_id.is_(None) | Journal.c.run_id.not_in([row.run_id for row in sampled])
            last = connection.scalar(select(Journal.c.seq).where(others).order_by(Journal.c.seq.desc()).limit(1))
        with self._counting:
            if (last, sampled) != self._shown:
                self._shown, self._changes = (last, sampled), self._changes + 1
            return self._changes


_SAMPLED = (
    select(Run.c.run_id, Run.c.status, Run.c.status_text, Run.c.rounds_closed, Run.c.version)
    .where(HAS_SAMPLES)
    .order_by(Run.c.number)
)
GATHERED_S = 2.0  # longest delay of events for a user who watches a simulation


class Recorder:
    """Appends events.

    Invariant: when `record` returns, its events survive a power cut; when it raises, none of them is recorded.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._facts: dict[str, RunFacts] = {}
        self._gathered: dict[str, list[Event]] = {}  # run -> events that `gathering` has not written yet
        self._noted: dict[str, list[Event]] = {}  # run -> events that wait for its next record
        self._unpacked: dict[str, int] = {}  # run -> events that are rows
        self._known: dict[str, KnownRows | None] = {}  # run -> rows of its read tables that may change
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

    def record(
        self, run_id: str, events: Sequence[Event], measured: Sequence[MeasureRow] = (), snapshot: str = "",
        command_id: int = 0,
    ) -> None:  # fmt: skip
        """Append a run's noted events, then `events`; apply them to the read tables, and store the measurements.

        A `snapshot` is the run's state after all earlier events. The command `command_id`, which made the run, is
        answered in the same transaction. Raise `DataLost` on an error of the database, after waiting for space as
        `ON_FULL_DISK` says.
        """
        patiently(lambda: self._record(run_id, events, measured, snapshot, command_id))

    def _record(
        self, run_id: str, events: Sequence[Event], measured: Sequence[MeasureRow], snapshot: str, command_id: int
    ) -> None:
        if (gathered := self._gathered.get(run_id)) is not None:
            if not _must_be_visible(events) and time.monotonic() - self._written_at.get(run_id, 0.0) < GATHERED_S:
                gathered += events
                return
            events, self._written_at[run_id] = [*gathered, *events], time.monotonic()
        events = [*self._noted.get(run_id, ()), *events]
        if not events:
            return
        facts = self._facts.get(run_id) or self._find(run_id)
        known, self._known[run_id] = self._known.get(run_id), None  # if the commit fails, they are read again
        unpacked = self._unpacked.get(run_id)
        with self._database.writing() as connection:
            if snapshot:
                seq = connection.scalar(_LAST.where(Journal.c.run_id == run_id))
                upsert(connection, Snapshot, [{"run_id": run_id, "seq": seq, "body": snapshot}])
            unpacked = unpacked_count(connection, run_id) if unpacked is None else unpacked
            while unpacked >= 2 * SEGMENT_EVENTS:
                unpacked -= pack_segment(connection, run_id)
            connection.execute(_JOURNAL, [_row(run_id, event) for event in events])
            upsert(connection, Measure, [dataclasses.asdict(row) for row in measured])  # with the replies they are of
            projection = Projection(connection, facts, known or KnownRows.read(connection, run_id))
            for event in events:
                projection.apply(event)
            projection.finish()
            if command_id:
                made = {"result": {"done": True, "run_id": run_id}, "run_id": run_id, "answered_at": events[-1].at}
                unanswered = update(Command).where(Command.c.id == command_id, Command.c.answered_at.is_(None))
                connection.execute(unanswered.values(made))
        self._unpacked[run_id], self._known[run_id] = unpacked + len(events), projection.known
        self._noted.pop(run_id, None)
        if gathered is not None:
            gathered.clear()
        if any(isinstance(event, RunStatusChanged) and event.status in ENDED for event in events):
            for held in (self._facts, self._known, self._unpacked):
                held.pop(run_id, None)

    def record_device(self, event: DeviceOnline | DeviceOffline) -> None:
        """Journal that a device has connected or disconnected, and set its online state."""
        if online := isinstance(event, DeviceOnline):
            heard = {"seen_at": event.at}
        else:
            heard = {"last_seen_at": event.last_seen_at or event.at}
        with self._database.writing() as connection:
            connection.execute(_JOURNAL, [_row(None, event)])
            connection.execute(update(Device).where(Device.c.name == event.device), {"online": online, **heard})

    def record_own(self, event: Event) -> None:
        """Journal an event of the aggregator itself, which belongs to no run."""
        with self._database.writing() as connection:
            append(connection, None, event)

    def record_believed(self, at: float) -> None:
        """Journal that the aggregator believed its clock at this time, in the place of an earlier time."""
        earlier = Journal.c.run_id.is_(None) & (Journal.c.kind == ClockBelieved.__name__)
        with self._database.writing() as connection:
            old = connection.scalars(select(Journal.c.seq).where(earlier)).all()
            append(connection, None, ClockBelieved(at))  # before the old one goes, so that no number is given twice
            connection.execute(delete(Journal).where(Journal.c.seq.in_(old)))

    def record_restart(self, at: float, down_since: float) -> None:
        """Journal the start of the aggregator, and set every device offline until it registers again."""
        with self._database.writing() as connection:
            connection.execute(_JOURNAL, _row(None, AggregatorStarted(at, down_since)))
            online = connection.scalars(select(Device.c.name).where(Device.c.online.is_(True))).all()
            if online:
                last_seen_at = min(down_since, at) if down_since else 0.0  # online until the aggregator ended
                left = [
                    _row(None, DeviceOffline(at, name, "the aggregator restarted", last_seen_at)) for name in online
                ]
                connection.execute(_JOURNAL, left)
                there = update(Device).where(Device.c.online.is_(True))
                connection.execute(there.values(online=False, last_seen_at=last_seen_at or None))

    def _find(self, run_id: str) -> RunFacts:
        with self._database.reading() as connection:
            found = connection.execute(
                select(Run.c.size, Run.c.plan, Run.c.source).where(Run.c.run_id == run_id)
            ).first()
        if found is None:
            raise NotFound(f"no run {run_id!r}")
        masked = bool((found.plan.get("secure") or {}).get("enabled"))
        protected = masked or (found.plan.get("privacy") or {}).get("mode", "off") != "off"
        simulated, sampled = found.source == "sim", is_sampled(found.plan)
        facts = RunFacts(run_id, found.size, found.plan["run"]["metric"], protected, simulated, masked, sampled)
        return self._facts.setdefault(run_id, facts)


def _must_be_visible(events: Sequence[Event]) -> bool:
    """Return True if events must be visible at once: the end of a round or of a run, or a spending of privacy."""
    return any(
        isinstance(e, RoundClosed | PrivacyReserved) or (isinstance(e, RunStatusChanged) and e.status != "running")
        for e in events
    )


def _row(run_id: str | None, event: Event) -> dict[str, object]:
    body = to_json(event)
    return {"run_id": run_id, "at": event.at, "kind": body.pop("event"), "body": body}


_JOURNAL = insert(Journal)


def append(connection: Connection, run_id: str | None, event: Event) -> None:
    """Append one event that no read table shows, in the transaction of its caller."""
    connection.execute(_JOURNAL, _row(run_id, event))


SEGMENT_EVENTS = 1000  # events in a segment, and the fewest that stay rows
COMPRESSION_LEVEL = 6  # of compression: 20 % smaller than level 1, for 12 us more an update

Packed = tuple[int, str, dict[str, Any]]  # seq, kind, body


def unpacked_count(connection: Connection, run_id: str) -> int:
    """Return the number of a run's events that are rows."""
    return int(connection.scalar(select(func.count()).where(Journal.c.run_id == run_id)) or 0)


def pack_segment(connection: Connection, run_id: str) -> int:
    """Move the oldest `SEGMENT_EVENTS` rows of a run into a segment; return how many rows that were."""
    columns = (Journal.c.seq, Journal.c.kind, cast(Journal.c.body, Text))  # the text as it is: nothing is parsed
    rows = connection.execute(
        select(*columns).where(Journal.c.run_id == run_id).order_by(Journal.c.seq).limit(SEGMENT_EVENTS)
    ).all()
    if not rows:
        return 0
    text = ",".join(f'[{seq},"{kind}",{body}]' for seq, kind, body in rows)
    row = {"run_id": run_id, "first_seq": rows[0][0], "last_seq": rows[-1][0]}
    connection.execute(insert(Segment), {**row, "body": zlib.compress(f"[{text}]".encode(), COMPRESSION_LEVEL)})
    connection.execute(delete(Journal).where(Journal.c.run_id == run_id, Journal.c.seq <= row["last_seq"]))
    return len(rows)


def packed_after(connection: Connection, run_id: str, seq: int) -> Iterator[Packed]:
    """Yield the events of a run's segments above `seq`, oldest first; one segment is unpacked at a time."""
    mine = (Segment.c.run_id == run_id, Segment.c.last_seq > seq)
    for last in connection.scalars(select(Segment.c.last_seq).where(*mine).order_by(Segment.c.last_seq)).all():
        yield from (found for found in _unpack(connection, run_id, last) if found[0] > seq)


def packed_latest(connection: Connection, run_id: str, kind: str) -> dict[str, Any] | None:
    """Return the body of the latest event of a kind in a run's segments; None if there is none."""
    mine = select(Segment.c.last_seq).where(Segment.c.run_id == run_id).order_by(Segment.c.last_seq.desc())
    for last in connection.scalars(mine).all():
        for _, one, body in reversed(_unpack(connection, run_id, last)):
            if one == kind:
                return body
    return None


def _unpack(connection: Connection, run_id: str, last_seq: int) -> list[Packed]:
    wanted = select(Segment.c.body).where(Segment.c.run_id == run_id, Segment.c.last_seq == last_seq)
    found: list[Packed] = json.loads(zlib.decompress(connection.scalars(wanted).one()))
    return found
