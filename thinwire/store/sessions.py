"""Identify who uses the dashboard: sessions, the one-time codes that open one, and the roles of users.

A code is printed by a command on the aggregator's machine. Who can type it there reads and writes the state directory
anyway, so its session is that of the user `machine`, an admin. Nobody is ever locked out.

The tables of users, sessions, tokens and codes hold only hashes: of passwords argon2id, of codes, sessions and tokens
SHA-256, because those are random and too long to be guessed.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import Final, Literal, get_args

from sqlalchemy import Connection, Double, String, Table, Text, delete, insert, select, update

from thinwire.core.clock import Clock
from thinwire.store.audit import act
from thinwire.store.database import METADATA, BoundedText, Counter, Database, needed, optional

USER_LETTERS = 32  # of a user's name at most


# A user of the dashboard, with the role that says what the user may do.
User = Table(
    "users",
    METADATA,
    needed("name", String(USER_LETTERS), primary_key=True),
    needed("role", String(16)),
    needed("password_hash", Text),
    needed("created_at", Double),
    needed("who", BoundedText),  # added this user
    needed("password_at", Double),  # when the password was set
    optional("login_at", Double),  # last login
    optional("disabled_at", Double),
)


# A secret with which a program uses the API in the name of a user, until it expires or is revoked.
#
# `run_id` is "" or the one run that the token may read. The token may do at most what its user may do now.
Token = Table(
    "tokens",
    METADATA,
    needed("id", Counter, primary_key=True),
    needed("name", BoundedText(63)),
    needed("user", String(USER_LETTERS), index=True),
    needed("secret_hash", String(64), unique=True),
    needed("role", String(16)),
    needed("run_id", String(80), default=""),
    needed("created_at", Double),
    needed("expires_at", Double),
    optional("used_at", Double),  # last use, to a minute
    optional("revoked_at", Double),
)


# A code that opens one session of the dashboard, once.
Login = Table(
    "logins",
    METADATA,
    needed("code_hash", String(64), primary_key=True),
    needed("expires_at", Double),
    optional("used_at", Double),
)


# An open session of the dashboard.
#
# `confirmed_at` is when its user last gave the password, or a one-time code. Invariant: `role` is the user's, because
# a change of the role, as of the password, deletes the user's sessions.
Session = Table(
    "sessions",
    METADATA,
    needed("token_hash", String(64), primary_key=True),
    needed("user", String(USER_LETTERS), index=True),
    needed("role", String(16)),
    needed("created_at", Double),
    needed("expires_at", Double),
    needed("confirmed_at", Double),
)


Role = Literal["viewer", "operator", "admin"]  # each may do all that those before it may
ROLES: Final[tuple[Role, ...]] = get_args(Role)
MACHINE: Final = "machine"  # the user of a session that began with a code
LETTERS = "ABCDEFGHJKMNPQRSTVWXYZ23456789"  # no letter that looks like another one
CODE_LETTERS = 16  # 78 bits: cannot be guessed from its hash while it is valid
SESSION_S = 7 * 24 * 3600


@dataclass(frozen=True)
class Person:
    """Holds who sent a request: a user with a session, or a program with the token of a user.

    `confirmed_at` is when the user last gave the password or a code; 0 for a token. `run_id` is the one run that a
    token may read; "" for all.
    """

    user: str
    role: str
    confirmed_at: float = 0.0
    token: int = 0
    run_id: str = ""

    @property
    def who(self) -> str:
        """Return the actor for the audit log."""
        return f"{self.user}, token {self.token}" if self.token else self.user


class Logins:
    """Creates login codes, and opens and ends sessions."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._clock = database, clock

    def new_code(self, valid_s: float = 600) -> str:
        """Return a new code in groups of four letters; expired codes are deleted."""
        code = "".join(secrets.choice(LETTERS) for _ in range(CODE_LETTERS))
        now = self._clock.wall()
        with self._database.writing() as connection:
            connection.execute(delete(Login).where(Login.c.expires_at <= now))
            connection.execute(insert(Login), {"code_hash": hashed(code), "expires_at": now + valid_s})
        return "-".join(code[i : i + 4] for i in range(0, CODE_LETTERS, 4))

    def redeem(self, code: str) -> str | None:
        """Return the token of a session of `machine` for a valid and unused code, or None.

        A wrong code only reads the database.
        """
        now = self._clock.wall()
        if not self._might_be_live(code, now):
            return None
        with self._database.writing() as connection:
            if not _use(connection, code, now):
                return None
            act(connection, now, MACHINE, "", "log in", "by a code")
            return open_session(connection, MACHINE, "admin", now)

    def confirm(self, token: str, code: str) -> bool:
        """Note that who has the session `token` gave a fresh code; return False if the code is not valid."""
        now = self._clock.wall()
        if not self._might_be_live(code, now):
            return False
        with self._database.writing() as connection:
            return _use(connection, code, now) and confirm_session(connection, token, now)

    def _might_be_live(self, code: str, now: float) -> bool:
        with self._database.reading() as connection:
            return _is_live(connection, _given(code), now)

    def person(self, token: str) -> Person | None:
        """Return who has the session with this token; None if there is none, or if it has expired."""
        wanted = select(Session.c.user, Session.c.role, Session.c.confirmed_at, Session.c.expires_at)
        with self._database.reading() as connection:
            found = connection.execute(wanted.where(Session.c.token_hash == hashed(token))).first()
        if found is None or found.expires_at <= self._clock.wall():
            return None
        return Person(found.user, found.role, found.confirmed_at)

    def valid(self, token: str) -> bool:
        """Return True if a session with this token is open."""
        return self.person(token) is not None

    def end(self, token: str) -> None:
        """End the session with this token."""
        with self._database.writing() as connection:
            connection.execute(delete(Session).where(Session.c.token_hash == hashed(token)))


def open_session(connection: Connection, user: str, role: str, now: float) -> str:
    """Open a session with a new token and return the token; sessions that have expired are deleted."""
    token = secrets.token_urlsafe(32)
    connection.execute(delete(Session).where(Session.c.expires_at <= now))
    row = {"token_hash": hashed(token), "user": user, "role": role, "created_at": now, "confirmed_at": now}
    connection.execute(insert(Session), row | {"expires_at": now + SESSION_S})
    return token


def confirm_session(connection: Connection, token: str, now: float) -> bool:
    """Note that the user of a session gave the password, or a code, again; return False if there is no session."""
    mine = update(Session).where(Session.c.token_hash == hashed(token), Session.c.expires_at > now)
    return connection.execute(mine, {"confirmed_at": now}).rowcount == 1


def end_sessions(connection: Connection, user: str) -> None:
    """End all sessions of a user, in the transaction that changes what the user may do."""
    connection.execute(delete(Session).where(Session.c.user == user))


def hashed(secret: str) -> str:
    """Return the SHA-256 of a random secret in hex."""
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


def _given(code: str) -> str:
    return hashed(code.replace("-", "").replace(" ", "").upper())


def _use(connection: Connection, code: str, now: float) -> bool:
    """Mark a code as used; return False if it is not valid, or if another request was first."""
    given = _given(code)
    if not _is_live(connection, given, now):
        return False
    connection.execute(update(Login).where(Login.c.code_hash == given), {"used_at": now})
    return True


def _is_live(connection: Connection, given: str, now: float) -> bool:
    live = connection.scalars(select(Login.c.code_hash).where(Login.c.expires_at > now, Login.c.used_at.is_(None)))
    return any(hmac.compare_digest(kept, given) for kept in live)
