"""Read the list of runs, and that of a run's clients: a page of them, in the order that a person chooses.

Invariant: what a page costs depends on its length, and not on the number of runs: only its rows are read whole. That of
a page of clients depends in addition on their number, and not on the number of rounds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from sqlalchemy import ColumnElement, Select, Text, cast, func, or_, select

from thinwire.store.database import Database
from thinwire.store.tables import Client, Run

SortKey = Literal["number", "run_id", "task", "status", "rounds", "best", "payload_up", "seconds", "started"]
ClientKey = Literal[
    "device", "last_outcome", "selected", "aggregated", "late", "dropped", "failed", "payload_up", "payload_down",
    "wire_up", "wire_down",
]  # fmt: skip
MAX_SEARCH: Final = 100  # characters


@dataclass(frozen=True)
class RunFilter:
    """Selects the runs of a list: `text` is part of an id, a name, a tag or a task; no `statuses` are all.

    Runs that a person has deleted are in no list, archived ones only in that of the archive.
    """

    text: str = ""
    statuses: Collection[str] = ()
    archived: bool = False

    def applied(self, wanted: Select[tuple[str]]) -> Select[tuple[str]]:
        """Return the query with this filter; runs that are not handed over yet are in no list."""
        own = Run.c
        wanted = wanted.where(own.status.in_(self.statuses) if self.statuses else own.status != "preparing")
        wanted = wanted.where(own.deleted_at.is_(None), own.archived_at.is_not(None) == self.archived)
        for word in self.text[:MAX_SEARCH].split():
            part, lower = f"%{_literal(word)}%", f"%{_literal(word.lower())}%"
            columns = (own.run_id, own.name, own.task, own.status, cast(own.tags, Text))
            as_typed = [column.like(part, escape="\\") for column in columns]  # SQLite's lower() leaves "Ü" as it is
            lowered = [func.lower(column).like(lower, escape="\\") for column in columns]
            wanted = wanted.where(or_(*as_typed, *lowered))
        return wanted


ALL: Final = RunFilter()


def ids_of(
    database: Database, found: RunFilter, sort: SortKey = "number", descending: bool = True, first: int = 0,
    count: int | None = None,
) -> list[str]:  # fmt: skip
    """Return the ids of a page of runs; runs without the value that is sorted by come last, in either direction."""
    own = Run.c
    by = _order(sort)
    ordered = found.applied(select(own.run_id)).order_by(by.is_(None), by.desc() if descending else by.asc())
    with database.reading() as connection:
        return list(connection.scalars(ordered.order_by(own.number.desc()).offset(first).limit(count)))


def counts_of(database: Database, found: RunFilter) -> tuple[int, dict[str, int]]:
    """Return how many runs match, and how many of all runs have each status."""
    own = Run.c
    matching = found.applied(select(own.run_id)).subquery()
    shown = own.deleted_at.is_(None) & (own.archived_at.is_not(None) == found.archived) & (own.status != "preparing")
    by_status = select(own.status, func.count()).where(shown).group_by(own.status)
    with database.reading() as connection:
        total = int(connection.scalar(select(func.count()).select_from(matching)) or 0)
        return total, {status: int(count) for status, count in connection.execute(by_status)}


def in_order(ids: Sequence[str]) -> dict[str, int]:
    """Return the place of each id."""
    return {run_id: place for place, run_id in enumerate(ids)}


def _order(sort: str) -> ColumnElement[object]:
    own = Run.c
    expressions: dict[str, ColumnElement[object]] = {
        "number": own.number, "run_id": own.run_id, "task": own.task, "status": own.status,
        "rounds": own.version, "best": own.best_value, "payload_up": own.payload_up,
        "seconds": own.finished_at - own.started_at, "started": own.started_at,
    }  # fmt: skip
    return expressions[sort]


def clients_in_order(wanted: Select[Any], sort: ClientKey, descending: bool) -> Select[Any]:
    """Return a query of a run's clients in this order; those without the value come last, in either direction."""
    own = Client.c
    by = own.aggregated_count + own.late if sort == "aggregated" else own[sort]
    return wanted.order_by(by.is_(None), by.desc() if descending else by.asc(), own.device)


def _literal(word: str) -> str:
    """Return a word for LIKE in which no letter has a meaning of its own.

    >>> _literal("50%_a")
    '50\\\\%\\\\_a'
    """
    return "".join(f"\\{letter}" if letter in "\\%_" else letter for letter in word)
