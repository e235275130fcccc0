"""A device gets another name: its row and what is read of its past follow, the journal stays as it was written."""

from __future__ import annotations

from sqlalchemy import Connection, select, update

from thinwire.core.errors import NotFound, Refused, UsageError
from thinwire.core.types import DEVICE_NAME
from thinwire.store.access import Device, Invitation
from thinwire.store.admission import next_change
from thinwire.store.audit import WAS, act
from thinwire.store.tables import Client, Measure, Run, Update


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
