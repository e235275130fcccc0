"""The writes of one transaction: columns of a reply, deltas of counters, and changed rows of `updates`.

All fields of a reply's header may be missing, and none can be trusted to be small. Counters and rows are collected in
memory and written once, at the transaction's end: a statement costs more than the row that it changes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from sqlalchemy import Connection, Double, bindparam, case, func, insert, select, update
from sqlalchemy import Update as UpdateStatement

from thinwire.store.database import BoundedInteger, BoundedText
from thinwire.store.tables import Client, Round, Run, Update

REPLY_COLUMNS: Mapping[str, Any] = {
    "pulled_at": None, "began_at": None, "arrived_at": None, "download_s": None, "queue_s": None, "evaluate_s": None,
    "train_s": None, "encode_s": None, "load_s": None, "commit_s": None,
    "examples": 0, "steps": 0, "norm": None, "residual_norm": None,
    "residual_ratio": None, "state_lost": "",
    "requests": 0, "metrics": {}, "payload_up": 0, "wire_up": None, "wire_down": None,
}  # fmt: skip


def columns(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return all columns that a reply fills; `metrics` become sum over count."""
    transfer, timings = header.get("transfer") or {}, header.get("timings") or {}
    own = {name: header[name] for name in ("examples", "steps", "norm", "residual_norm") if name in header}
    times = {name: timings[name] for name in REPLY_COLUMNS.keys() & timings.keys() if name.endswith("_s")}
    moments = {name: transfer[name] or None for name in ("pulled_at", "began_at", "arrived_at") if name in transfer}
    return {
        **REPLY_COLUMNS, **own, **times, **moments,
        "residual_ratio": residual_ratio(header),
        "state_lost": str(header.get("lost") or ""),
        "requests": transfer.get("requests", 0),
        "metrics": means(header.get("metrics") or {}),
        "payload_up": sum(part["length"] for part in header.get("parts", ())),
        "wire_up": transfer.get("received_bytes"),
        "wire_down": transfer.get("sent_bytes"),
    }  # fmt: skip


def residual_ratio(header: Mapping[str, Any]) -> float | None:
    """Return the norm of the residual over the norm of the update, or None if the reply does not have both.

    The reply's `residual_norm` refers to the update divided by `a`, its `norm` to the update itself.

    >>> residual_ratio({"norm": 10.0, "a": 5.0, "residual_norm": 3.0})
    1.5
    """
    norm, a, residual = (header.get(name) or 0.0 for name in ("norm", "a", "residual_norm"))
    if not (norm > 0 and a > 0 and residual >= 0):
        return None
    ratio = residual / norm * a
    return ratio if math.isfinite(ratio) else None


def means(metrics: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return each metric's sum over its count, without metrics of count 0.

    >>> means({"eval/loss": (3.0, 2.0), "eval/accuracy": (0.0, 0.0)})
    {'eval/loss': 1.5}
    """
    return {name: total / count for name, (total, count) in metrics.items() if count}


TRAFFIC = ("payload_up", "payload_down", "wire_up", "wire_down")
OUTCOMES = {"aggregated": "aggregated_count", "aggregated-late": "late", "dropped": "dropped", "failed": "failed"}
SHARED_COUNTERS = (*TRAFFIC, *OUTCOMES.values())
RUN_COUNTERS = (*SHARED_COUNTERS, "dense_up", "dense_down", "rounds_closed")
CLIENT_COUNTERS = (*SHARED_COUNTERS, "selected", "arrived")
WIRE = ("wire_up", "wire_down")  # null until a transfer was measured
ADD = {name: f"add_{name}" for name in (*RUN_COUNTERS, *CLIENT_COUNTERS)}  # the parameter for an amount
NO_AMOUNT = {name: None if name in WIRE else 0 for name in ADD}  # of a counter to which nothing is added
SET_ONCE = ("started_at", "finished_at", "point")  # columns that keep their first value
Amounts = dict[str, int]  # name -> the sum of what was added; a defaultdict, which takes less time than a Counter
SET = "set_"  # prefix of the parameter for a column that is set


@dataclass
class CounterDeltas:
    """Holds the column values that one transaction sets in its run and rounds, and its increments of counts and bytes.

    The increments go to the run, its rounds and its clients. A name of WIRE that is missing in a counter was not
    measured.
    """

    connection: Connection
    run_id: str
    devices: set[str]  # that have a row already
    change: int  # number of this transaction in its run
    of_run: Row = field(default_factory=dict)  # column -> value
    of_rounds: dict[int, Row] = field(default_factory=lambda: defaultdict(dict))
    opened: list[Row] = field(default_factory=list)  # rounds that have no row yet
    run: Amounts = field(default_factory=lambda: defaultdict(int))
    rounds: dict[int, Amounts] = field(default_factory=lambda: defaultdict(lambda: defaultdict(int)))
    clients: dict[str, Amounts] = field(default_factory=lambda: defaultdict(lambda: defaultdict(int)))
    sequences: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, tuple[str, float]] = field(default_factory=dict)
    new: set[str] = field(default_factory=set)  # devices that may have no row yet

    def add(self, round_number: int, device: str, *, arrived: int = 0, **amounts: int | None) -> None:
        """Add the bytes of one assignment or reply; None means not measured."""
        counters = self.run, self.rounds[round_number], self.clients[device]
        for name, amount in amounts.items():
            if amount is not None:
                for counter in counters:
                    counter[name] += amount
        self.clients[device]["arrived"] += arrived

    def assign(self, device: str) -> None:
        """Count one assignment of a device."""
        self.ensure_client(device)
        self.clients[device]["selected"] += 1

    def ensure_client(self, device: str) -> None:
        """Give the device a row in `clients`, without counting an assignment.

        A request for the initial model belongs to no round, so it is not counted as an assignment.
        """
        self.clients[device]["selected"] += 0  # so that its row is written
        self.new.add(device)

    def note_sequence(self, device: str, sequence: int) -> None:
        """Record the sequence number of a reply; the highest one is stored."""
        self.sequences[device] = max(sequence, self.sequences.get(device, 0))
        self.clients[device]["arrived"] += 0  # so that its row is written

    def change_outcome(self, round_number: int, device: str, old: str, new: str, reason: str, at: float) -> None:
        """Change the outcome of one assignment in all counts."""
        for counter in (self.run, self.rounds[round_number], self.clients[device]):
            if old in OUTCOMES:
                counter[OUTCOMES[old]] -= 1
            if new in OUTCOMES:
                counter[OUTCOMES[new]] += 1
        self.outcomes[device] = (f"{new}: {reason}" if reason else new, at)

    def values_set_in(self, round_number: int) -> Row:
        """Return the values that this transaction has set in a round so far."""
        opened = next((row for row in self.opened if row["round"] == round_number), {})
        return {**opened, **self.of_rounds.get(round_number, {})}

    def write(self) -> None:
        """Write everything: one statement for the run, one for the clients, one for each set of columns of rounds."""
        if self.run or self.of_run:
            row = {"the_run": self.run_id, **_amounts(self.run, RUN_COUNTERS), **_set(self.of_run)}
            self.connection.execute(_to_run(frozenset(self.of_run)), row)
        self._write_rounds()
        if self.clients:
            self._write_clients()

    def _write_rounds(self) -> None:
        new, old = list[Row](), list[Row]()
        for row in self.opened:
            counts = {name: self.rounds[row["round"]].get(name, NO_AMOUNT[name]) for name in SHARED_COUNTERS}
            own = {**row, **self.of_rounds[row["round"]], "changed": self.change}
            new.append({"run_id": self.run_id, **own, **counts})
        for number in sorted((self.of_rounds.keys() | self.rounds.keys()) - {row["round"] for row in self.opened}):
            key = {"the_run": self.run_id, "the_round": number}
            own = _set({**self.of_rounds[number], "changed": self.change})
            old.append({**key, **_amounts(self.rounds[number], SHARED_COUNTERS), **own})
        for rows in group_by_columns(new):
            self.connection.execute(_NEW_ROUND, rows)
        for rows in group_by_columns(old):
            names = frozenset(name.removeprefix(SET) for name in rows[0] if name.startswith(SET))
            self.connection.execute(_to_round(names), rows)

    def _write_clients(self) -> None:
        if missing := sorted(self.new - self.devices):
            self.connection.execute(_NEW_CLIENT, [{"run_id": self.run_id, "device": name} for name in missing])
            self.devices.update(missing)
        rows = list[Row]()
        for device, counter in self.clients.items():
            outcome, at = self.outcomes.get(device, (None, None))
            own = {"the_run": self.run_id, "the_device": device, "outcome": outcome, "at": at}
            rows.append({**own, "seen": self.sequences.get(device, 0), **_amounts(counter, CLIENT_COUNTERS)})
        self.connection.execute(_ADD_TO_CLIENT, rows)


def _amounts(counter: Amounts, names: tuple[str, ...]) -> dict[str, int | None]:
    return {ADD[name]: counter.get(name, NO_AMOUNT[name]) for name in names}


def _set(values: Row) -> Row:
    return {SET + name: value for name, value in values.items()}


def _setting(table: Any, names: frozenset[str]) -> dict[str, Any]:
    given = {name: bindparam(SET + name, type_=table.c[name].type) for name in sorted(names)}
    first = {name: func.coalesce(table.c[name], given[name]) for name in given if name in SET_ONCE}
    return {**given, **first}


def _adding(table: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Return expressions that add each amount to its column.

    Where the column is null, the result is the amount; where nothing was measured, the column stays as it is.
    """
    amounts = {name: bindparam(ADD[name], type_=BoundedInteger) for name in names}
    columns = {name: table.c[name] for name in names}
    return {
        name: func.coalesce(columns[name] + amount, amount, columns[name]) if name in WIRE else columns[name] + amount
        for name, amount in amounts.items()
    }


_SEEN, _AT = bindparam("seen", type_=BoundedInteger), bindparam("at", type_=Double)
_OUTCOME = bindparam("outcome", type_=BoundedText)
_DEVICES = select(Client.c.device).where(Client.c.run_id == bindparam("the_run"))
_NEW_CLIENT, _NEW_ROUND = insert(Client), insert(Round)
_RUN = update(Run).where(Run.c.run_id == bindparam("the_run")).values(_adding(Run, RUN_COUNTERS))
_ROUND = (
    update(Round)
    .where(Round.c.run_id == bindparam("the_run"), Round.c.round == bindparam("the_round"))
    .values(_adding(Round, SHARED_COUNTERS))
)


@cache
def _to_run(names: frozenset[str]) -> UpdateStatement:
    """Return a statement that adds to a run's sums and sets these columns."""
    return _RUN.values(_setting(Run, names))


@cache
def _to_round(names: frozenset[str]) -> UpdateStatement:
    """Return a statement that adds to a round's sums and sets these columns."""
    return _ROUND.values(_setting(Round, names))


_ADD_TO_CLIENT = (
    update(Client)
    .where(Client.c.run_id == bindparam("the_run"), Client.c.device == bindparam("the_device"))
    .values(
        _adding(Client, CLIENT_COUNTERS)
        | {
            "sequence": case((Client.c.sequence < _SEEN, _SEEN), else_=Client.c.sequence),
            "last_outcome": func.coalesce(_OUTCOME, Client.c.last_outcome),
            "last_at": func.coalesce(_AT, Client.c.last_at),
        }
    )
)


MAX_UPDATE_IDS = 500  # in one query
Row = dict[str, Any]


@dataclass
class KnownRows:
    """Holds the rows of a run's read tables that the journal's writer needs, so that a reply needs no query.

    Only one process writes the tables of a run. Invariant: it holds what the tables had at the last commit; after an
    error it is thrown away. It holds rounds until they close and assignments until their outcome is final, so it does
    not grow with the run.
    """

    rows: dict[str, Row] = field(default_factory=dict)  # assignment -> values of _KNOWN
    by_update: dict[str, str] = field(default_factory=dict)  # update -> assignment
    devices: set[str] = field(default_factory=set)  # that have a row in `clients`
    selections: dict[int, Row] = field(default_factory=dict)  # open round -> values of _SELECTION
    reserved: set[int] = field(default_factory=set)  # rounds that spend privacy
    changes: int = 0  # transactions that changed rounds of the run
    points: int = 0  # the last number of a measured round

    @classmethod
    def read(cls, connection: Connection, run_id: str) -> KnownRows:
        """Read the assignments of the last rounds that may still change, and the run's devices."""
        found = cls(devices=set(connection.scalars(_DEVICES, {"the_run": run_id})))
        last, found.changes, found.points = (
            connection.scalar(select(func.max(column)).where(Round.c.run_id == run_id)) or 0
            for column in (Round.c.round, Round.c.changed, Round.c.point)
        )
        recent = Update.c.run_id == run_id, Update.c.round > last - RECENT_ROUNDS
        found.changes = max(found.changes, connection.scalar(select(func.max(Update.c.changed)).where(*recent)) or 0)
        undecided = select(*_KNOWN).where(*recent, Update.c.outcome.not_in(FINAL_OUTCOMES))
        for row in connection.execute(undecided).mappings():
            found.add(dict(row))
        is_open = Round.c.run_id == run_id, Round.c.round > last - MAX_OPEN_ROUNDS, Round.c.reason == ""
        for row in connection.execute(select(Round.c.round, *_SELECTION).where(*is_open)).mappings():
            values = dict(row)
            found.selections[values.pop("round")] = values
        return found

    def add(self, row: Row) -> None:
        """Add the row of an assignment."""
        self.rows[row["assignment_id"]] = row
        if row["update_id"]:
            self.by_update.setdefault(row["update_id"], row["assignment_id"])

    def forget(self, rounds: Sequence[int]) -> None:
        """Forget these rounds, which have closed, and the assignments whose outcomes are final now."""
        for number in rounds:
            self.selections.pop(number, None)
        oldest = max(rounds) - RECENT_ROUNDS
        for assignment_id, row in list(self.rows.items()):
            if row["outcome"] in FINAL_OUTCOMES or (row["outcome"] == "failed" and row["round"] <= oldest):
                del self.rows[assignment_id]
                self.by_update.pop(row["update_id"], None)


MAX_OPEN_ROUNDS = 17  # of one run at once: the largest `[local] max_delay`, and one
RECENT_ROUNDS = 3  # last rounds, in which a failed assignment may become pending again
FINAL_OUTCOMES = ("aggregated", "aggregated-late", "dropped", "over")


class Rows:
    """Holds an identity map of rows of `updates`: each row is read once, and written once with all its changes."""

    def __init__(self, connection: Connection, run_id: str, known: KnownRows) -> None:
        self._connection, self._run_id, self._known = connection, run_id, known
        self._rows, self._by_update = known.rows, known.by_update
        self._new: dict[str, Row] = {}  # assignment -> all columns, not written yet
        self._changed: dict[str, Row] = defaultdict(dict)  # assignment -> changed columns

    def new(self, round_number: int, device: str, assignment_id: str, **values: Any) -> Row:
        """Add a row for a new assignment."""
        row: Row = {"run_id": self._run_id, "round": round_number, "device": device, "assignment_id": assignment_id}
        row |= {"update_id": "", "outcome": "selected", "late_reply": False, "assigned_at": None}
        self._rows[assignment_id] = self._new[assignment_id] = row = {**row, **REPLY_COLUMNS, **values}
        return row

    def find(self, assignment_id: str) -> Row | None:
        """Return the row of an assignment, or None."""
        if assignment_id not in self._rows:
            self._read(Update.c.assignment_id == assignment_id)
        return self._rows.get(assignment_id)

    def of_round(self, number: int) -> dict[str, Row]:
        """Return the rows of a secure round, in which each device has one assignment, by device."""
        self._read(Update.c.round == number)
        return {row["device"]: row for row in self._rows.values() if row["round"] == number}

    def by_update(self, update_ids: Iterable[str]) -> list[Row]:
        """Return the rows with these updates, sorted by round and assignment."""
        wanted = list(update_ids)
        missing = [update_id for update_id in wanted if update_id not in self._by_update]
        for start in range(0, len(missing), MAX_UPDATE_IDS):
            self._read(Update.c.update_id.in_(missing[start : start + MAX_UPDATE_IDS]))
        found = {self._by_update[update_id] for update_id in wanted if update_id in self._by_update}
        return sorted(
            (self._rows[assignment_id] for assignment_id in found), key=lambda row: (row["round"], row["assignment_id"])
        )

    def change(self, row: Row, **values: Any) -> None:
        """Change columns of a row."""
        assignment_id = row["assignment_id"]
        if assignment_id in self._new:
            row.update(values)
        else:
            row.update({name: value for name, value in values.items() if name in row})
            self._changed[assignment_id].update(values)
        if row["update_id"]:
            self._by_update[row["update_id"]] = assignment_id

    def write(self) -> None:
        """Write the rows with one statement for each set of columns."""
        change = {"changed": self._known.changes}
        for rows in group_by_columns({**row, **change} for row in self._new.values()):
            self._connection.execute(_NEW, rows)
        changed = [{"the_assignment": key, **values, **change} for key, values in self._changed.items()]
        for rows in group_by_columns(changed):
            self._connection.execute(_UPDATE, [{"the_run": self._run_id, **row} for row in rows])
        for assignment_id, row in self._new.items():
            self._rows[assignment_id] = {name: row[name] for name in _KNOWN_NAMES}
        self._new.clear()
        self._changed.clear()

    def _read(self, where: Any) -> None:
        for found in self._connection.execute(select(*_KNOWN).where(Update.c.run_id == self._run_id, where)).mappings():
            if found["assignment_id"] not in self._rows:  # the values of this transaction are newer
                self._known.add(dict(found))


def group_by_columns(rows: Iterable[Mapping[str, Any]]) -> Iterable[list[Mapping[str, Any]]]:
    """Group rows by their columns, so that one statement writes each group."""
    groups: dict[frozenset[str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[frozenset(row)].append(row)
    return groups.values()


_SELECTION = (Round.c.selected, Round.c.not_selected, Round.c.codecs, Round.c.codec_reasons)
_KNOWN = (
    Update.c.assignment_id, Update.c.round, Update.c.device, Update.c.update_id, Update.c.outcome, Update.c.late_reply,
    Update.c.pulled_at, Update.c.metrics, Update.c.payload_up,
)  # fmt: skip
_KNOWN_NAMES = tuple(column.key for column in _KNOWN)
_NEW = insert(Update)
_UPDATE = update(Update).where(
    Update.c.run_id == bindparam("the_run"), Update.c.assignment_id == bindparam("the_assignment")
)
