"""Tokens of the dashboard's API: secrets with which programs act in the name of a user.

A token has 256 random bits, so its plain SHA-256 reveals nothing about it and may be looked up by an index. It may do
at most what its user may do at that moment; a token for one run only reads that run.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from sqlalchemy import Connection, delete, func, insert, or_, select, update

from thinwire.core.clock import Clock
from thinwire.core.errors import NotFound, Refused, UsageError
from thinwire.core.formatting import duration
from thinwire.store.audit import act
from thinwire.store.database import Database
from thinwire.store.sessions import ROLES, Person, hashed
from thinwire.store.sessions import Token as Row
from thinwire.store.users import require_role, role_now

PREFIX = "tw_"  # programs that look for leaked secrets find it by this
SECRET_BYTES = 32
MAX_VALID_S = 366 * 24 * 3600.0
LAST_USE_WRITE_S = 60.0  # between two writes of the last use
NAME_LETTERS = 63
MAX_TOKENS = 50  # valid tokens of a user
KEPT_AFTER_END_S = 30 * 24 * 3600.0  # until a token that was revoked or has expired is deleted


@dataclass(frozen=True)
class TokenRow:
    """Holds a token in a list; `run_id` is "" or the one run that it reads."""

    id: int
    name: str
    user: str
    role: str
    run_id: str
    created_at: float
    expires_at: float
    used_at: float | None


@dataclass(frozen=True)
class NewToken:
    """Holds a new token with its secret, which is known only now."""

    row: TokenRow
    secret: str


class Tokens:
    """Makes, lists, checks and revokes tokens."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._clock = database, clock

    def make(self, name: str, user: str, role: str, run_id: str = "", expires_s: float = 30 * 24 * 3600.0,
             who: str = "") -> NewToken:  # fmt: skip
        """Make a token; raise `Refused` if it could do more than its user, `UsageError` if a value is not valid."""
        _check(name, role, run_id, expires_s)
        secret, now = PREFIX + secrets.token_urlsafe(SECRET_BYTES), self._clock.wall()
        row = {"name": name, "user": user, "role": role, "run_id": run_id, "created_at": now}
        row |= {"expires_at": now + expires_s, "used_at": None}
        with self._database.writing() as connection:
            own = role_now(connection, user)
            if own is None:
                why = "nobody was added by this name, or the user is disabled"
                raise NotFound(f"no user {user[:80]!r} who may log in", why, "thinwire aggregator users list")
            if ROLES.index(role) > ROLES.index(own):
                raise Refused(
                    f"a token of {user} does not get the role {role}", f"{user} is {own}, and a token may do no more",
                    f"a token with the role {own}",
                )  # fmt: skip
            made = insert(Row).values(row | {"secret_hash": hashed(secret)}).returning(Row.c.id)
            self._make_room(connection, user, now)
            number = int(connection.scalar(made) or 0)
            only = f", reads {run_id} only" if run_id else ""
            said = f"token {number} of {user}, {role}{only}, for {duration(expires_s)}"
            act(connection, now, who or user, "", "add token", said)
        return NewToken(TokenRow(id=number, **row), secret)  # type: ignore[arg-type]  # as the columns have it

    def _make_room(self, connection: Connection, user: str, now: float) -> None:
        """Delete what ended long ago; raise `Refused` if the user has `MAX_TOKENS` tokens that are valid.

        The newest row stays, so that no number is given again: the audit log names tokens by it.
        """
        ended, newest = now - KEPT_AFTER_END_S, select(func.max(Row.c.id)).scalar_subquery()
        old = or_(Row.c.revoked_at < ended, Row.c.expires_at < ended)
        connection.execute(delete(Row).where(old, Row.c.id < newest))
        valid = select(func.count()).where(Row.c.user == user, Row.c.revoked_at.is_(None), Row.c.expires_at > now)
        if int(connection.scalar(valid) or 0) >= MAX_TOKENS:
            raise Refused(f"{user} has {MAX_TOKENS} tokens", "a user gets no more that are valid", "revoke one of them")

    def all(self, user: str | None = None) -> list[TokenRow]:
        """Return the tokens that are not revoked, also expired ones: of a user, or of all."""
        columns = (Row.c[name] for name in TokenRow.__dataclass_fields__)
        wanted = select(*columns).where(Row.c.revoked_at.is_(None)).order_by(Row.c.id)
        if user is not None:
            wanted = wanted.where(Row.c.user == user)
        with self._database.reading() as connection:
            return [TokenRow(**row) for row in connection.execute(wanted).mappings()]

    def revoke(self, number: int, who: str, user: str | None = None) -> None:
        """Revoke a token at once: of a user, or of anybody; raise `NotFound` if there is none of this number."""
        mine = update(Row).where(Row.c.id == number, Row.c.revoked_at.is_(None))
        if user is not None:
            mine = mine.where(Row.c.user == user)
        now = self._clock.wall()
        with self._database.writing() as connection:
            if connection.execute(mine, {"revoked_at": now}).rowcount == 0:
                why = "none has this number, or it is revoked, or another user's"
                raise NotFound(f"no token {number}", why=why, hint="thinwire aggregator tokens list")
            act(connection, now, who, "", "revoke token", f"token {number}")

    def person(self, secret: str) -> Person | None:
        """Return whose token this is and what it may do; None if it is unknown, expired or revoked."""
        if not secret.startswith(PREFIX):
            return None
        now = self._clock.wall()
        mine = Row.c.secret_hash == hashed(secret)
        columns = (Row.c.id, Row.c.user, Row.c.role, Row.c.run_id, Row.c.used_at)
        with self._database.reading() as connection:
            wanted = select(*columns).where(mine, Row.c.revoked_at.is_(None), Row.c.expires_at > now)
            if (found := connection.execute(wanted).first()) is None:
                return None
            own = role_now(connection, found.user)
        if own is None:
            return None
        if found.used_at is None or now - found.used_at >= LAST_USE_WRITE_S:
            with self._database.writing() as connection:
                connection.execute(update(Row).where(mine), {"used_at": now})
        role = min(found.role, own, key=ROLES.index)
        return Person(found.user, role, token=found.id, run_id=found.run_id)


def _check(name: str, role: str, run_id: str, expires_s: float) -> None:
    if not 0 < len(name) <= NAME_LETTERS or not name.isprintable():
        raise UsageError(
            f"{name[:80]!r} is no name for a token", f"it has 1 to {NAME_LETTERS} characters that can be printed",
            "what it is for: nightly-report",
        )  # fmt: skip
    require_role(role)
    if run_id and role != ROLES[0]:
        raise UsageError(f"a token for {run_id} is not {role}", "it only reads this run", f"the role {ROLES[0]}")
    if not 0 < expires_s <= MAX_VALID_S:
        raise UsageError(f"a token is not valid for {expires_s:g} s", "more than 0 s, at most 366 days", "30d")
