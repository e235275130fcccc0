"""Who may reach the door, kept in the database and held in memory between changes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from sqlalchemy import Connection, select, update

from thinwire.core.clock import Clock
from thinwire.core.errors import NotFound, Refused
from thinwire.core.fleet import DeviceRow, DeviceState, Hello, How, Joining
from thinwire.core.texts import grouped
from thinwire.store import admission, audit, commands, renaming
from thinwire.store.access import Device
from thinwire.store.admission import AT_ONCE, CHANGE, ROW, next_change
from thinwire.store.database import Database
from thinwire.store.repository import device_row
from thinwire.store.tables import Client, Run


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
            return admission.enrol(connection, row)

    def join(self, joining: Joining) -> DeviceRow:
        """Let a key in for an invitation, in one transaction; `NotInvited`, or `Refused` which uses nothing up."""
        with self._database.writing() as connection:
            return admission.join(connection, joining, self._clock.wall())

    def add(self, name: str, public_key: bytes, how: Literal["manual", "stock"], who: str = "operator") -> DeviceRow:
        """Approve a key (DER) that a person brought; `Refused` when the name or the key is another device's."""
        fingerprint = hashlib.sha256(public_key).hexdigest()
        row = DeviceRow(name, fingerprint, public_key, "approved", how, self._clock.wall())
        with self._database.writing() as connection:
            return admission.add(connection, row, who)

    def approve(self, name: str, who: str = "operator", fingerprint: str = "") -> None:
        """Let a device in; `NotFound` when nobody of that name has come, `Refused` when with another key.

        What a person has approved counts on a door with TLS too: a row that loopback made becomes one made by hand.
        """
        with self._database.writing() as connection:
            self._set(connection, name, "approved", "approve", who, fingerprint)
            by_loopback = update(Device).where(Device.name == name, Device.how == "loopback")
            connection.execute(by_loopback, {"how": "manual"})
            commands.take_back(connection, "revoke", name, "approved again", self._clock.wall())

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
            renaming.rename(connection, old, new, who, self._clock.wall())

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
