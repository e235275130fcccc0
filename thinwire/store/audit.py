"""The audit log: actions on devices, users and tokens, downloads of models, commands about runs, and refusals of the
device API.

Rows are only added and read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, case, delete, func, insert, literal, null, select, union_all

from thinwire.core.clock import Clock
from thinwire.core.formatting import counted
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

    `about` is the device or the run; actions on users and tokens have them in `detail`. That of a command says what it
    changes, and why it was refused.
    """

    at: float
    who: str
    what: str
    about: str
    detail: str


@dataclass(frozen=True)
class RefusalNote:
    """Holds a refusal of the device API.

    `name` is the name in the request, which proves nothing. `why` is for users of the dashboard and
    the command line; the sender got a shorter reason.
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


def _detail(args: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Return in words what a command changes, and why it was not carried out.

    >>> _detail({"add": ["paper"], "remove": ["old"]}, {"done": True})
    '+paper -old'
    >>> _detail({"rounds": 5, "sets": {"local.lr": "0.1"}}, {"done": False, "error": "digits-1 is running"})
    '5 more rounds, local.lr = 0.1; refused: digits-1 is running'
    """
    tags = [*(f"+{tag}" for tag in args.get("add", ())), *(f"-{tag}" for tag in args.get("remove", ()))]
    more = [counted(args["rounds"], "more round")] if "rounds" in args else []
    more += [f"{key} = {value}" for key, value in args.get("sets", {}).items()]
    refused = f"refused: {result.get('error')}" if result.get("done") is False else ""
    return "; ".join(filter(None, (" ".join(tags), ", ".join(more), refused)))


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
        of, by = Action.c, Command.c
        told = case((by.kind.in_(("tag-run", "extend-run")), by.args)).label("args")  # those of others may be large
        commands = select(
            by.at, by.who, by.kind.label("what"), by.run_id.label("about"), literal("").label("detail"),
            by.id.label("number"), told, by.result,
        ).where(by.kind.not_in(("revoke", "evaluated")))  # fmt: skip
        actions = select(of.at, of.who, of.what, of.device.label("about"), of.detail, of.id, null(), null())
        both = union_all(commands, actions).subquery()
        wanted = select(both).order_by(both.c.at.desc(), both.c.number.desc())
        with self._database.reading() as connection:
            total = int(connection.scalar(select(func.count()).select_from(both)) or 0)
            found = connection.execute(wanted.offset(first).limit(count))
            return total, [
                AuditRow(row.at, row.who, row.what, row.about, row.detail or _detail(row.args or {}, row.result or {}))
                for row in found
            ]

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
        """Return a number that rises with each action, refusal and command; it reads three index entries."""
        actions, notes, commands = (
            select(func.coalesce(func.max(each.c.id), 0)).scalar_subquery() for each in (Action, Note, Command)
        )
        with self._database.reading() as connection:
            return int(connection.scalar(select(actions + notes + commands)) or 0)
