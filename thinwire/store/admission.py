"""How a device gets its row: a name and a key that belong together from then on. All in the caller's transaction.

Laws: a name has one key and a key one name; who is known stays as it is, but that an invitation lifts who came over
loopback or still waits; nobody who was shut out comes back by itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from sqlalchemy import Connection, func, insert, select, update

from thinwire.core.errors import Refused, UsageError
from thinwire.core.fleet import DeviceRow, DeviceState, How, Joining
from thinwire.core.types import DEVICE_NAME
from thinwire.store import invitations
from thinwire.store.access import Device
from thinwire.store.audit import act
from thinwire.store.repository import device_row

AT_ONCE: Mapping[How, DeviceState] = {"loopback": "approved", "invitation": "approved"}  # others wait for a person
ROW = tuple(getattr(Device, name) for name in DeviceRow.__dataclass_fields__)
CHANGE = select(func.coalesce(func.max(Device.change), 0))


def enrol(connection: Connection, row: DeviceRow) -> DeviceRow:
    """Bind a name to a key, once; `Refused` when either is bound to another. Who is known stays as it is."""
    if not DEVICE_NAME.fullmatch(row.name):
        raise UsageError(
            f"{row.name!r} is no name for a device", why="a-z, 0-9 and -, at most 63 of them", hint="--name ward-3"
        )
    if known := _known(connection, row.name, row.fingerprint):
        return known
    _insert(connection, row)
    act(connection, row.created_at, row.name, row.name, "enrol", f"{row.how}, {row.state}")
    return row


def join(connection: Connection, joining: Joining, now: float) -> DeviceRow:
    """Use an invitation up and give the row that it made; the same key with it again gets that row as it is now.

    `NotInvited` comes first: without a good invitation nobody learns which names are taken.
    """
    invitation = invitations.find(connection, joining.secret, joining.fingerprint, now)
    if invitation["used_key"]:
        same = connection.execute(select(*ROW).where(Device.fingerprint == joining.fingerprint)).mappings().one()
        return device_row(same)
    name = joining.name
    if not DEVICE_NAME.fullmatch(name):
        raise Refused(
            f"{name[:80]!r} is no name for a device", why="a-z, 0-9 and -, at most 63 of them", hint="--name NAME"
        )
    if invitation["name"] not in ("", name):
        raise Refused(
            f"the name {name} cannot be had with this invitation", why="it was made for another one",
            hint=f"--name {invitation['name']}",
        )  # fmt: skip
    state: DeviceState = "pending" if invitation["approve_manually"] else "approved"
    row = DeviceRow(name, joining.fingerprint, joining.public_key, state, "invitation", now)
    if known := _known(connection, name, joining.fingerprint):
        if known.state == "revoked":
            raise Refused(
                f"{name} was shut out", why="an invitation does not bring a revoked key back",
                hint=f"on the aggregator: thinwire devices approve {name}",
            )  # fmt: skip
        if known.how == "stock" or (known.how != "loopback" and known.state == "approved"):
            return known
        row = dataclasses.replace(known, state=state, how="invitation")
        values = {"state": state, "how": row.how, "change": next_change(connection)}
        connection.execute(update(Device).where(Device.name == name), values)
    else:
        _insert(connection, row)
    invitations.use_up(connection, invitation["id"], name, joining.fingerprint, now)
    act(connection, now, name, name, "join", f"invitation {invitation['id']}, from {joining.address}, {state}")
    return row


def add(connection: Connection, row: DeviceRow, who: str) -> DeviceRow:
    """A key that a person brought and approves by that; a known one is approved, unless it is of another kind."""
    if not DEVICE_NAME.fullmatch(row.name):
        raise UsageError(
            f"{row.name!r} is no name for a device", why="a-z, 0-9 and -, at most 63 of them", hint="--name ward-3"
        )
    known = _known(connection, row.name, row.fingerprint)
    if known and known.how != row.how:
        raise Refused(
            f"{row.name} is there already", why=f"its key came by {known.how}", hint=f"devices approve {row.name}"
        )
    if known:
        values = {"state": row.state, "change": next_change(connection)}
        connection.execute(update(Device).where(Device.name == row.name), values)
        row = dataclasses.replace(known, state=row.state)
    else:
        _insert(connection, row)
    act(connection, row.created_at, who, row.name, "add", f"{row.how}, {row.state}")
    return row


def next_change(connection: Connection) -> int:
    """The number of a change of approval: caches read it to know that they are old."""
    return int(connection.scalar(CHANGE) or 0) + 1


def _known(connection: Connection, name: str, fingerprint: str) -> DeviceRow | None:
    """The row that has both; `Refused` when a row has only one of them."""
    either = (Device.name == name) | (Device.fingerprint == fingerprint)
    for row in [device_row(found) for found in connection.execute(select(*ROW).where(either)).mappings()]:
        if row.name != name:
            raise Refused(f"this key is {row.name}'s", why="a device has one name", hint=f"--name {row.name}")
        if row.fingerprint != fingerprint:
            raise Refused(
                f"the name {name} belongs to another key",
                why="a device is known by the key that it made at its first start",
                hint="use another --name, or bring its state folder back",
            )
        return row
    return None


def _insert(connection: Connection, row: DeviceRow) -> None:
    values = {**dataclasses.asdict(row), "change": next_change(connection), "hello": {}}
    connection.execute(insert(Device), values)
