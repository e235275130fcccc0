"""Commands of operators, and logins of the dashboard.

The dashboard and the command line write commands as rows, and the aggregator's service executes them. A login code
opens one session, once; the database holds only the SHA-256 of codes and tokens.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from thinwire.core.clock import Clock
from thinwire.core.errors import NotFound
from thinwire.store.database import Database
from thinwire.store.device_tables import Command, Login, Session
from thinwire.store.read_models import Order

_ORDER = select(Command.id, Command.kind, Command.run_id, Command.args, Command.who, Command.at)


def order(database: Database, kind: str, run_id: str, args: Mapping[str, Any], who: str, at: float) -> int:
    """Add a command, and return its number."""
    row = {"kind": kind, "run_id": run_id, "args": dict(args), "who": who, "at": at}
    with database.writing() as connection:
        return int(connection.execute(insert(Command).values(row).returning(Command.id)).scalar_one())


def pending(database: Database) -> list[Order]:
    """Return the commands without a result, oldest first."""
    with database.reading() as connection:
        rows = connection.execute(_ORDER.where(Command.answered_at.is_(None)).order_by(Command.id)).mappings()
        return [Order(**row) for row in rows]


def answer(database: Database, order_id: int, result: Mapping[str, Any], at: float) -> None:
    """Store a command's result. The first result stays, so a command that was executed twice has one result."""
    first = update(Command).where(Command.id == order_id, Command.answered_at.is_(None))
    with database.writing() as connection:
        if connection.execute(first, {"result": dict(result), "answered_at": at}).rowcount == 0:
            _must_be(connection.scalar(select(Command.id).where(Command.id == order_id)), order_id)


def result(database: Database, order_id: int) -> dict[str, Any] | None:
    """Return a command's result, or None while it is pending; raise `NotFound` for an unknown number."""
    with database.reading() as connection:
        found = connection.execute(select(Command.id, Command.result).where(Command.id == order_id)).first()
    _must_be(found, order_id)
    return None if found is None else found.result


def take_back(connection: Connection, kind: str, device: str, why: str, at: float) -> None:
    """Answer the pending commands of a kind about a device as no longer needed."""
    open_ones = select(Command.id, Command.args).where(Command.kind == kind, Command.answered_at.is_(None))
    for row in connection.execute(open_ones).all():
        if row.args.get("device") == device:
            answered = {"result": {"done": False, "why": why}, "answered_at": at}
            connection.execute(update(Command).where(Command.id == row.id), answered)


def _must_be(found: object, order_id: int) -> None:
    if found is None:
        raise NotFound(f"no order {order_id}")


LETTERS = "ABCDEFGHJKMNPQRSTVWXYZ23456789"  # no letter that looks like another one
CODE_LETTERS = 16  # 78 bits: cannot be guessed from its hash while it is valid
SESSION_S = 7 * 24 * 3600.0


class Logins:
    """Creates login codes, and opens and ends sessions."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._clock = database, clock

    def new_code(self, valid_s: float) -> str:
        """Return a new code in groups of four letters; expired codes are deleted."""
        code = "".join(secrets.choice(LETTERS) for _ in range(CODE_LETTERS))
        now = self._clock.wall()
        with self._database.writing() as connection:
            connection.execute(delete(Login).where(Login.expires_at <= now))
            connection.execute(insert(Login), {"code_hash": _hash(code), "expires_at": now + valid_s})
        return "-".join(code[i : i + 4] for i in range(0, CODE_LETTERS, 4))

    def redeem(self, code: str) -> str | None:
        """Return a session's token for a valid and unused code, or None. A wrong code only reads the database."""
        given, now = _hash(code.replace("-", "").replace(" ", "").upper()), self._clock.wall()
        with self._database.reading() as connection:
            if not _is_live(connection, given, now):
                return None
        token = secrets.token_urlsafe(32)
        with self._database.writing() as connection:
            if not _is_live(connection, given, now):  # another request was first
                return None
            connection.execute(update(Login).where(Login.code_hash == given), {"used_at": now})
            connection.execute(delete(Session).where(Session.expires_at <= now))
            row = {"token_hash": _hash(token), "created_at": now, "expires_at": now + SESSION_S}
            connection.execute(insert(Session), row)
        return token

    def valid(self, token: str) -> bool:
        """Return True if a session with this token is open."""
        wanted = select(Session.expires_at).where(Session.token_hash == _hash(token))
        with self._database.reading() as connection:
            expires_at = connection.scalar(wanted)
        return expires_at is not None and expires_at > self._clock.wall()

    def end(self, token: str) -> None:
        """End the session with this token."""
        with self._database.writing() as connection:
            connection.execute(delete(Session).where(Session.token_hash == _hash(token)))


def _is_live(connection: Connection, given: str, now: float) -> bool:
    live = connection.scalars(select(Login.code_hash).where(Login.expires_at > now, Login.used_at.is_(None)))
    return any(hmac.compare_digest(kept, given) for kept in live)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()
