"""The device registry: enrolling, approving, revoking and renaming devices, in the database with a cache in memory.

Invariants: a name has one key, and a key has one name. Enrolling a known device changes nothing, except that an
invitation sets the state of a device that enrolled over loopback or awaits approval. A revoked device stays revoked
until an operator approves it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from sqlalchemy import Connection, func, insert, select, update

from thinwire.core.clock import Clock
from thinwire.core.errors import NotFound, Refused
from thinwire.core.events import ENDED
from thinwire.core.fleet import DeviceRow, DeviceState, Hello, How, Joining
from thinwire.core.formatting import grouped
from thinwire.core.types import require_device_name
from thinwire.store import one_time_secrets
from thinwire.store.audit import WAS, AuditLog, act
from thinwire.store.database import Database
from thinwire.store.kept_runs import change_tags
from thinwire.store.privacy_devices import reported
from thinwire.store.queries import device_row
from thinwire.store.tables import HAS_SAMPLES, Action, Client, Device, InvitationEntry, Measure, Run, Update
from thinwire.store.work_queue import cancel_commands

REGISTRY_READ_S = 1.0  # longest time for which a change by another process may be missing
UNAPPROVED_READ_S = 0.1  # the same for a key that may not work yet: whoever was just approved is not refused


@dataclass(frozen=True)
class _Cache:
    """Holds the database's rows by key fingerprint, as of the change with this number."""

    change: int = 0
    rows: Mapping[str, DeviceRow] = field(default_factory=dict)
    revoked: frozenset[str] = frozenset()


class StoredRoster:
    """The registry `core.fleet.Roster` on the store. Any thread may call it.

    A change by this object counts from the next call on. A change by another process counts within `REGISTRY_READ_S`,
    and an approval within `UNAPPROVED_READ_S`: in that time one request reads the number of the last change, and reads
    the rows only if the number differs. A caller that knows of another process's change calls `refresh`, and then the
    change counts at once. Every change leaves an action with its actor and time.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._clock = database, clock
        self._cache = _Cache()  # replaced as a whole, never modified
        self._audit = AuditLog(database, clock)
        self._reading = threading.Lock()
        self._read_at = -math.inf

    def rows(self) -> Sequence[DeviceRow]:
        """Return all devices, by name."""
        return sorted(self._known().rows.values(), key=lambda row: row.name)

    def revoked(self) -> frozenset[str]:
        """Return the names of the revoked devices, for a run that decides about replies."""
        return self._known().revoked

    def count_known(self) -> int:
        """Return the number of devices that are not revoked."""
        return sum(row.state != "revoked" for row in self._known().rows.values())

    def by_fingerprint(self, fingerprint: str) -> DeviceRow | None:
        """Return the device with this key, or None."""
        row = self._known().rows.get(fingerprint)
        return row if row and row.state == "approved" else self._known(UNAPPROVED_READ_S).rows.get(fingerprint)

    def enrol(self, name: str, fingerprint: str, public_key: bytes, how: How) -> DeviceRow:
        """Bind a name to a key, once; raise `Refused` if either is bound to another. A known device stays unchanged."""
        row = DeviceRow(name, fingerprint, public_key, APPROVED.get(how, "pending"), how, self._clock.wall())
        with self._changing() as connection:
            return enrol(connection, row)

    def join(self, joining: Joining) -> DeviceRow:
        """Enroll a key by an invitation, in one transaction.

        Raise `NotInvited`, or `Refused`, which leaves the invitation unused.
        """
        with self._changing() as connection:
            return join(connection, joining, self._clock.wall())

    def add(self, name: str, public_key: bytes, how: Literal["manual", "stock"], who: str = "operator") -> DeviceRow:
        """Approve a key (DER) that an operator brought.

        Raise `Refused` if the name or the key belongs to another device.
        """
        fingerprint = hashlib.sha256(public_key).hexdigest()
        row = DeviceRow(name, fingerprint, public_key, "approved", how, self._clock.wall())
        with self._changing() as connection:
            return add(connection, row, who)

    def approve(
        self, name: str, who: str = "operator", fingerprint: str = "", *, may_restore: bool = True
    ) -> None:  # fmt: skip
        """Approve a device; raise `NotFound` for an unknown name, `Refused` if the device has another key by now.

        An operator's approval also counts on a device API with TLS: a row enrolled over loopback becomes a manual one.
        `Refused` is raised for a revoked device too, unless `who` `may_restore` it.
        """
        with self._changing() as connection:
            state = connection.scalar(select(Device.c.state).where(Device.c.name == name))
            if state == "revoked" and not may_restore:
                raise Refused(
                    f"{name} was revoked", why="an admin approves a revoked device again",
                    hint=f"an admin, or on the aggregator's machine: thinwire devices approve {name}",
                )  # fmt: skip
            key = self._set(connection, name, "approved", "approve", who, fingerprint)
            by_loopback = update(Device).where(Device.c.name == name, Device.c.how == "loopback")
            connection.execute(by_loopback, {"how": "manual"})
            cancel_commands(connection, "revoke", key, "approved again", self._clock.wall())

    def revoke(self, name: str, who: str = "operator", fingerprint: str = "") -> str:
        """Revoke a device, and return its key's fingerprint; its name and key stay bound. Raises like `approve`.

        This process refuses the device's next request; another process does so within `REGISTRY_READ_S`.
        """
        with self._changing() as connection:
            return self._set(connection, name, "revoked", "revoke", who, fingerprint)

    def leave(self, name: str) -> None:
        """Revoke a device at its own request, before it deletes its key."""
        with self._changing() as connection:
            self._set(connection, name, "revoked", "leave", name)

    def rename(self, old: str, new: str, who: str = "operator") -> None:
        """Rename a device in its row and its history.

        Raise `Refused` while a run that has not ended may still use the old name.
        """
        with self._changing() as connection:
            rename(connection, old, new, who, self._clock.wall())

    def tag(self, name: str, add: Iterable[str], remove: Iterable[str] = (), who: str = "operator") -> list[str]:
        """Add and remove tags of a device, and return all of its tags, sorted; raise `UsageError` for an invalid tag.

        Tags decide nothing: people find devices by them.
        """
        adds, removes = dict.fromkeys(add), dict.fromkeys(remove)
        with self._database.writing() as connection:
            known = connection.scalar(select(Device.c.tags).where(Device.c.name == name))
            if known is None:
                raise unknown(connection, name)
            tags = change_tags(known, adds, removes, name, "thinwire devices tag")
            if tags != known:
                connection.execute(update(Device).where(Device.c.name == name), {"tags": tags})
                more, fewer = sorted({*tags} - {*known}), sorted({*known} - {*tags})
                said = " ".join([*(f"+{tag}" for tag in more), *(f"-{tag}" for tag in fewer)])
                act(connection, self._clock.wall(), who, name, "tag", said)
        return tags

    def seen(self, hello: Hello, at: float) -> None:
        """Store a device's registration message and its time."""
        with self._database.writing() as connection:
            said = asdict(replace(hello, booked_keys=()))  # a forgotten key is not stored again
            row: dict[str, object] = {"hello": said, "seen_at": at}
            if hello.booked:
                row |= reported(connection, hello, at)
            connection.execute(update(Device).where(Device.c.name == hello.name), row)

    def sequences(self, name: str) -> Mapping[str, int]:
        """Return the device's highest journalled sequence for each run that has not ended."""
        going = Run.c.status.not_in(ENDED)
        wanted = select(Client.c.run_id, Client.c.sequence).join(Run, Run.c.run_id == Client.c.run_id)
        with self._database.reading() as connection:
            rows = connection.execute(wanted.where(Client.c.device == name, Client.c.sequence > 0, going)).all()
        return {row.run_id: row.sequence for row in rows}

    def runs(self) -> Mapping[str, str]:
        """Return the identity of each run on devices that has started and not ended."""
        begun = Run.c.status.in_(("running", "waiting", "paused")) | (
            (Run.c.status == "queued") & Run.c.started_at.is_not(None)
        )
        wanted = select(Run.c.run_id, Run.c.identity).where(begun, Run.c.source == "devices")
        with self._database.reading() as connection:
            return {row.run_id: row.identity for row in connection.execute(wanted)}

    def ended(self, runs: Mapping[str, str]) -> tuple[str, ...]:
        """Return those of these runs, given with their identities, that are stored here and are over."""
        over = Run.c.status.in_(ENDED)
        wanted = select(Run.c.run_id, Run.c.identity).where(over, Run.c.run_id.in_(runs), Run.c.source == "devices")
        with self._database.reading() as connection:
            rows = connection.execute(wanted.order_by(Run.c.number)).all()
        return tuple(row.run_id for row in rows if row.identity and row.identity == runs[row.run_id])

    def note(self, kind: str, address: str, why: str, name: str = "") -> None:
        """Store a refusal of the device API for the operator; the last thousand are kept."""
        self._audit.note(kind, address, why, name)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[Connection]:
        """Open a transaction that changes devices."""
        with self._database.writing() as connection:
            yield connection
        self.refresh()

    def refresh(self) -> None:
        """Make every change that is committed by now count from the next call on."""
        with self._reading:  # a look that began before the change has ended
            self._read_at = -math.inf

    def _known(self, within_s: float = REGISTRY_READ_S) -> _Cache:
        """Return the devices as they were at the last look, or look if that is as long ago as `within_s`."""
        if self._clock.now() - self._read_at < within_s:
            return self._cache
        with self._reading:
            now = self._clock.now()
            with self._database.reading() as connection:
                change = int(connection.scalar(CHANGE) or 0)
                if change != self._cache.change:
                    rows = [device_row(row) for row in connection.execute(select(*ROW)).mappings()]
                    revoked = frozenset(row.name for row in rows if row.state == "revoked")
                    self._cache = _Cache(change, {row.fingerprint: row for row in rows}, revoked)
            self._read_at = now
            return self._cache

    def _set(
        self, connection: Connection, name: str, state: DeviceState, what: str, who: str, fingerprint: str = ""
    ) -> str:
        """Set a device's state, and return its key's fingerprint.

        A name can move to another key, so an operator who has compared a key passes its fingerprint.
        """
        change, mine = {"state": state, "change": next_change(connection)}, update(Device).where(Device.c.name == name)
        if fingerprint:
            mine = mine.where(Device.c.fingerprint == fingerprint)
        if connection.execute(mine, change).rowcount == 0:
            if connection.scalar(select(Device.c.name).where(Device.c.name == name)) is not None:
                raise Refused(
                    f"{name} has another key than the one that was shown",
                    why="the name went to another device meanwhile",
                    hint="look at it again, and compare its fingerprint",
                )  # fmt: skip
            raise unknown(connection, name)
        key: str = connection.scalars(select(Device.c.fingerprint).where(Device.c.name == name)).one()
        act(connection, self._clock.wall(), who, name, what, f"key {grouped(key)}" if what == "approve" else "")
        return key


APPROVED: Mapping[How, DeviceState] = {"loopback": "approved", "invitation": "approved"}  # others wait for approval
ROW = tuple(Device.c[name] for name in DeviceRow.__dataclass_fields__)
CHANGES_PER_REMOVAL = 10**6  # without a device, the number of the last change is this times the removals: a new one
_REMOVED = select(func.count()).select_from(Action).where(Action.c.what == "remove").scalar_subquery()
CHANGE = select(func.coalesce(select(func.max(Device.c.change)).scalar_subquery(), CHANGES_PER_REMOVAL * _REMOVED))


def enrol(connection: Connection, row: DeviceRow) -> DeviceRow:
    """Bind a name to a key, once; raise `Refused` if either is bound to another. A known device stays unchanged."""
    require_device_name(row.name)
    if known := _known(connection, row.name, row.fingerprint):
        return known
    _insert(connection, row)
    act(connection, row.created_at, row.name, row.name, "enrol", f"{row.how}, {row.state}")
    return row


def join(connection: Connection, joining: Joining, now: float) -> DeviceRow:
    """Redeem an invitation and return its device's row; the same key with it again gets that row as it is now.

    `NotInvited` is raised first, so that only the holder of a valid invitation learns which names are taken.
    """
    invitation = one_time_secrets.find(connection, joining.secret, joining.fingerprint, now)
    if invitation["used_key"]:
        same = connection.execute(select(*ROW).where(Device.c.fingerprint == joining.fingerprint)).mappings().first()
        if same is None:
            by, number = invitation["used_by"], invitation["id"]
            raise one_time_secrets.refusal(f"used by {by}, which was removed (invitation {number})")
        return device_row(same)
    name = require_device_name(joining.name, "--name NAME", Refused)
    if invitation["name"] not in ("", name):
        raise Refused(
            f"the name {name} does not belong to this invitation", why="it was made for another one",
            hint=f"--name {invitation['name']}",
        )  # fmt: skip
    state: DeviceState = "pending" if invitation["approve_manually"] else "approved"
    row = DeviceRow(name, joining.fingerprint, joining.public_key, state, "invitation", now)
    if known := _known(connection, name, joining.fingerprint):
        if known.state == "revoked":
            raise Refused(
                f"{name} was revoked", why="an invitation does not bring a revoked key back",
                hint=f"on the aggregator: thinwire devices approve {name}",
            )  # fmt: skip
        if known.how == "stock" or (known.how != "loopback" and known.state == "approved"):
            return known
        row = dataclasses.replace(known, state=state, how="invitation")
        values = {"state": state, "how": row.how, "change": next_change(connection)}
        connection.execute(update(Device).where(Device.c.name == name), values)
    else:
        _insert(connection, row)
    one_time_secrets.use_up(connection, invitation["id"], name, joining.fingerprint, now)
    act(connection, now, name, name, "join", f"invitation {invitation['id']}, from {joining.address}, {state}")
    return row


def add(connection: Connection, row: DeviceRow, who: str) -> DeviceRow:
    """Approve a key that an operator brought; a known device is approved too, unless it enrolled in another way."""
    require_device_name(row.name)
    known = _known(connection, row.name, row.fingerprint)
    if known and known.how != row.how:
        raise Refused(
            f"{row.name} is there already", why=f"its key came by {known.how}", hint=f"devices approve {row.name}"
        )
    if known:
        values = {"state": row.state, "change": next_change(connection)}
        connection.execute(update(Device).where(Device.c.name == row.name), values)
        row = dataclasses.replace(known, state=row.state)
    else:
        _insert(connection, row)
    act(connection, row.created_at, who, row.name, "add", f"{row.how}, {row.state}")
    return row


def next_change(connection: Connection) -> int:
    """Return the number of the next change of approval, by which caches notice that they are out of date."""
    return int(connection.scalar(CHANGE) or 0) + 1


def _known(connection: Connection, name: str, fingerprint: str) -> DeviceRow | None:
    """Return the row with both name and key, or None; raise `Refused` for a row with only one of them."""
    either = (Device.c.name == name) | (Device.c.fingerprint == fingerprint)
    for row in [device_row(found) for found in connection.execute(select(*ROW).where(either)).mappings()]:
        if row.name != name:
            raise Refused(f"this key is {row.name}'s", why="a device has one name", hint=f"--name {row.name}")
        if row.fingerprint != fingerprint:
            raise Refused(
                f"the name {name} belongs to another key",
                why="a device is known by the key that it made at its first start",
                hint="use another --name, or bring its state directory back",
            )
        return row
    return None


def unknown(connection: Connection, name: str) -> NotFound:
    """Return the error about a device that is not there."""
    names = ", ".join(connection.scalars(select(Device.c.name).order_by(Device.c.name)))
    return NotFound(f"no device {name!r}", why=f"known: {names or 'none'}", hint="thinwire devices list")


def _insert(connection: Connection, row: DeviceRow) -> None:
    values = {**dataclasses.asdict(row), "change": next_change(connection), "hello": {}}
    connection.execute(insert(Device), values)


def rename(connection: Connection, old: str, new: str, who: str, at: float) -> None:
    """Rename a device in its row and in the read tables of runs on devices; the journal stays unchanged.

    Raise `Refused` while the device takes part in a run that has not ended. Its update ids keep the old name, since
    they were signed and journalled with it. In such a run the aggregator could no longer tell which replies it has. Who
    takes part in a run with Poisson sampling is not shown, so no device is renamed while one goes on.
    """
    require_device_name(new, "ward-3, for instance")
    names = set(connection.scalars(select(Device.c.name)))
    if old not in names:
        raise unknown(connection, old)
    if old == new:
        return
    if new in names:
        raise Refused(
            f"there is a device called {new}",
            why="a name belongs to one key",
            hint=f"another name, or first: thinwire devices rename {new} OTHER",
        )
    going = Run.c.status.not_in(ENDED) & (Run.c.source == "devices")
    mine = (Client.c.run_id == Run.c.run_id) & (Client.c.device == old)
    selected = select(Run.c.run_id).outerjoin(Client, mine).where(going, Client.c.device.is_not(None) | HAS_SAMPLES)
    if run_id := connection.scalar(selected.limit(1)):
        raise Refused(
            f"{old} may take part in {run_id}, which is not over",
            why="its assignments carry this name",
            hint=f"rename it when the run is over, or thinwire runs stop {run_id}",
        )  # fmt: skip
    on_devices = select(Run.c.run_id).where(Run.c.source == "devices").scalar_subquery()
    for table in (Client, Update):
        own = update(table).where(table.c.device == old, table.c.run_id.in_(on_devices))
        connection.execute(own, {"device": new})
    places = update(Update).where(Update.c.instead_of == old, Update.c.run_id.in_(on_devices))
    connection.execute(places, {"instead_of": new})
    connection.execute(update(Measure).where(Measure.c.device == old), {"device": new})
    connection.execute(update(InvitationEntry).where(InvitationEntry.c.used_by == old), {"used_by": new})
    row = {"name": new, "change": next_change(connection)}
    connection.execute(update(Device).where(Device.c.name == old), row)
    act(connection, at, who, new, "rename", f"{WAS}{old}")
