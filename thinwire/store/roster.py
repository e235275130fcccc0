"""Who may reach the door, kept in the database and held in memory between changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from sqlalchemy import Connection, func, insert, select, update

from thinwire.core.clock import Clock
from thinwire.core.errors import NotFound, Refused, UsageError
from thinwire.core.fleet import DeviceRow, DeviceState, Hello, How
from thinwire.core.types import DEVICE_NAME
from thinwire.store.database import Database
from thinwire.store.repository import device_row
from thinwire.store.tables import Client, Device, Run

AT_ONCE: Mapping[How, DeviceState] = {"loopback": "approved", "invitation": "approved"}  # others wait for a person
_CHANGE = select(func.coalesce(func.max(Device.change), 0))


class StoredRoster:
    """core.fleet.Roster on the store. Any thread may call it.

    A change by any process counts from the next call on: each call reads the number of the last change, one index
    entry, and the rows only when it is a new one.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._clock = database, clock
        self._cache: tuple[int, Mapping[str, DeviceRow]] = (0, {})  # replaced as a whole, never changed

    def rows(self) -> Sequence[DeviceRow]:
        """All devices, by name."""
        return sorted(self._known().values(), key=lambda row: row.name)

    def by_fingerprint(self, fingerprint: str) -> DeviceRow | None:
        return self._known().get(fingerprint)

    def enrol(self, name: str, fingerprint: str, public_key: bytes, how: How) -> DeviceRow:
        """Bind a name to a key, once; `Refused` when either is bound to another. Who is known stays as it is."""
        if not DEVICE_NAME.fullmatch(name):
            raise UsageError(f"{name!r} is no name for a device", why="a-z, 0-9 and -, at most 63 of them")
        with self._database.writing() as connection:
            either = (Device.name == name) | (Device.fingerprint == fingerprint)
            known = [device_row(row) for row in connection.execute(select(*_ROW).where(either)).mappings()]
            for row in known:
                if row.name != name:
                    raise Refused(f"this key is {row.name}'s", why="a device has one name", hint=f"--name {row.name}")
                if row.fingerprint != fingerprint:
                    raise Refused(
                        f"the name {name} belongs to another key",
                        why="a device is known by the key that it made at its first start",
                        hint="use another --name, or bring its state folder back",
                    )
                return row
            row = DeviceRow(name, fingerprint, public_key, AT_ONCE.get(how, "pending"), how, self._clock.wall())
            change = _next_change(connection)
            connection.execute(insert(Device), {**dataclasses.asdict(row), "change": change, "hello": {}})
            return row

    def approve(self, name: str) -> None:
        """Let a device in; `NotFound` when nobody of that name has come."""
        self._set(name, "approved")

    def revoke(self, name: str) -> None:
        """Shut a device out, from its next request on; its name and key stay bound."""
        self._set(name, "revoked")

    def seen(self, hello: Hello, at: float) -> None:
        """Keep what a device says of itself."""
        with self._database.writing() as connection:
            row = {"hello": dataclasses.asdict(hello), "seen_at": at}
            connection.execute(update(Device).where(Device.name == hello.name), row)

    def sequences(self, name: str) -> Mapping[str, int]:
        """For each run that is not over, the highest sequence that the journal has from this device."""
        going = Run.status.not_in(("done", "failed", "stopped"))
        wanted = select(Client.run_id, Client.sequence).join(Run, Run.run_id == Client.run_id)
        with self._database.reading() as connection:
            rows = connection.execute(wanted.where(Client.device == name, Client.sequence > 0, going)).all()
        return {row.run_id: row.sequence for row in rows}

    def _known(self) -> Mapping[str, DeviceRow]:
        with self._database.reading() as connection:
            change = int(connection.scalar(_CHANGE) or 0)
            if change != self._cache[0]:
                rows = [device_row(row) for row in connection.execute(select(*_ROW)).mappings()]
                self._cache = (change, {row.fingerprint: row for row in rows})
            return self._cache[1]

    def _set(self, name: str, state: DeviceState) -> None:
        with self._database.writing() as connection:
            change = {"state": state, "change": _next_change(connection)}
            if connection.execute(update(Device).where(Device.name == name), change).rowcount == 0:
                names = list(connection.scalars(select(Device.name).order_by(Device.name)))
                raise NotFound(f"no device {name!r}", why=f"known: {', '.join(names) or 'none'}")


_ROW = tuple(getattr(Device, name) for name in DeviceRow.__dataclass_fields__)


def _next_change(connection: Connection) -> int:
    return int(connection.scalar(_CHANGE) or 0) + 1
