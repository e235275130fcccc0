"""What one transaction sets in its run and rounds, and adds to their and its clients' counts and bytes.

It is written once, at the transaction's end: a statement costs more than the row that it changes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from sqlalchemy import Connection, Double, Update, bindparam, case, func, insert, select, update

from thinwire.store.columns import Whole, Words
from thinwire.store.tables import Client, Round, Run
from thinwire.store.touched import Row, alike

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
def _to_run(names: frozenset[str]) -> Update:
    """Add to a run's sums, and set these columns."""
    return _RUN.values(_setting(Run, names))


@cache
def _to_round(names: frozenset[str]) -> Update:
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
