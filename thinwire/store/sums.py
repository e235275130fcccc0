"""What one transaction adds to the counts and bytes of its run, rounds and clients, written once at its end."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Double, bindparam, case, func, insert, select, update

from thinwire.store.columns import Whole, Words
from thinwire.store.tables import Client, Round, Run

TRAFFIC = ("payload_up", "payload_down", "wire_up", "wire_down")
OUTCOMES = {"folded": "folded_count", "late": "late", "dropped": "dropped", "failed": "failed"}
EVERYWHERE = (*TRAFFIC, *OUTCOMES.values())
OF_RUNS = (*EVERYWHERE, "dense_up", "dense_down", "rounds_closed")
OF_CLIENTS = (*EVERYWHERE, "asked", "arrived")
WIRE = ("wire_up", "wire_down")  # None until there was a wire


@dataclass
class Sums:
    """Increments; a name of WIRE that is not in a Counter was not measured."""

    connection: Connection
    run_id: str
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
        self.clients[device]["asked"] += 1
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

    def write(self) -> None:
        """Add everything to the tables, one statement for each of them."""
        if self.run:
            self.connection.execute(_ADD_TO_RUN, {"the_run": self.run_id, **_amounts(self.run, OF_RUNS)})
        if self.rounds:
            rows = [{"the_run": self.run_id, "the_round": n, **_amounts(c, EVERYWHERE)} for n, c in self.rounds.items()]
            self.connection.execute(_ADD_TO_ROUND, rows)
        if self.clients:
            self._write_clients()

    def _write_clients(self) -> None:
        if self.new:
            known = set(self.connection.scalars(select(Client.device).where(Client.run_id == self.run_id)))
            if missing := sorted(self.new - known):
                self.connection.execute(insert(Client), [{"run_id": self.run_id, "device": name} for name in missing])
        rows = []
        for device, counter in self.clients.items():
            outcome, at = self.outcomes.get(device, (None, None))
            own = {"the_run": self.run_id, "the_device": device, "outcome": outcome, "at": at}
            rows.append({**own, "seen": self.sequences.get(device, 0), **_amounts(counter, OF_CLIENTS)})
        self.connection.execute(_ADD_TO_CLIENT, rows)


def _amounts(counter: Counter[str], names: tuple[str, ...]) -> dict[str, int | None]:
    return {f"add_{name}": counter.get(name) if name in WIRE else counter[name] for name in names}


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
_ADD_TO_RUN = update(Run).where(Run.run_id == bindparam("the_run")).values(_adding(Run, OF_RUNS))
_ADD_TO_ROUND = (
    update(Round)
    .where(Round.run_id == bindparam("the_run"), Round.round == bindparam("the_round"))
    .values(_adding(Round, EVERYWHERE))
)
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
