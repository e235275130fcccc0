"""The head of an answer as columns of its update: every field may be missing, none is trusted to be small."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from sqlalchemy import Connection, Double, bindparam, case, func, insert, select, update
from sqlalchemy import Update as UpdateStatement

from thinwire.store.database import Whole, Words
from thinwire.store.run_tables import Client, Round, Run, Update

ANSWER: Mapping[str, Any] = {
    "pulled_at": None, "began_at": None, "arrived_at": None, "download_s": None, "queue_s": None, "evaluate_s": None,
    "train_s": None, "encode_s": None, "examples": 0, "steps": 0, "norm": None, "residual_norm": None,
    "residual_ratio": None, "state_lost": "",
    "requests": 0, "metrics": {}, "payload_up": 0, "wire_up": None, "wire_down": None,
}  # fmt: skip


def columns(head: Mapping[str, Any]) -> dict[str, Any]:
    """All columns that an answer fills; `metrics` become sum over count."""
    transfer, timings = head.get("transfer") or {}, head.get("timings") or {}
    own = {name: head[name] for name in ("examples", "steps", "norm", "residual_norm") if name in head}
    times = {name: timings[name] for name in ANSWER.keys() & timings.keys() if name.endswith("_s")}
    moments = {name: transfer[name] or None for name in ("pulled_at", "began_at", "arrived_at") if name in transfer}
    return {
        **ANSWER, **own, **times, **moments,
        "residual_ratio": residual_ratio(head),
        "state_lost": str(head.get("lost") or ""),
        "requests": transfer.get("requests", 0),
        "metrics": means(head.get("metrics") or {}),
        "payload_up": sum(part["length"] for part in head.get("parts", ())),
        "wire_up": transfer.get("received_bytes"),
        "wire_down": transfer.get("sent_bytes"),
    }  # fmt: skip


def residual_ratio(head: Mapping[str, Any]) -> float | None:
    """How large what was not sent is beside the change: the residual is of the change over `a`, `norm` of the change.

    >>> residual_ratio({"norm": 10.0, "a": 5.0, "residual_norm": 3.0})
    1.5
    """
    norm, a, residual = (head.get(name) or 0.0 for name in ("norm", "a", "residual_norm"))
    if not (norm > 0 and a > 0 and residual >= 0):
        return None
    ratio = residual / norm * a
    return ratio if math.isfinite(ratio) else None


def means(metrics: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Each metric's sum over its count; what counted nothing is left out.

    >>> means({"eval/loss": (3.0, 2.0), "eval/accuracy": (0.0, 0.0)})
    {'eval/loss': 1.5}
    """
    return {name: total / count for name, (total, count) in metrics.items() if count}


# What one transaction sets in its run and rounds, and adds to their and its clients' counts and bytes.
#
# It is written once, at the transaction's end: a statement costs more than the row that it changes.


TRAFFIC = ("payload_up", "payload_down", "wire_up", "wire_down")
OUTCOMES = {"folded": "folded_count", "late": "late", "dropped": "dropped", "failed": "failed"}
EVERYWHERE = (*TRAFFIC, *OUTCOMES.values())
OF_RUNS = (*EVERYWHERE, "dense_up", "dense_down", "rounds_closed")
OF_CLIENTS = (*EVERYWHERE, "asked", "arrived")
WIRE = ("wire_up", "wire_down")  # None until there was a wire
ONCE = ("started_at", "finished_at")  # the first moment that is set stays
SET = "set_"  # before the name of a column that is set, as a parameter


@dataclass
class Sums:
    """Columns by name, and increments; a name of WIRE that is not in a Counter was not measured."""

    connection: Connection
    run_id: str
    of_run: Row = field(default_factory=dict)  # what is set
    of_rounds: dict[int, Row] = field(default_factory=lambda: defaultdict(dict))
    opened: list[Row] = field(default_factory=list)  # rounds that have no row yet
    run: Counter[str] = field(default_factory=Counter)
    rounds: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    clients: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    sequences: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, tuple[str, float]] = field(default_factory=dict)
    new: set[str] = field(default_factory=set)  # devices that may have no row yet

    def add(self, round_number: int, device: str, *, arrived: int = 0, **amounts: int | None) -> None:
        """Bytes of one ask or answer; None was not measured."""
        for counter in (self.run, self.rounds[round_number], self.clients[device]):
            counter.update({name: amount for name, amount in amounts.items() if amount is not None})
        self.clients[device]["arrived"] += arrived

    def ask(self, device: str) -> None:
        self.takes_part(device)
        self.clients[device]["asked"] += 1

    def takes_part(self, device: str) -> None:
        """It has been asked something, if only for the first model, which counts as no ask of a round."""
        self.clients[device]["asked"] += 0  # so that its row is written
        self.new.add(device)

    def saw(self, device: str, sequence: int) -> None:
        self.sequences[device] = max(sequence, self.sequences.get(device, 0))
        self.clients[device]["arrived"] += 0  # so that its row is written

    def turn(self, round_number: int, device: str, old: str, new: str, reason: str, at: float) -> None:
        """One ask's outcome changes."""
        for counter in (self.run, self.rounds[round_number], self.clients[device]):
            if old in OUTCOMES:
                counter[OUTCOMES[old]] -= 1
            if new in OUTCOMES:
                counter[OUTCOMES[new]] += 1
        self.outcomes[device] = (f"{new}: {reason}" if reason else new, at)

    def told_of(self, round_number: int) -> Row:
        """What this transaction sets in a round so far."""
        opened = next((row for row in self.opened if row["round"] == round_number), {})
        return {**opened, **self.of_rounds.get(round_number, {})}

    def write(self) -> None:
        """One statement for the run, one for the clients, one for each set of columns of rounds."""
        if self.run or self.of_run:
            row = {"the_run": self.run_id, **_amounts(self.run, OF_RUNS), **_set(self.of_run)}
            self.connection.execute(_to_run(frozenset(self.of_run)), row)
        self._write_rounds()
        if self.clients:
            self._write_clients()

    def _write_rounds(self) -> None:
        new, old = list[Row](), list[Row]()
        for row in self.opened:
            counter = self.rounds[row["round"]]
            counts = {name: counter.get(name) if name in WIRE else counter[name] for name in EVERYWHERE}
            new.append({"run_id": self.run_id, **row, **self.of_rounds[row["round"]], **counts})
        for number in sorted((self.of_rounds.keys() | self.rounds.keys()) - {row["round"] for row in self.opened}):
            key = {"the_run": self.run_id, "the_round": number}
            old.append({**key, **_amounts(self.rounds[number], EVERYWHERE), **_set(self.of_rounds[number])})
        for rows in alike(new):
            self.connection.execute(_NEW_ROUND, rows)
        for rows in alike(old):
            names = frozenset(name.removeprefix(SET) for name in rows[0] if name.startswith(SET))
            self.connection.execute(_to_round(names), rows)

    def _write_clients(self) -> None:
        if self.new:
            known = set(self.connection.scalars(_DEVICES, {"the_run": self.run_id}))
            if missing := sorted(self.new - known):
                self.connection.execute(_NEW_CLIENT, [{"run_id": self.run_id, "device": name} for name in missing])
        rows = []
        for device, counter in self.clients.items():
            outcome, at = self.outcomes.get(device, (None, None))
            own = {"the_run": self.run_id, "the_device": device, "outcome": outcome, "at": at}
            rows.append({**own, "seen": self.sequences.get(device, 0), **_amounts(counter, OF_CLIENTS)})
        self.connection.execute(_ADD_TO_CLIENT, rows)


def _amounts(counter: Counter[str], names: tuple[str, ...]) -> dict[str, int | None]:
    return {f"add_{name}": counter.get(name) if name in WIRE else counter[name] for name in names}


def _set(values: Row) -> Row:
    return {SET + name: value for name, value in values.items()}


def _setting(table: Any, names: frozenset[str]) -> dict[str, Any]:
    given = {name: bindparam(SET + name, type_=getattr(table, name).type) for name in sorted(names)}
    return {
        name: func.coalesce(getattr(table, name), value) if name in ONCE else value for name, value in given.items()
    }


def _adding(table: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Each column plus its amount; where there is none yet, the amount; where nothing was measured, as it is."""
    amounts = {name: bindparam(f"add_{name}", type_=Whole) for name in names}
    columns = {name: getattr(table, name) for name in names}
    return {
        name: func.coalesce(columns[name] + amount, amount, columns[name]) if name in WIRE else columns[name] + amount
        for name, amount in amounts.items()
    }


_SEEN, _OUTCOME, _AT = (
    bindparam("seen", type_=Whole),
    bindparam("outcome", type_=Words),
    bindparam("at", type_=Double),
)
_DEVICES = select(Client.device).where(Client.run_id == bindparam("the_run"))
_NEW_CLIENT, _NEW_ROUND = insert(Client), insert(Round)
_RUN = update(Run).where(Run.run_id == bindparam("the_run")).values(_adding(Run, OF_RUNS))
_ROUND = (
    update(Round)
    .where(Round.run_id == bindparam("the_run"), Round.round == bindparam("the_round"))
    .values(_adding(Round, EVERYWHERE))
)


@cache
def _to_run(names: frozenset[str]) -> UpdateStatement:
    """Add to a run's sums, and set these columns."""
    return _RUN.values(_setting(Run, names))


@cache
def _to_round(names: frozenset[str]) -> UpdateStatement:
    """Add to a round's sums, and set these columns."""
    return _ROUND.values(_setting(Round, names))


_ADD_TO_CLIENT = (
    update(Client)
    .where(Client.run_id == bindparam("the_run"), Client.device == bindparam("the_device"))
    .values(
        _adding(Client, OF_CLIENTS)
        | {
            "sequence": case((Client.sequence < _SEEN, _SEEN), else_=Client.sequence),
            "last_outcome": func.coalesce(_OUTCOME, Client.last_outcome),
            "last_at": func.coalesce(_AT, Client.last_at),
        }
    )
)


# The rows of asks that one transaction touches: each is read once, and written once with all that changed.


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
