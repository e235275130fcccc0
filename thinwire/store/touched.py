"""The rows of asks that one transaction touches: each is read once, and written once with all that changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import Connection, bindparam, insert, select, update

from thinwire.store.answers import ANSWER
from thinwire.store.tables import Update

MANY = 500  # names in one query
Row = dict[str, Any]


class Rows:
    """Rows of `updates` in memory until `write`."""

    def __init__(self, connection: Connection, run_id: str) -> None:
        self._connection, self._run_id = connection, run_id
        self._rows: dict[str, Row] = {}  # ask_id -> what is known of it now
        self._by_update: dict[str, str] = {}  # update_id -> ask_id
        self._new: dict[str, Row] = {}  # ask_id -> all columns, not written yet
        self._changed: dict[str, Row] = defaultdict(dict)  # ask_id -> columns

    def new(self, round_number: int, device: str, ask_id: str, **values: Any) -> Row:
        row = {"run_id": self._run_id, "round": round_number, "device": device, "ask_id": ask_id}
        whole = {**row, "update_id": "", "outcome": "asked", "late_answer": False, "asked_at": None, **ANSWER, **values}
        self._rows[ask_id] = self._new[ask_id] = whole
        return whole

    def find(self, ask_id: str) -> Row | None:
        if ask_id not in self._rows:
            self._read(Update.ask_id == ask_id)
        return self._rows.get(ask_id)

    def by_update(self, update_ids: Iterable[str]) -> list[Row]:
        """Those that have one of these answers, by round and ask."""
        wanted = list(update_ids)
        missing = [update_id for update_id in wanted if update_id not in self._by_update]
        for start in range(0, len(missing), MANY):
            self._read(Update.update_id.in_(missing[start : start + MANY]))
        found = {self._by_update[update_id] for update_id in wanted if update_id in self._by_update}
        return sorted((self._rows[ask_id] for ask_id in found), key=lambda row: (row["round"], row["ask_id"]))

    def change(self, row: Row, **values: Any) -> None:
        row.update(values)
        if row["update_id"]:
            self._by_update[row["update_id"]] = row["ask_id"]
        if row["ask_id"] not in self._new:
            self._changed[row["ask_id"]].update(values)

    def write(self) -> None:
        """Few statements for many rows: one for each set of columns."""
        for rows in alike(self._new.values()):
            self._connection.execute(_NEW, rows)
        for rows in alike([{"the_ask": ask_id, **values} for ask_id, values in self._changed.items()]):
            self._connection.execute(_UPDATE, [{"the_run": self._run_id, **row} for row in rows])
        self._new.clear()
        self._changed.clear()

    def _read(self, where: Any) -> None:
        for found in self._connection.execute(select(*_KNOWN).where(Update.run_id == self._run_id, where)).mappings():
            if found["ask_id"] not in self._rows:  # what this transaction knows is newer
                self._rows[found["ask_id"]] = row = dict(found)
                self._by_update.setdefault(row["update_id"], row["ask_id"])


def alike(rows: Iterable[Mapping[str, Any]]) -> Iterable[list[Mapping[str, Any]]]:
    """Rows of the same columns together: each group is one statement."""
    groups: dict[frozenset[str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[frozenset(row)].append(row)
    return groups.values()


_KNOWN = (
    Update.ask_id,
    Update.round,
    Update.device,
    Update.update_id,
    Update.outcome,
    Update.late_answer,
    Update.pulled_at,
    Update.metrics,
)
_NEW = insert(Update)
_UPDATE = update(Update).where(Update.run_id == bindparam("the_run"), Update.ask_id == bindparam("the_ask"))
