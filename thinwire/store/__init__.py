"""Everything durable of an aggregator but its models: journal, read tables, orders, devices, logins, spool."""

from thinwire.store.rows import ClientRow, DeviceInfo, ModelRow, Order, RoundRow, RunRow, UpdateRow
from thinwire.store.spool import FileSpool
from thinwire.store.store import Store

__all__ = [
    "ClientRow", "DeviceInfo", "FileSpool", "ModelRow", "Order", "RoundRow", "RunRow", "Store", "UpdateRow",
]  # fmt: skip
