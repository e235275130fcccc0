"""Read models of enrollment: invitations, the audit log of devices, and refusals of the device API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

InvitationState = Literal["open", "used", "expired", "withdrawn"]


@dataclass(frozen=True)
class Invited:
    """A new invitation with its secret (32 hex digits), which is known only now. `name` is "" for any free name."""

    id: int
    secret: str
    name: str
    expires_at: float


@dataclass(frozen=True)
class InvitationRow:
    """An invitation in a list; `used_by` is the device that joined with it."""

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
    """An action on a device's row: enrol, join, add, approve, revoke, leave, rename; or invite and withdraw."""

    at: float
    who: str
    device: str
    what: str
    detail: str


@dataclass(frozen=True)
class RefusalNote:
    """A refusal of the device API.

    `name` is the name in the request, which proves nothing. Only the operator may see `why`.
    """

    at: float
    kind: str
    address: str
    name: str
    why: str
