"""Tables of devices and users: enrolled devices, invitations, the audit log, refusals, commands and logins."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from thinwire.store.database import Base, Counter, Words


class Device(Base):
    """An enrolled device.

    `change` numbers all changes of approval: its maximum tells a cache that it is out of date.
    """

    __tablename__ = "devices"

    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(64), unique=True)
    public_key: Mapped[bytes] = mapped_column(LargeBinary)
    state: Mapped[str] = mapped_column(String(16))
    how: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[float]
    change: Mapped[int] = mapped_column(index=True)
    online: Mapped[bool] = mapped_column(default=False)
    seen_at: Mapped[float | None]  # start of the current or last connection
    last_seen_at: Mapped[float | None]  # last contact of an offline device; null if unknown
    hello: Mapped[dict[str, Any]] = mapped_column(default=dict)


class Invitation(Base):
    """A secret with which one key may enroll, once.

    The table holds only the SHA-256 of the secret. `name` is the device name for which it is valid, "" for any.
    """

    __tablename__ = "invitations"

    id: Mapped[int] = mapped_column(Counter, primary_key=True)
    secret_hash: Mapped[str] = mapped_column(String(64), unique=True)
    name: Mapped[str] = mapped_column(String(63), default="")
    approve_manually: Mapped[bool]
    who: Mapped[str]
    created_at: Mapped[float]
    expires_at: Mapped[float]
    used_by: Mapped[str] = mapped_column(String(63), default="")
    used_key: Mapped[str] = mapped_column(String(64), default="")  # fingerprint
    used_at: Mapped[float | None]
    withdrawn_at: Mapped[float | None]


class Action(Base):
    """The audit log: an action on a device's row, its actor and its time. Rows are only added."""

    __tablename__ = "device_actions"

    id: Mapped[int] = mapped_column(Counter, primary_key=True)
    at: Mapped[float]
    who: Mapped[str]
    device: Mapped[str] = mapped_column(index=True)
    what: Mapped[str] = mapped_column(String(16))
    detail: Mapped[str] = mapped_column(default="")


class Note(Base):
    """A refusal of the device API with its reason, which the reply did not contain; the last thousand are kept."""

    __tablename__ = "refusal_notes"

    id: Mapped[int] = mapped_column(Counter, primary_key=True)
    at: Mapped[float]
    kind: Mapped[str] = mapped_column(Words(40))
    address: Mapped[str] = mapped_column(Words(100))
    name: Mapped[str] = mapped_column(Words(63), default="")
    why: Mapped[str] = mapped_column(Words(500))


class Command(Base):
    """A user's command and its result: command queue and audit log in one."""

    __tablename__ = "commands"

    id: Mapped[int] = mapped_column(Counter, primary_key=True)
    kind: Mapped[str] = mapped_column(String(40))
    run_id: Mapped[str] = mapped_column(default="")
    args: Mapped[dict[str, Any]] = mapped_column(default=dict)
    who: Mapped[str] = mapped_column(default="")
    at: Mapped[float]
    answered_at: Mapped[float | None] = mapped_column(index=True)
    result: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))


class Login(Base):
    """A code that opens one session of the dashboard, once."""

    __tablename__ = "logins"

    code_hash: Mapped[str] = mapped_column(String(64), primary_key=True)
    expires_at: Mapped[float]
    used_at: Mapped[float | None]


class Session(Base):
    """An open session of the dashboard."""

    __tablename__ = "sessions"

    token_hash: Mapped[str] = mapped_column(String(64), primary_key=True)
    created_at: Mapped[float]
    expires_at: Mapped[float]
