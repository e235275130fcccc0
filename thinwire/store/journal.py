"""The journal as it is read: what happened, in the order in which it became durable."""

from __future__ import annotations

from sqlalchemy import func, select

from thinwire.core.absence import SLACK_S
from thinwire.core.event_json import from_json
from thinwire.core.events import AggregatorStarted, Event, HeadTaken
from thinwire.store.database import Database
from thinwire.store.tables import Journal


def events(database: Database, run_id: str | None, after: int = 0, limit: int | None = None) -> list[tuple[int, Event]]:
    """(seq, event) of one run, or with None of the devices, behind `after`."""
    wanted = select(Journal.seq, Journal.kind, Journal.body).where(Journal.run_id == run_id, Journal.seq > after)
    with database.reading() as connection:
        rows = connection.execute(wanted.order_by(Journal.seq).limit(limit)).all()
    return [(seq, from_json({**body, "event": kind})) for seq, kind, body in rows]


def head_taken(database: Database, run_id: str) -> HeadTaken | None:
    """Of a run whose asks go ahead: which round became the first in the line last, and when; looks from the end on."""
    wanted = select(Journal.body).where(Journal.run_id == run_id, Journal.kind == HeadTaken.__name__)
    with database.reading() as connection:
        body = connection.scalar(wanted.order_by(Journal.seq.desc()).limit(1))
    return None if body is None else HeadTaken(**body)


def gone(database: Database, seq: int, at: float, now: float) -> tuple[float, float]:
    """When the aggregator that wrote event `seq` at `at` was last alive, as the next one to start found it, which the
    order of the journal tells; and by how much the clock is known to have been set since. One that is said to have been
    alive after `now`, nobody knows why, was so at its last event, or later.
    """
    wanted = (
        select(Journal.body)
        .where(Journal.run_id.is_(None), Journal.kind == AggregatorStarted.__name__)
        .order_by(Journal.seq)
    )
    with database.reading() as connection:
        starts = [AggregatorStarted(**body) for body in connection.scalars(wanted.where(Journal.seq > seq))]
    found = max(at, starts[0].gone_at) if starts else at
    set_since = {start.gone_at: start.set_by_s for start in starts}  # one that died before its first beat set nothing
    set_by_s = sum(set_since.values())
    return (at if at <= now < found + set_by_s - SLACK_S else found), set_by_s


_LAST = select(func.coalesce(func.max(Journal.seq), 0))


def last_seq(database: Database, run_id: str | None = None) -> int:
    """The newest event's number, of one run or of all; 0 before the first."""
    wanted = _LAST if run_id is None else _LAST.where(Journal.run_id == run_id)
    with database.reading() as connection:
        return int(connection.scalar(wanted) or 0)
