"""The aggregator's durable state except its models: journal, read tables, commands, devices, users, spool."""

from thinwire.store.alerts import AlertRow, Condition
from thinwire.store.audit import AuditRow, DeviceAction, RefusalNote, by_todays_name
from thinwire.store.one_time_secrets import InvitationRow, Invited
from thinwire.store.privacy_ledger import PrivacyRow
from thinwire.store.read_models import (
    LINK_KINDS,
    ClientRow,
    CommandRow,
    DeviceInfo,
    MeasureRow,
    ModelRow,
    PhaseRow,
    PointRow,
    RoundRow,
    RunRow,
    UpdateRow,
    WorkRow,
)
from thinwire.store.sessions import MACHINE, ROLES, Person
from thinwire.store.spool import FileSpool
from thinwire.store.store import RunCommand, Store
from thinwire.store.tokens import TokenRow
from thinwire.store.users import UserRow
from thinwire.store.work_queue import START_RUN, Commands

__all__ = [
    "LINK_KINDS",
    "MACHINE",
    "ROLES",
    "START_RUN",
    "AlertRow",
    "AuditRow",
    "ClientRow",
    "CommandRow",
    "Commands",
    "Condition",
    "DeviceAction",
    "DeviceInfo",
    "FileSpool",
    "InvitationRow",
    "Invited",
    "MeasureRow",
    "ModelRow",
    "Person",
    "PhaseRow",
    "PointRow",
    "PrivacyRow",
    "RefusalNote",
    "RoundRow",
    "RunCommand",
    "RunRow",
    "Store",
    "TokenRow",
    "UpdateRow",
    "UserRow",
    "WorkRow",
    "by_todays_name",
]  # fmt: skip
