"""Alerts: what an operator should know of, from the moment it is so until it is over, and who has seen it.

The dashboard's process opens and closes alerts (`thinwire/web/alerts.py`), and sends a message at each of the two. The
row says which message was sent, so that after a crash none is lost, and one is sent twice only if the crash came
between the sending and its record.

Invariant: an alert of one kind about one subject is open at most once.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final, Literal

from sqlalchemy import Double, Index, Select, String, Table, delete, func, insert, or_, select, update

from thinwire.core.clock import Clock
from thinwire.core.errors import NotFound
from thinwire.store.database import (
    METADATA,
    BoundedInteger,
    BoundedText,
    Counter,
    Database,
    columns_of,
    needed,
    optional,
)

MAX_CLOSED: Final = 1000  # closed alerts that are kept
SENT_CHANGES: Final = 2**20  # of a sent message in the number of changes: it sets its failures, which are fewer, to 0
FIRST_WAIT_S, LONGEST_WAIT_S = 10.0, 600.0  # until a message that could not be sent is sent again
Change = Literal["opened", "closed"]


# An alert, and how far its two messages have come.
Alert = Table(
    "alerts",
    METADATA,
    needed("id", Counter, primary_key=True),
    needed("kind", String(40)),
    needed("subject", String(80), default=""),  # the run's id, "" for the aggregator
    needed("sentence", BoundedText(500)),
    needed("hint", BoundedText(500), default=""),
    needed("opened_at", Double),
    optional("closed_at", Double),
    needed("acknowledged_by", BoundedText, default=""),
    optional("acknowledged_at", Double),
    optional("opening_sent_at", Double),
    optional("closing_sent_at", Double),
    needed("failures", BoundedInteger, default=0),  # of the message that is due, one after the other
    needed("failure", BoundedText(300), default=""),
    needed("sent_to", String(40), default=""),  # targets that have the message that is due
    needed("due_at", Double, default=0.0),  # of the next attempt
    Index(None, "closed_at"),
    sqlite_autoincrement=True,
)


@dataclass(frozen=True)
class AlertRow:
    """Holds an alert as it is stored; times are wall-clock seconds."""

    id: int
    kind: str
    subject: str
    sentence: str
    hint: str
    opened_at: float
    closed_at: float | None
    acknowledged_by: str
    acknowledged_at: float | None
    opening_sent_at: float | None
    closing_sent_at: float | None
    failures: int
    failure: str
    sent_to: str

    @property
    def due(self) -> Change | None:
        """Return the message that is to be sent next; None if all are sent."""
        if self.opening_sent_at is None:
            return "opened"
        return "closed" if self.closed_at is not None and self.closing_sent_at is None else None


@dataclass(frozen=True)
class Condition:
    """Something that is so now and that an operator should know of, with what to try."""

    kind: str
    subject: str
    sentence: str
    hint: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Return what tells one alert from another."""
        return self.kind, self.subject


_ROWS: Final = columns_of(Alert, AlertRow)


class Alerts:
    """Opens, closes, lists and acknowledges alerts, and records their messages."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._clock = database, clock

    def update(self, conditions: Collection[Condition], unknown: Collection[str] = ()) -> None:
        """Open an alert for each new condition, and close those whose condition is over.

        An alert of a kind in `unknown` stays as it is: nobody can tell now whether its condition holds.
        """
        now, found = self._clock.wall(), {one.key: one for one in conditions}
        open_ones = {(row.kind, row.subject): row for row in self.open()}
        new = [one for key, one in found.items() if key not in open_ones]
        over = [row.id for key, row in open_ones.items() if key not in found and row.kind not in unknown]
        if not new and not over:
            return
        with self._database.writing() as connection:
            for one in new:
                row = {"kind": one.kind, "subject": one.subject, "sentence": one.sentence, "hint": one.hint}
                connection.execute(insert(Alert), {**row, "opened_at": now, "due_at": now})
            if over:
                changed = {"closed_at": now, "due_at": now}
                connection.execute(update(Alert).where(Alert.c.id.in_(over)).values(changed))
            told = select(Alert.c.closed_at).where(Alert.c.closing_sent_at.is_not(None))
            oldest = told.order_by(Alert.c.closed_at.desc()).offset(MAX_CLOSED - 1).limit(1).scalar_subquery()
            connection.execute(delete(Alert).where(Alert.c.closing_sent_at.is_not(None), Alert.c.closed_at < oldest))

    def open(self) -> list[AlertRow]:
        """Return the open alerts, oldest first."""
        return self._rows(_ROWS.where(Alert.c.closed_at.is_(None)).order_by(Alert.c.id))

    def all(self, limit: int = 200) -> list[AlertRow]:
        """Return open and closed alerts, newest first."""
        return self._rows(_ROWS.order_by(Alert.c.id.desc()).limit(limit))

    def due(self) -> list[AlertRow]:
        """Return the alerts of which a message is to be sent now, oldest first."""
        unsent = or_(
            Alert.c.opening_sent_at.is_(None), Alert.c.closed_at.is_not(None) & Alert.c.closing_sent_at.is_(None)
        )
        return self._rows(_ROWS.where(unsent, Alert.c.due_at <= self._clock.wall()).order_by(Alert.c.id))

    def sent(self, row: AlertRow, change: Change) -> None:
        """Record that the message about this change was sent."""
        column = "opening_sent_at" if change == "opened" else "closing_sent_at"
        values = {column: self._clock.wall(), "failures": 0, "failure": "", "sent_to": ""}
        with self._database.writing() as connection:
            connection.execute(update(Alert).where(Alert.c.id == row.id).values(values))

    def not_sent(self, row: AlertRow, why: str, sent_to: str = "") -> None:
        """Record why a message could not be sent to all targets, and which have it.

        It is due again after 10 s, then 20 s, up to 10 minutes.
        """
        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(row.failures, 10))
        values = {"failures": row.failures + 1, "failure": why[:300], "sent_to": sent_to}
        values["due_at"] = self._clock.wall() + wait_s
        with self._database.writing() as connection:
            connection.execute(update(Alert).where(Alert.c.id == row.id).values(values))

    def acknowledge(self, number: int, who: str) -> AlertRow:
        """Record that a person has seen an alert; the first one counts. `NotFound` without such an alert."""
        values = {"acknowledged_by": who, "acknowledged_at": self._clock.wall()}
        with self._database.writing() as connection:
            seen = update(Alert).where(Alert.c.id == number, Alert.c.acknowledged_at.is_(None))
            connection.execute(seen.values(values))
        found = self._rows(_ROWS.where(Alert.c.id == number))
        if not found:
            raise NotFound(f"no alert {number}", why="none has this number, or it was closed long ago")
        return found[0]

    def counts(self) -> tuple[int, int, int]:
        """Return how many alerts are open, how many of them nobody has acknowledged, and a number of all changes."""
        is_open, own = Alert.c.closed_at.is_(None), Alert.c
        once, sent = (own.closed_at, own.acknowledged_at), (own.opening_sent_at, own.closing_sent_at)
        wanted = select(
            func.count().filter(is_open),
            func.count().filter(is_open, own.acknowledged_at.is_(None)),
            func.coalesce(func.max(own.id), 0),
            func.coalesce(func.sum(own.failures), 0),
            *(func.count(column) for column in once),  # count() skips NULL
            *(func.count(column) * SENT_CHANGES for column in sent),
        )
        with self._database.reading() as connection:
            opened, unseen, *changes = connection.execute(wanted).one()
        return int(opened), int(unseen), int(sum(changes))

    def _rows(self, wanted: Select[Any]) -> list[AlertRow]:
        with self._database.reading() as connection:
            return [AlertRow(**row) for row in connection.execute(wanted).mappings()]
