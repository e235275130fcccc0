"""The aggregator's durable state except its models: journal, read tables, commands, devices, logins, spool."""

from thinwire.store.alerts import AlertRow, Condition
from thinwire.store.audit import DeviceAction, RefusalNote, by_todays_name
from thinwire.store.one_time_secrets import InvitationRow, Invited
from thinwire.store.privacy_ledger import PrivacyRow
from thinwire.store.read_models import (
    ClientRow,
    DeviceInfo,
    MeasureRow,
    ModelRow,
    Order,
    PhaseRow,
    PointRow,
    RoundRow,
    RunRow,
    UpdateRow,
    WorkRow,
)
from thinwire.store.spool import FileSpool
from thinwire.store.store import Commands, RunOrder, Store

__all__ = [
    "AlertRow",
    "ClientRow",
    "Commands",
    "Condition",
    "DeviceAction",
    "DeviceInfo",
    "FileSpool",
    "InvitationRow",
    "Invited",
    "MeasureRow",
    "ModelRow",
    "Order",
    "PhaseRow",
    "PointRow",
    "PrivacyRow",
    "RefusalNote",
    "RoundRow",
    "RunOrder",
    "RunRow",
    "Store",
    "UpdateRow",
    "WorkRow",
    "by_todays_name",
]  # fmt: skip
