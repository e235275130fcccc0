"""What is kept of devices and people: who may reach us and by what, who did what to whom, and what was ordered."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from thinwire.store.database import Base, Counter, Words


class Device(Base):
    """Who may reach us. `change` counts all changes of approval: its maximum tells a cache that it is old."""

    __tablename__ = "devices"

    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(64), unique=True)
    public_key: Mapped[bytes] = mapped_column(LargeBinary)
    state: Mapped[str] = mapped_column(String(16))
    how: Mapped[str] = mapped_column(String(16))
    created_at: Mapped[float]
    change: Mapped[int] = mapped_column(index=True)
    online: Mapped[bool] = mapped_column(default=False)
    seen_at: Mapped[float | None]  # since when it is there, or was
    heard_at: Mapped[float | None]  # of one that is not online: when it was last heard of, where that is known
    hello: Mapped[dict[str, Any]] = mapped_column(default=dict)


class Invitation(Base):
    """A secret that lets one key in, once; only its SHA-256 is here. `name`: the one that it is good for, "" any."""

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
    """Who did what to a device's row, and when: only ever added to."""

    __tablename__ = "device_actions"

    id: Mapped[int] = mapped_column(Counter, primary_key=True)
    at: Mapped[float]
    who: Mapped[str]
    device: Mapped[str] = mapped_column(index=True)
    what: Mapped[str] = mapped_column(String(16))
    detail: Mapped[str] = mapped_column(default="")


class Note(Base):
    """What the door refused, with the reason that it did not say outside; the newest thousand."""

    __tablename__ = "door_notes"

    id: Mapped[int] = mapped_column(Counter, primary_key=True)
    at: Mapped[float]
    kind: Mapped[str] = mapped_column(Words(40))
    address: Mapped[str] = mapped_column(Words(100))
    name: Mapped[str] = mapped_column(Words(63), default="")
    why: Mapped[str] = mapped_column(Words(500))


class Command(Base):
    """What a person ordered and what came of it: the queue and the audit log in one."""

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
    """A code that opens one session, once."""

    __tablename__ = "logins"

    code_hash: Mapped[str] = mapped_column(String(64), primary_key=True)
    expires_at: Mapped[float]
    used_at: Mapped[float | None]


class Session(Base):
    __tablename__ = "sessions"

    token_hash: Mapped[str] = mapped_column(String(64), primary_key=True)
    created_at: Mapped[float]
    expires_at: Mapped[float]
