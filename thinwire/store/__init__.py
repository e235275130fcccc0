"""Everything durable of an aggregator but its models: journal, read tables, orders, devices, logins, spool."""

from thinwire.store.access_rows import DeviceAction, DeviceInfo, DoorNote, InvitationRow, Invited, Order
from thinwire.store.audit import by_todays_name
from thinwire.store.rows import (
    ClientRow,
    MeasureRow,
    ModelRow,
    RoundRow,
    RunRow,
    UpdateRow,
)
from thinwire.store.spool import FileSpool
from thinwire.store.store import Store

__all__ = [
    "ClientRow", "DeviceAction", "DeviceInfo", "DoorNote", "FileSpool", "InvitationRow", "Invited", "MeasureRow",
    "ModelRow", "Order", "RoundRow", "RunRow", "Store", "UpdateRow", "by_todays_name",
]  # fmt: skip
