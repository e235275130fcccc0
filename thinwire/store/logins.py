"""Logins of the dashboard: a login code opens one session, once.

The database holds only the SHA-256 of codes and tokens.
"""

from __future__ import annotations

import hmac
import secrets

from sqlalchemy import Connection, delete, insert, select, update

from thinwire.core.clock import Clock
from thinwire.store.database import Database
from thinwire.store.device_tables import Login, Session
from thinwire.store.invitations import hashed

LETTERS = "ABCDEFGHJKMNPQRSTVWXYZ23456789"  # no letter that looks like another one
CODE_LETTERS = 16  # 78 bits: cannot be guessed from its hash while it is valid
SESSION_S = 7 * 24 * 3600.0


class Logins:
    """Creates login codes, and opens and ends sessions."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._clock = database, clock

    def new_code(self, valid_s: float = 600) -> str:
        """Return a new code in groups of four letters; expired codes are deleted."""
        code = "".join(secrets.choice(LETTERS) for _ in range(CODE_LETTERS))
        now = self._clock.wall()
        with self._database.writing() as connection:
            connection.execute(delete(Login).where(Login.expires_at <= now))
            connection.execute(insert(Login), {"code_hash": hashed(code), "expires_at": now + valid_s})
        return "-".join(code[i : i + 4] for i in range(0, CODE_LETTERS, 4))

    def redeem(self, code: str) -> str | None:
        """Return a session's token for a valid and unused code, or None. A wrong code only reads the database."""
        given, now = hashed(code.replace("-", "").replace(" ", "").upper()), self._clock.wall()
        with self._database.reading() as connection:
            if not _is_live(connection, given, now):
                return None
        token = secrets.token_urlsafe(32)
        with self._database.writing() as connection:
            if not _is_live(connection, given, now):  # another request was first
                return None
            connection.execute(update(Login).where(Login.code_hash == given), {"used_at": now})
            connection.execute(delete(Session).where(Session.expires_at <= now))
            row = {"token_hash": hashed(token), "created_at": now, "expires_at": now + SESSION_S}
            connection.execute(insert(Session), row)
        return token

    def valid(self, token: str) -> bool:
        """Return True if a session with this token is open."""
        wanted = select(Session.expires_at).where(Session.token_hash == hashed(token))
        with self._database.reading() as connection:
            expires_at = connection.scalar(wanted)
        return expires_at is not None and expires_at > self._clock.wall()

    def end(self, token: str) -> None:
        """End the session with this token."""
        with self._database.writing() as connection:
            connection.execute(delete(Session).where(Session.token_hash == hashed(token)))


def _is_live(connection: Connection, given: str, now: float) -> bool:
    live = connection.scalars(select(Login.code_hash).where(Login.expires_at > now, Login.used_at.is_(None)))
    return any(hmac.compare_digest(kept, given) for kept in live)
