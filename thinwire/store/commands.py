"""Orders of people as rows: the page and the command line write them, the aggregator's service carries them out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, insert, select, update

from thinwire.core.errors import NotFound
from thinwire.store.access import Command
from thinwire.store.access_rows import Order
from thinwire.store.database import Database

_ORDER = select(Command.id, Command.kind, Command.run_id, Command.args, Command.who, Command.at)


def order(database: Database, kind: str, run_id: str, args: Mapping[str, Any], who: str, at: float) -> int:
    """Leave an order; its number."""
    row = {"kind": kind, "run_id": run_id, "args": dict(args), "who": who, "at": at}
    with database.writing() as connection:
        return int(connection.execute(insert(Command).values(row).returning(Command.id)).scalar_one())


def pending(database: Database) -> list[Order]:
    """Orders without an answer, oldest first."""
    with database.reading() as connection:
        rows = connection.execute(_ORDER.where(Command.answered_at.is_(None)).order_by(Command.id)).mappings()
        return [Order(**row) for row in rows]


def answer(database: Database, order_id: int, result: Mapping[str, Any], at: float) -> None:
    """Say what came of an order. The first answer stays: an order carried out twice was carried out once."""
    first = update(Command).where(Command.id == order_id, Command.answered_at.is_(None))
    with database.writing() as connection:
        if connection.execute(first, {"result": dict(result), "answered_at": at}).rowcount == 0:
            _must_be(connection.scalar(select(Command.id).where(Command.id == order_id)), order_id)


def result(database: Database, order_id: int) -> dict[str, Any] | None:
    """What came of an order, or None while nobody has answered."""
    with database.reading() as connection:
        found = connection.execute(select(Command.id, Command.result).where(Command.id == order_id)).first()
    _must_be(found, order_id)
    return None if found is None else found.result


def take_back(connection: Connection, kind: str, device: str, why: str, at: float) -> None:
    """Answer what was ordered about a device and nobody has carried out yet: it is not wanted any more."""
    open_ones = select(Command.id, Command.args).where(Command.kind == kind, Command.answered_at.is_(None))
    for row in connection.execute(open_ones).all():
        if row.args.get("device") == device:
            answered = {"result": {"done": False, "why": why}, "answered_at": at}
            connection.execute(update(Command).where(Command.id == row.id), answered)


def _must_be(found: object, order_id: int) -> None:
    if found is None:
        raise NotFound(f"no order {order_id}")
