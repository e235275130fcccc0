"""Who may not have heard that a run is over: the journal says who has, by the names that devices had then."""

from __future__ import annotations

from sqlalchemy import select

from thinwire.core.events import DeviceTold
from thinwire.store.access import Action
from thinwire.store.access_rows import DeviceAction
from thinwire.store.audit import by_todays_name
from thinwire.store.database import Database
from thinwire.store.tables import Client, Journal

TOLD = "told"  # that a device has heard of it, between the renames


def untold(database: Database, run_id: str) -> list[str]:
    """The devices that were asked something in a run and of which nothing says that they have heard of its end."""
    said = select(Journal.body).where(Journal.run_id == run_id, Journal.kind == DeviceTold.__name__)
    columns = (getattr(Action, name) for name in DeviceAction.__dataclass_fields__)
    renames = select(*columns).where(Action.what == "rename").order_by(Action.id.desc())
    with database.reading() as connection:
        asked = connection.scalars(select(Client.device).where(Client.run_id == run_id).order_by(Client.device)).all()
        told = [DeviceTold(**body) for body in connection.scalars(said)]
        happened = [DeviceAction(**row) for row in connection.execute(renames).mappings()]
    happened += [DeviceAction(one.at, "", one.device, TOLD, "") for one in told]
    happened.sort(key=lambda one: one.at, reverse=True)
    heard = {today for today, one in by_todays_name(happened) if one.what == TOLD}
    return [device for device in asked if device not in heard]
