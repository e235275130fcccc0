"""The audit log: actions on devices, users and tokens, downloads of models, commands about runs, and refusals of the
device API.

Rows are only added and read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sqlalchemy import Connection, delete, func, insert, literal, select, union_all

from thinwire.core.clock import Clock
from thinwire.store.database import Database
from thinwire.store.tables import Action, Command, Note

NOTES = 1000  # kept at most: a year of refused requests must not fill the disk
WAS = "was "  # before the old name, in the detail of a rename


@dataclass(frozen=True)
class DeviceAction:
    """Holds an action on a device's row: enrol, join, add, approve, revoke, leave, rename; or invite and withdraw."""

    at: float
    who: str
    device: str
    what: str
    detail: str


@dataclass(frozen=True)
class AuditRow:
    """Holds an action on a device, a user or a token, or a command about a run.

    `about` is the device or the run; actions on users and tokens have them in `detail`.
    """

    at: float
    who: str
    what: str
    about: str
    detail: str


@dataclass(frozen=True)
class RefusalNote:
    """Holds a refusal of the device API.

    `name` is the name in the request, which proves nothing. Only the operator may see `why`.
    """

    at: float
    kind: str
    address: str
    name: str
    why: str


def act(connection: Connection, at: float, who: str, device: str, what: str, detail: str = "") -> None:
    """Record an action, in the transaction that makes the change."""
    connection.execute(insert(Action), {"at": at, "who": who, "device": device, "what": what, "detail": detail})


def by_todays_name(newest_first: Iterable[DeviceAction]) -> Iterator[tuple[str | None, DeviceAction]]:
    """Yield each action with the current name of its device, or None if no device has that name now.

    Read backwards in time, a name belongs to the device that was renamed to it until that rename, and to another device
    before it.
    """
    today: dict[str, str | None] = {}
    for one in newest_first:
        yield today.get(one.device, one.device), one
        if one.what == "rename":
            today[one.detail.removeprefix(WAS)] = today.get(one.device, one.device)
            today[one.device] = None


class AuditLog:
    """Holds the record of actions on devices, and of refusals of the device API."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database, self._clock = database, clock

    def actions(self, device: str | None = None, limit: int = 100) -> list[DeviceAction]:
        """Return actions with actor and time, latest first: on all devices, or on one.

        Actions on a device under its earlier names are among them.
        """
        columns = (Action.c[name] for name in DeviceAction.__dataclass_fields__)
        wanted = select(*columns).order_by(Action.c.id.desc())
        with self._database.reading() as connection:
            if device is None:
                return [DeviceAction(**row) for row in connection.execute(wanted.limit(limit)).mappings()]
            renames = Action.c.what == "rename"
            names = {device}
            for row in connection.execute(
                select(Action.c.device, Action.c.detail).where(renames).order_by(Action.c.id.desc())
            ):
                if row.device in names:
                    names.add(row.detail.removeprefix(WAS))
            found = [
                DeviceAction(**row)
                for row in connection.execute(wanted.where(Action.c.device.in_(names) | renames)).mappings()
            ]
        return [one for today, one in by_todays_name(found) if today == device][:limit]

    def add(self, who: str, what: str, detail: str) -> None:
        """Record an action that changes nothing in the store, such as a download."""
        with self._database.writing() as connection:
            act(connection, self._clock.wall(), who, "", what, detail)

    def rows(self, first: int = 0, count: int = 100) -> tuple[int, list[AuditRow]]:
        """Return how many actions and commands there are, and `count` of them from number `first` on, latest first.

        The command to revoke a device is left out, because the action is there, and so are holdout evaluations.
        """
        of = Action.c
        actions = select(of.at, of.who, of.what, of.device.label("about"), of.detail, of.id.label("number"))
        empty, number = literal("").label("detail"), Command.c.id.label("number")
        commands = select(
            Command.c.at, Command.c.who, Command.c.kind.label("what"), Command.c.run_id.label("about"), empty, number
        )
        both = union_all(actions, commands.where(Command.c.kind.not_in(("revoke", "evaluated")))).subquery()
        order = (both.c.at.desc(), both.c.number.desc())
        wanted = select(*(both.c[name] for name in AuditRow.__dataclass_fields__)).order_by(*order)
        with self._database.reading() as connection:
            total = int(connection.scalar(select(func.count()).select_from(both)) or 0)
            found = connection.execute(wanted.offset(first).limit(count)).mappings()
            return total, [AuditRow(**row) for row in found]

    def note(self, kind: str, address: str, why: str, name: str) -> None:
        """Record a refusal; the oldest one is deleted if there are too many."""
        row = {"at": self._clock.wall(), "kind": kind, "address": address, "why": why, "name": name}
        oldest = select(Note.c.id).order_by(Note.c.id.desc()).offset(NOTES - 1).limit(1).scalar_subquery()
        with self._database.writing() as connection:
            connection.execute(insert(Note), row)
            connection.execute(delete(Note).where(Note.c.id < oldest))

    def notes(self, limit: int = 100) -> list[RefusalNote]:
        """Return the refusals and their reasons, latest first; the last thousand are kept."""
        columns = (Note.c[name] for name in RefusalNote.__dataclass_fields__)
        with self._database.reading() as connection:
            found = connection.execute(select(*columns).order_by(Note.c.id.desc()).limit(limit)).mappings()
            return [RefusalNote(**row) for row in found]

    def last(self) -> int:
        """Return a number that rises with each action and each refusal; it reads two index entries."""
        actions, notes = (select(func.coalesce(func.max(each.c.id), 0)).scalar_subquery() for each in (Action, Note))
        with self._database.reading() as connection:
            return int(connection.scalar(select(actions + notes)) or 0)
