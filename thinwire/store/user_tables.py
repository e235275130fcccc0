"""The tables of the dashboard's users, of their sessions and tokens, and of the one-time codes that log in.

The database holds only hashes: of passwords argon2id, of codes, sessions and tokens SHA-256, because those are random
and too long to be guessed.
"""

from __future__ import annotations

from sqlalchemy import String, Text
from sqlalchemy.orm import Mapped, mapped_column

from thinwire.store.database import Base, Counter, Words

USER_LETTERS = 32  # of a user's name at most


class User(Base):
    """Holds a user of the dashboard, with the role that says what the user may do."""

    __tablename__ = "users"

    name: Mapped[str] = mapped_column(String(USER_LETTERS), primary_key=True)
    role: Mapped[str] = mapped_column(String(16))
    password_hash: Mapped[str] = mapped_column(Text)
    created_at: Mapped[float]
    who: Mapped[str]  # added this user
    password_at: Mapped[float]  # when the password was set
    login_at: Mapped[float | None]  # last login
    disabled_at: Mapped[float | None]


class Token(Base):
    """Holds a secret with which a program uses the API in the name of a user, until it expires or is revoked.

    `run_id` is "" or the one run that the token may read. The token may do at most what its user may do now.
    """

    __tablename__ = "tokens"

    id: Mapped[int] = mapped_column(Counter, primary_key=True)
    name: Mapped[str] = mapped_column(Words(63))
    user: Mapped[str] = mapped_column(String(USER_LETTERS), index=True)
    secret_hash: Mapped[str] = mapped_column(String(64), unique=True)
    role: Mapped[str] = mapped_column(String(16))
    run_id: Mapped[str] = mapped_column(String(80), default="")
    created_at: Mapped[float]
    expires_at: Mapped[float]
    used_at: Mapped[float | None]  # last use, to a minute
    revoked_at: Mapped[float | None]


class Login(Base):
    """Holds a code that opens one session of the dashboard, once."""

    __tablename__ = "logins"

    code_hash: Mapped[str] = mapped_column(String(64), primary_key=True)
    expires_at: Mapped[float]
    used_at: Mapped[float | None]


class Session(Base):
    """Holds an open session of the dashboard.

    `confirmed_at` is when its user last gave the password, or a one-time code. Invariant: `role` is the user's, because
    a change of the role, as of the password, deletes the user's sessions.
    """

    __tablename__ = "sessions"

    token_hash: Mapped[str] = mapped_column(String(64), primary_key=True)
    user: Mapped[str] = mapped_column(String(USER_LETTERS), index=True)
    role: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[float]
    expires_at: Mapped[float]
    confirmed_at: Mapped[float]
