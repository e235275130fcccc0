"""What is read of devices and people, and of what they did and want done: plain frozen values, free of the database."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from thinwire.core.equipment import Equipment
from thinwire.core.fleet import DeviceRow

InvitationState = Literal["open", "used", "expired", "withdrawn"]


@dataclass(frozen=True)
class DeviceInfo:
    """A device with what it did: `hello` as JSON, `updates` and `payload_up` over all runs on devices.

    `seen_at`: when it came last; `heard_at`: when it was last heard of, which of one that is online is at least that.
    """

    row: DeviceRow
    online: bool
    seen_at: float | None
    heard_at: float | None
    hello: dict[str, Any]
    updates: int
    payload_up: int
    last_outcome: str

    @property
    def tasks(self) -> list[dict[str, Any]]:
        return list(self.hello.get("tasks", ()))

    @property
    def has(self) -> Equipment:
        said = self.hello.get("has", {})
        return Equipment(**{field.name: said.get(field.name) for field in fields(Equipment)})


@dataclass(frozen=True)
class Invited:
    """An invitation at the only moment at which its secret (32 hex digits) is known. `name` "": any that is free."""

    id: int
    secret: str
    name: str
    expires_at: float


@dataclass(frozen=True)
class InvitationRow:
    """An invitation as it is listed; `used_by` is the device that came with it."""

    id: int
    name: str
    state: InvitationState
    created_at: float
    expires_at: float
    approve_manually: bool
    who: str
    used_by: str
    used_at: float | None


@dataclass(frozen=True)
class DeviceAction:
    """What was done to a device's row: enrol, join, add, approve, revoke, leave, rename; or invite and withdraw."""

    at: float
    who: str
    device: str
    what: str
    detail: str


@dataclass(frozen=True)
class DoorNote:
    """A refusal of the door; `name` as it was said, which proves nothing, `why` as only the operator may know it."""

    at: float
    kind: str
    address: str
    name: str
    why: str


@dataclass(frozen=True)
class Order:
    """What a person wants done."""

    id: int
    kind: str
    run_id: str
    args: Mapping[str, Any]
    who: str
    at: float
