"""Who may reach the door, kept in the database and held in memory between changes."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from sqlalchemy import Connection, func, insert, select, update

from thinwire.core.clock import Clock
from thinwire.core.errors import NotFound, Refused, UsageError
from thinwire.core.fleet import DeviceRow, DeviceState, Hello, How, Joining
from thinwire.core.formatting import grouped
from thinwire.core.types import DEVICE_NAME
from thinwire.store import audit, invitations, operators
from thinwire.store.audit import WAS, act
from thinwire.store.database import Database
from thinwire.store.device_tables import Device, Invitation
from thinwire.store.queries import device_row
from thinwire.store.run_tables import Client, Measure, Run, Update


@dataclass(frozen=True)
class _Cache:
    """What the database held at the change of this number: rows by the fingerprint of their key."""

    change: int = 0
    rows: Mapping[str, DeviceRow] = field(default_factory=dict)
    revoked: frozenset[str] = frozenset()


class StoredRoster:
    """core.fleet.Roster on the store. Any thread may call it.

    A change by any process counts from the next call on: each call reads the number of the last change, one index
    entry, and the rows only when it is a new one. Every change leaves a row that says who made it and when.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._clock = database, clock
        self._cache = _Cache()  # replaced as a whole, never changed

    def rows(self) -> Sequence[DeviceRow]:
        """All devices, by name."""
        return sorted(self._known().rows.values(), key=lambda row: row.name)

    def revoked(self) -> frozenset[str]:
        """The names of those that are shut out."""
        return self._known().revoked

    def by_fingerprint(self, fingerprint: str) -> DeviceRow | None:
        return self._known().rows.get(fingerprint)

    def enrol(self, name: str, fingerprint: str, public_key: bytes, how: How) -> DeviceRow:
        """Bind a name to a key, once; `Refused` when either is bound to another. Who is known stays as it is."""
        row = DeviceRow(name, fingerprint, public_key, AT_ONCE.get(how, "pending"), how, self._clock.wall())
        with self._database.writing() as connection:
            return enrol(connection, row)

    def join(self, joining: Joining) -> DeviceRow:
        """Let a key in for an invitation, in one transaction; `NotInvited`, or `Refused` which uses nothing up."""
        with self._database.writing() as connection:
            return join(connection, joining, self._clock.wall())

    def add(self, name: str, public_key: bytes, how: Literal["manual", "stock"], who: str = "operator") -> DeviceRow:
        """Approve a key (DER) that a person brought; `Refused` when the name or the key is another device's."""
        fingerprint = hashlib.sha256(public_key).hexdigest()
        row = DeviceRow(name, fingerprint, public_key, "approved", how, self._clock.wall())
        with self._database.writing() as connection:
            return add(connection, row, who)

    def approve(self, name: str, who: str = "operator", fingerprint: str = "") -> None:
        """Let a device in; `NotFound` when nobody of that name has come, `Refused` when with another key.

        What a person has approved counts on a door with TLS too: a row that loopback made becomes one made by hand.
        """
        with self._database.writing() as connection:
            self._set(connection, name, "approved", "approve", who, fingerprint)
            by_loopback = update(Device).where(Device.name == name, Device.how == "loopback")
            connection.execute(by_loopback, {"how": "manual"})
            operators.take_back(connection, "revoke", name, "approved again", self._clock.wall())

    def revoke(self, name: str, who: str = "operator", fingerprint: str = "") -> None:
        """Shut a device out, from its next request on; its name and key stay bound. Raises as above."""
        with self._database.writing() as connection:
            self._set(connection, name, "revoked", "revoke", who, fingerprint)

    def leave(self, name: str) -> None:
        """The device shuts itself out; it is going to delete its key."""
        with self._database.writing() as connection:
            self._set(connection, name, "revoked", "leave", name)

    def rename(self, old: str, new: str, who: str = "operator") -> None:
        """Give a device another name, and what it did with it; `Refused` while a run may still hear of the old one."""
        with self._database.writing() as connection:
            rename(connection, old, new, who, self._clock.wall())

    def renames(self) -> int:
        """How often a device was given another name: what was kept by name before may be another's now."""
        return audit.renames(self._database)

    def seen(self, hello: Hello, at: float) -> None:
        """Keep what a device says of itself."""
        with self._database.writing() as connection:
            row = {"hello": asdict(hello), "seen_at": at}
            connection.execute(update(Device).where(Device.name == hello.name), row)

    def sequences(self, name: str) -> Mapping[str, int]:
        """For each run that is not over, the highest sequence that the journal has from this device."""
        going = Run.status.not_in(("done", "failed", "stopped"))
        wanted = select(Client.run_id, Client.sequence).join(Run, Run.run_id == Client.run_id)
        with self._database.reading() as connection:
            rows = connection.execute(wanted.where(Client.device == name, Client.sequence > 0, going)).all()
        return {row.run_id: row.sequence for row in rows}

    def runs(self) -> Mapping[str, str]:
        """Return the identity of each run on devices that has begun and is not over."""
        begun = Run.status.in_(("running", "waiting")) | ((Run.status == "queued") & Run.started_at.is_not(None))
        wanted = select(Run.run_id, Run.identity).where(begun, Run.source == "devices")
        with self._database.reading() as connection:
            return {row.run_id: row.identity for row in connection.execute(wanted)}

    def note(self, kind: str, address: str, why: str, name: str = "") -> None:
        """Keep a refusal of the door for the operator; the newest thousand stay."""
        audit.note(self._database, self._clock.wall(), kind, address, why, name)

    def _known(self) -> _Cache:
        with self._database.reading() as connection:
            change = int(connection.scalar(CHANGE) or 0)
            if change != self._cache.change:
                rows = [device_row(row) for row in connection.execute(select(*ROW)).mappings()]
                revoked = frozenset(row.name for row in rows if row.state == "revoked")
                self._cache = _Cache(change, {row.fingerprint: row for row in rows}, revoked)
            return self._cache

    def _set(
        self, connection: Connection, name: str, state: DeviceState, what: str, who: str, fingerprint: str = ""
    ) -> None:
        """Names move from key to key: a person who has compared one says which."""
        change, mine = {"state": state, "change": next_change(connection)}, update(Device).where(Device.name == name)
        if fingerprint:
            mine = mine.where(Device.fingerprint == fingerprint)
        if connection.execute(mine, change).rowcount == 0:
            names = list(connection.scalars(select(Device.name).order_by(Device.name)))
            if name in names:
                raise Refused(
                    f"{name} has another key by now", why="the name went to another device meanwhile",
                    hint="thinwire devices list",
                )  # fmt: skip
            raise NotFound(
                f"no device {name!r}", why=f"known: {', '.join(names) or 'none'}", hint="thinwire devices list"
            )
        key = connection.scalar(select(Device.fingerprint).where(Device.name == name)) if what == "approve" else None
        audit.act(connection, self._clock.wall(), who, name, what, f"key {grouped(key)}" if key else "")


# How a device gets its row: a name and a key that belong together from then on. All in the caller's transaction.
#
# Laws: a name has one key and a key one name; who is known stays as it is, but that an invitation lifts who came over
# loopback or still waits; nobody who was shut out comes back by itself.


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


# A device gets another name: its row and what is read of its past follow, the journal stays as it was written.


def rename(connection: Connection, old: str, new: str, who: str, at: float) -> None:
    """`old` becomes `new` where runs on devices are read, but not while one that is not over has asked it.

    Its update_ids keep the old name: they are what was signed and journalled. In such a run the aggregator could no
    longer tell which answers it has.
    """
    if not DEVICE_NAME.fullmatch(new):
        raise UsageError(
            f"{new!r} is no name for a device", why="a-z, 0-9 and -, at most 63 of them", hint="ward-3, for instance"
        )
    names = set(connection.scalars(select(Device.name)))
    if old not in names:
        raise NotFound(
            f"no device {old!r}", why=f"known: {', '.join(sorted(names)) or 'none'}", hint="thinwire devices list"
        )
    if old == new:
        return
    if new in names:
        raise Refused(
            f"there is a device called {new}",
            why="a name belongs to one key",
            hint=f"another name, or first: thinwire devices rename {new} OTHER",
        )
    going = Run.status.not_in(("done", "failed", "stopped")) & (Run.source == "devices")
    asked = select(Run.run_id).join(Client, Client.run_id == Run.run_id).where(Client.device == old, going)
    if run_id := connection.scalar(asked.limit(1)):
        raise Refused(
            f"{old} takes part in {run_id}, which is not over", why="its answers carry the name that it was asked by",
            hint=f"rename it when the run is over, or thinwire runs stop {run_id}",
        )  # fmt: skip
    on_devices = select(Run.run_id).where(Run.source == "devices").scalar_subquery()
    for table in (Client, Update):
        mine = update(table).where(table.device == old, table.run_id.in_(on_devices))
        connection.execute(mine, {"device": new})
    places = update(Update).where(Update.instead_of == old, Update.run_id.in_(on_devices))
    connection.execute(places, {"instead_of": new})
    connection.execute(update(Measure).where(Measure.device == old), {"device": new})
    connection.execute(update(Invitation).where(Invitation.used_by == old), {"used_by": new})
    row = {"name": new, "change": next_change(connection)}
    connection.execute(update(Device).where(Device.name == old), row)
    act(connection, at, who, new, "rename", f"{WAS}{old}")
