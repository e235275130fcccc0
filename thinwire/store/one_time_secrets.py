"""Secrets that are used once: an invitation enrolls one device. Login codes are in store/sessions.py.

The database holds only the SHA-256 of secrets. A secret has 128 random bits, so its plain hash reveals nothing about it
and may be looked up by an index.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, RowMapping, insert, select, update

from thinwire.core.clock import Clock
from thinwire.core.errors import NotFound, NotInvited, Refused, UsageError
from thinwire.core.formatting import duration
from thinwire.core.types import require_device_name
from thinwire.store.audit import act
from thinwire.store.database import Database
from thinwire.store.sessions import hashed
from thinwire.store.tables import Device, InvitationEntry

SECRET_BYTES = 16
SECRET = re.compile(r"[0-9a-f]{32}")
DAY_S = 24 * 3600.0
MAX_VALID_S = 366 * DAY_S
MAX_INVITATIONS = 10_000  # at once


InvitationState = Literal["open", "used", "expired", "withdrawn"]


@dataclass(frozen=True)
class Invited:
    """Holds a new invitation with its secret (32 hex digits), known only now. `name` is "" for any free name."""

    id: int
    secret: str
    name: str
    expires_at: float


@dataclass(frozen=True)
class InvitationRow:
    """Holds an invitation in a list; `used_by` is the device that joined with it."""

    id: int
    name: str
    state: InvitationState
    created_at: float
    expires_at: float
    approve_manually: bool
    who: str
    used_by: str
    used_at: float | None


class Invitations:
    """Creates, lists and withdraws invitations; `store/device_registry.py` redeems them."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._clock = database, clock

    def invite(
        self, count: int = 1, names: Sequence[str] = (), expires_s: float = DAY_S, approve_manually: bool = False,
        who: str = "operator",
    ) -> list[Invited]:  # fmt: skip
        """Create `count` invitations for any name, or one for each of `names`; either all of them or none."""
        wanted = list(names) or [""] * count
        _check(wanted, bool(names), expires_s)
        now = self._clock.wall()
        row = {"created_at": now, "expires_at": now + expires_s, "approve_manually": approve_manually, "who": who}
        made: list[Invited] = []
        with self._database.writing() as connection:
            taken = sorted(set(connection.scalars(select(Device.c.name))) & set(names))
            if taken:
                raise Refused(
                    f"there is a device called {taken[0]}", why="an invitation for a taken name could never be used",
                    hint=f"another name, or thinwire devices rename {taken[0]} OTHER first",
                )  # fmt: skip
            for name in wanted:
                secret = secrets.token_hex(SECRET_BYTES)
                values = {**row, "name": name, "secret_hash": hashed(secret), "used_by": "", "used_key": ""}
                number = connection.scalar(insert(InvitationEntry).values(values).returning(InvitationEntry.c.id))
                made.append(Invited(int(number or 0), secret, name, now + expires_s))
            by_hand = ", to be approved by hand" if approve_manually else ""
            act(connection, now, who, "", "invite", f"{_numbers(made)}, for {duration(expires_s)}{by_hand}")
        return made

    def all(self) -> list[InvitationRow]:
        """Return all invitations with their states, oldest first."""
        now, shown = self._clock.wall(), [n for n in InvitationRow.__dataclass_fields__ if n != "state"]
        with self._database.reading() as connection:
            found = connection.execute(select(*InvitationEntry.c).order_by(InvitationEntry.c.id)).mappings()
            return [InvitationRow(**{n: row[n] for n in shown}, state=state(row, now)) for row in found]

    def withdraw(self, invitation_id: int, who: str = "operator") -> None:
        """Withdraw an invitation; raise `Refused` if it was used, `NotFound` if no invitation has this number."""
        now = self._clock.wall()
        with self._database.writing() as connection:
            mine = InvitationEntry.c.id == invitation_id
            row = connection.execute(select(*InvitationEntry.c).where(mine)).mappings().first()
            if row is None:
                why, hint = "none has this number", "thinwire devices invite --list"
                raise NotFound(f"no invitation {invitation_id}", why=why, hint=hint)
            if row["used_at"] is not None:
                raise Refused(
                    f"invitation {invitation_id} was used by {row['used_by']}",
                    why="a used invitation stays used", hint=f"thinwire devices revoke {row['used_by']}",
                )  # fmt: skip
            if row["withdrawn_at"] is None:
                connection.execute(update(InvitationEntry).where(mine), {"withdrawn_at": now})
                act(connection, now, who, "", "withdraw", f"invitation {invitation_id}")


def find(connection: Connection, secret: str, fingerprint: str, now: float) -> RowMapping:
    """Return the invitation of a secret if it is open or was used by this very key; otherwise raise `NotInvited`."""
    mine = InvitationEntry.c.secret_hash == hashed(secret)
    found = connection.execute(select(*InvitationEntry.c).where(mine)).mappings().first()
    if found is None or not SECRET.fullmatch(secret):
        raise refusal("unknown")
    now_is = state(found, now)
    if now_is == "open" or (now_is == "used" and found["used_key"] == fingerprint):
        return found
    by = f" by {found['used_by']}" if now_is == "used" else ""
    raise refusal(f"{now_is}{by} (invitation {found['id']})")


def use_up(connection: Connection, invitation_id: int, name: str, fingerprint: str, now: float) -> None:
    """Mark an invitation as used by this key; from now on it is valid for no other key."""
    values = {"used_by": name, "used_key": fingerprint, "used_at": now}
    connection.execute(update(InvitationEntry).where(InvitationEntry.c.id == invitation_id), values)


def state(row: Mapping[str, Any] | RowMapping, now: float) -> InvitationState:
    """Return an invitation's state; a used one stays used after its expiry."""
    if row["used_at"] is not None:
        return "used"
    if row["withdrawn_at"] is not None:
        return "withdrawn"
    return "expired" if now >= row["expires_at"] else "open"


def refusal(why: str) -> NotInvited:
    """Return the error about an invitation by which nobody joins."""
    return NotInvited("this invitation is not usable", why, "get a new one from the aggregator's operator")


def _check(wanted: Sequence[str], named: bool, expires_s: float) -> None:
    if not 0 < len(wanted) <= MAX_INVITATIONS:
        many = f"{len(wanted)} invitations" if wanted else "no invitation at all"
        raise UsageError(f"{many} is no valid count", why=f"from 1 to {MAX_INVITATIONS} at once", hint="--count 20")
    if not 0 < expires_s <= MAX_VALID_S:
        why = "more than 0 s, at most 366 days"
        raise UsageError(f"an invitation is not valid for {expires_s:g} s", why=why, hint="--expires 24h")
    for name in wanted if named else ():
        require_device_name(name, "one name a line, as ward-3")
        if wanted.count(name) > 1:
            why = "a name belongs to one device"
            raise UsageError(f"the name {name} stands there twice", why=why, hint="leave one of them out")


def _numbers(made: Sequence[Invited]) -> str:
    return f"invitation {made[0].id}" if len(made) == 1 else f"invitations {made[0].id} to {made[-1].id}"
