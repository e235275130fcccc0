"""The dashboard's users: their roles and passwords.

Invariant: whatever changes what a user may do (role, password, disabled) ends all sessions of the user in the same
transaction, and is in the audit log.

A check of a password takes one thread and 32 MiB for about 0.1 s by intention. It costs the same if there is no such
user, so that its time does not tell who exists. At most two checks run at a time in a process, so that a flood of
logins cannot use the whole machine. Argon2: Biryukov, Dinu, Khovratovich, EuroS&P 2016; RFC 9106.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Connection, insert, select, update

from thinwire.core.clock import Clock
from thinwire.core.errors import NotFound, Refused, UsageError
from thinwire.store.audit import act
from thinwire.store.database import Database
from thinwire.store.sessions import MACHINE, ROLES, USER_LETTERS, Token, confirm_session, end_sessions, open_session
from thinwire.store.sessions import User as Row

if TYPE_CHECKING:
    from pwdlib import PasswordHash


MIN_PASSWORD_LETTERS: Final = 12
MAX_PASSWORD_LETTERS: Final = 256
AT_ONCE: Final = 2
PASSES: Final = 3
MEMORY_KIB: Final = 32 * 1024
_turns = threading.BoundedSemaphore(AT_ONCE)


def require_password(password: str, name: str) -> str:
    """Return a password; raise `UsageError` if it is too short, too long, or holds little but the user's name."""
    hint = "some words that nobody else puts together"
    if not MIN_PASSWORD_LETTERS <= len(password) <= MAX_PASSWORD_LETTERS:
        raise UsageError(
            f"a password has {MIN_PASSWORD_LETTERS} to {MAX_PASSWORD_LETTERS} characters",
            f"this one has {len(password)}",
            hint,
        )
    if len(set(password)) < 4 or password.lower().replace(name.lower(), "").strip("0123456789") == "":
        raise UsageError("this password is easy to guess", "it repeats a few characters, or the name", hint)
    return password


def hash_password(password: str) -> str:
    """Return the argon2id hash of a password, with its salt and parameters."""
    with _turns:
        return _hasher().hash(_bytes(password))


def matches(password: str, kept: str | None) -> bool:
    """Return True if `kept` is the hash of this password; None, of an unknown user, costs the same and is False."""
    with _turns:
        found: bool = _hasher().verify(
            _bytes(password[:MAX_PASSWORD_LETTERS]), kept if kept is not None else _of_nobody()
        )
    return found and kept is not None


def _bytes(password: str) -> bytes:
    return password.encode("utf-8", "surrogatepass")


@cache
def _hasher() -> PasswordHash:
    """Return the hasher; it is imported here, because most commands open the store and check no password."""
    from pwdlib import PasswordHash
    from pwdlib.hashers.argon2 import Argon2Hasher

    return PasswordHash((Argon2Hasher(PASSES, MEMORY_KIB, parallelism=1),))


@cache
def _of_nobody() -> str:
    """Return a hash with the same parameters, to which the checks of unknown users are compared."""
    return _hasher().hash("nobody has this password")


NAME = re.compile(rf"[a-z0-9][a-z0-9._-]{{0,{USER_LETTERS - 1}}}")
REFUSAL_NOTE_S = 60.0  # between two rows of refused logins of one user
RESERVED = (MACHINE, "operator", "dashboard", "aggregator")  # actors in the audit log that are no users


@dataclass(frozen=True)
class UserRow:
    """Holds a user in a list."""

    name: str
    role: str
    created_at: float
    who: str
    password_at: float
    login_at: float | None
    disabled_at: float | None


class Users:
    """Adds, lists and changes users, and logs them in."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._clock = database, clock
        self._refused: dict[str, float] = {}  # when a refused login of this user was last recorded

    def add(self, name: str, role: str, password: str, who: str) -> None:
        """Add a user; raise like `require_new`."""
        self.require_new(name, role)
        kept, now = hash_password(require_password(password, name)), self._clock.wall()
        row = {"name": name, "role": role, "password_hash": kept, "created_at": now, "who": who, "password_at": now}
        with self._database.writing() as connection:
            if connection.scalar(select(Row.c.name).where(Row.c.name == name)) is not None:
                raise _is_taken(name)
            connection.execute(insert(Row), row)
            act(connection, now, who, "", "add user", f"{name}, {role}")

    def require_new(self, name: str, role: str) -> None:
        """Raise `UsageError` for an invalid name or role, `Refused` if a user has this name, disabled or not."""
        require_role(role)
        if not NAME.fullmatch(name) or name in RESERVED:
            why = f"a name has 1 to {USER_LETTERS} of a-z, 0-9, '.', '_' and '-'; {', '.join(RESERVED)} are no users"
            raise UsageError(f"{name[:80]!r} is no name for a user", why, "anna, for instance")
        if any(row.name == name for row in self.all()):
            raise _is_taken(name)

    def all(self) -> list[UserRow]:
        """Return all users by name."""
        columns = (Row.c[name] for name in UserRow.__dataclass_fields__)
        with self._database.reading() as connection:
            return [UserRow(**row) for row in connection.execute(select(*columns).order_by(Row.c.name)).mappings()]

    def require(self, name: str) -> None:
        """Raise `NotFound` if there is no user of this name."""
        if all(row.name != name for row in self.all()):
            raise _no_user(name)

    def has_admin(self) -> bool:
        """Return True if an admin may log in."""
        with self._database.reading() as connection:
            return _has_admin(connection)

    def set_password(self, name: str, password: str, who: str) -> None:
        """Set the password of a user, who may have lost it to another: the user's tokens are revoked too."""
        kept, now = hash_password(require_password(password, name)), self._clock.wall()
        values = {"password_hash": kept, "password_at": now}
        self._change(name, values, who, "reset password", name, tokens_too=True)

    def change_password(self, name: str, old: str, new: str) -> str | None:
        """Change the user's own password and return the token of a new session; None if `old` is wrong.

        The user's tokens stay.
        """
        require_password(new, name)
        if (row := self._checked(name, old)) is None:
            return None
        values, now = {"password_hash": hash_password(new), "password_at": self._clock.wall()}, self._clock.wall()
        of = Row.c
        same = update(Row).where(of.name == name, of.password_hash == row.password_hash, of.disabled_at.is_(None))
        with self._database.writing() as connection:
            if connection.execute(same, values).rowcount == 0 or (role := role_now(connection, name)) is None:
                return None  # an admin reset it, or disabled the user, while this check ran
            end_sessions(connection, name)
            act(connection, now, name, "", "change password", name)
            return open_session(connection, name, role, now)

    def set_role(self, name: str, role: str, who: str) -> None:
        """Set the role of a user."""
        self._change(name, {"role": require_role(role)}, who, "change role", f"{name}, {role}")

    def disable(self, name: str, who: str) -> None:
        """Disable a user, who can then not log in, and whose tokens are revoked: they stay so."""
        self._change(name, {"disabled_at": self._clock.wall()}, who, "disable user", name, tokens_too=True)

    def enable(self, name: str, who: str) -> None:
        """Enable a disabled user."""
        self._change(name, {"disabled_at": None}, who, "enable user", name)

    def log_out(self, name: str, who: str) -> None:
        """End all sessions of a user, also those by code of `machine`; raise `NotFound` if there is no such user."""
        if name != MACHINE:
            self.require(name)
        with self._database.writing() as connection:
            end_sessions(connection, name)
            act(connection, self._clock.wall(), who, "", "log out user", name)

    def log_in(self, name: str, password: str) -> str | None:
        """Return the token of a new session; None if there is no such user, or if the password is wrong.

        Neither the result nor its time tells which of the two it is.
        """
        row = self._checked(name, password)
        if row is None:
            return None
        now = self._clock.wall()
        with self._database.writing() as connection:
            same = connection.execute(_OF.where(Row.c.name == row.name)).first()
            if same is None or same.disabled_at is not None or same.password_hash != row.password_hash:
                return None  # it was changed while this check ran
            connection.execute(update(Row).where(Row.c.name == row.name), {"login_at": now})
            act(connection, now, row.name, "", "log in")
            return open_session(connection, row.name, same.role, now)

    def note_refused(self, name: str) -> None:
        """Record a refused login, at most each minute for a user; all names that are no user count as one.

        What was typed as an unknown name is not kept, because it may be a password.
        """
        now = self._clock.wall()
        with self._database.reading() as connection:
            known = name if role_now(connection, name) is not None else "a name of no user"
        if now - self._refused.get(known, -math.inf) >= REFUSAL_NOTE_S:
            self._refused[known] = now
            with self._database.writing() as connection:
                act(connection, now, "dashboard", "", "refuse login", known)

    def confirm(self, token: str, name: str, password: str) -> bool:
        """Note that the user of the session `token` gave the password again; return False if it is wrong."""
        if self._checked(name, password) is None:
            return False
        with self._database.writing() as connection:
            return confirm_session(connection, token, self._clock.wall())

    def _checked(self, name: str, password: str) -> Any:
        """Return the row of an enabled user with this password, or None; it always checks one hash."""
        row = None
        if NAME.fullmatch(name):
            with self._database.reading() as connection:
                row = connection.execute(_OF.where(Row.c.name == name)).first()
        found = matches(password, None if row is None else row.password_hash)
        return row if found and row is not None and row.disabled_at is None else None

    def _change(
        self, name: str, values: Mapping[str, Any], who: str, what: str, detail: str, tokens_too: bool = False
    ) -> None:  # fmt: skip
        """Change a user and end the user's sessions; raise `NotFound` if there is none, `Refused` for the last admin.

        With `tokens_too` it revokes the user's tokens. A dashboard that other machines reach does not start without an
        admin.
        """
        with self._database.writing() as connection:
            had_admin = _has_admin(connection)
            mine = update(Row).where(Row.c.name == name)
            if not NAME.fullmatch(name) or connection.execute(mine, dict(values)).rowcount == 0:
                raise _no_user(name)
            if had_admin and not _has_admin(connection):
                raise Refused(
                    f"{name} is the last admin", "the dashboard is not opened to other machines without one",
                    f"another admin first, or a new password: thinwire aggregator users reset {name}",
                )  # fmt: skip
            end_sessions(connection, name)
            now = self._clock.wall()
            if tokens_too:
                mine = update(Token).where(Token.c.user == name, Token.c.revoked_at.is_(None))
                connection.execute(mine, {"revoked_at": now})
            act(connection, now, who, "", what, detail)


_OF = select(Row.c.name, Row.c.role, Row.c.password_hash, Row.c.disabled_at)


def _no_user(name: str) -> NotFound:
    return NotFound(f"no user {name[:80]!r}", "nobody was added by this name", "thinwire aggregator users list")


def _has_admin(connection: Connection) -> bool:
    found = select(Row.c.name).where(Row.c.role == "admin", Row.c.disabled_at.is_(None)).limit(1)
    return connection.scalar(found) is not None


def role_now(connection: Connection, name: str) -> str | None:
    """Return what a user may do at this moment; None for an unknown or disabled one. `machine` is an admin."""
    if name == MACHINE:
        return "admin"
    found = connection.execute(_OF.where(Row.c.name == name)).first()
    return None if found is None or found.disabled_at is not None else str(found.role)


def _is_taken(name: str) -> Refused:
    return Refused(
        f"there is a user {name}", "a name belongs to one person, as the audit log has it",
        f"another name, or thinwire aggregator users reset {name}",
    )  # fmt: skip


def require_role(role: str) -> str:
    """Return a role; raise `UsageError` if there is none of this name."""
    if role not in ROLES:
        raise UsageError(f"{role[:80]!r} is no role", f"a user is one of {', '.join(ROLES)}", "viewer")
    return role
