"""The routes about devices and invitations, and those by which a person acts on them: invite, approve, rename, tag.

Each calls the function that `thinwire devices` calls, and leaves a row in the audit log.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from pydantic import Field
from starlette.responses import Response

from thinwire.core.errors import Refused
from thinwire.core.invitation import InviteAddress
from thinwire.store import Store
from thinwire.web import device_queries as say
from thinwire.web import device_schemas as models
from thinwire.web.access import API, Number, SettingsDep, StoreDep, Who, from_state, visitor
from thinwire.web.device_health import Span
from thinwire.web.device_queries import Devices
from thinwire.web.problems import PROBLEMS
from thinwire.web.rows import First, as_csv, page_of
from thinwire.web.run_actions import Tags
from thinwire.web.schemas import Body
from thinwire.web.settings import Settings, aggregator, may_serve

MAX_INVITED = 1000  # in one request
MAX_LISTED = 10_000  # in one answer
DeviceName = Annotated[str, Path(pattern=r"^[a-z0-9-]{1,63}$")]
Until = Annotated[float | None, Query(ge=0, le=1e11, description="end of the last row; now without it")]
Name = Annotated[str, Field(max_length=63)]
Listed = Annotated[int, Query(ge=1, le=MAX_LISTED)]
DevicesDep = Annotated[Devices, from_state("devices")]
router = APIRouter(prefix=API, responses=PROBLEMS)


class NewName(Body):
    """Holds the name that a device gets."""

    name: Name


class NewInvitations(Body):
    """Holds the invitations to make: `count` for any free name, or one for each of `names`."""

    count: int = Field(1, ge=1, le=MAX_INVITED)
    names: list[Name] = Field([], max_length=MAX_INVITED)
    expires_s: float = Field(24 * 3600.0, gt=0, le=366 * 24 * 3600.0)
    approve_manually: bool = False


@router.get("/devices")
def devices_page(
    devices: DevicesDep, response: Response, first: First = 0, count: Listed = MAX_LISTED
) -> list[models.Device]:
    """Return a page of the devices, by name. The header `Link` names the next page, if there is one."""
    return page_of(devices.page(first, count + 1), first, count, response)


@router.get("/devices.csv", response_class=Response, include_in_schema=False)
def devices_csv(devices: DevicesDep) -> Response:
    """Return all devices, by name."""
    return as_csv(devices.page(), models.Device, "devices")


@router.get("/devices/{name}")
def device(devices: DevicesDep, name: DeviceName) -> models.DevicePage:
    """Return what is known of a device: its connection, its runs and its measures."""
    return devices.one(name)


@router.get("/devices/{name}/health")
def health(devices: DevicesDep, name: DeviceName, span: Span = "day", until: Until = None) -> models.Health:
    """Return what was measured of a device in each hour of a day, or each six hours of a week."""
    return devices.health(name, span, until)


@router.get("/devices/{name}/health.csv", response_class=Response, include_in_schema=False)
def health_csv(devices: DevicesDep, name: DeviceName, span: Span = "day", until: Until = None) -> Response:
    """Return the rows of `health`."""
    return as_csv(devices.health(name, span, until).rows, models.HealthRow, f"{name}-health")


@router.post("/devices/{name}/rename")
def rename(store: StoreDep, name: DeviceName, wanted: NewName, who: Who) -> models.Renamed:
    """Rename the device in its row and its history; refused while a run that is not over may use the old name."""
    store.roster.rename(name, wanted.name, who)
    return models.Renamed(device=wanted.name, was=name)


@router.post("/devices/{name}/tags")
def tags(store: StoreDep, name: DeviceName, wanted: Tags, who: Who) -> models.Tagged:
    """Add tags to a device and remove others."""
    return models.Tagged(device=name, tags=store.roster.tag(name, wanted.add, wanted.remove, who))


@router.post("/devices/{name}/approve")
def approve(
    request: Request, store: StoreDep, settings: SettingsDep, name: DeviceName, compared: models.ShownFingerprint
) -> models.Decided:  # fmt: skip
    """Approve the device; this takes effect at its next request. An admin alone approves a revoked device again."""
    person = visitor(request).person
    store.roster.approve(name, person.who, compared.fingerprint, may_restore=person.role == "admin")
    said = say.approved(name, aggregator(settings.lock)[0])
    return models.Decided(device=name, standing="approved", sentence=said)


@router.post("/devices/{name}/revoke")
def revoke(
    store: StoreDep, settings: SettingsDep, name: DeviceName, compared: models.ShownFingerprint, who: Who
) -> models.Decided:  # fmt: skip
    """Revoke the device at once; the aggregator gets a command to clear what is open, unless none is running."""
    command = store.revoke_device(name, who, compared.fingerprint, lambda: may_serve(settings.lock))
    return _revoke_access(store, settings, name, command)


@router.get("/devices/{name}/revocations/{number}")
def revocation(store: StoreDep, settings: SettingsDep, name: DeviceName, number: Number) -> models.Decided:
    """Return the progress of a revocation by the number of its command."""
    store.commands.result(number)  # raises NotFound
    return _revoke_access(store, settings, name, number)


def _revoke_access(store: Store, settings: Settings, name: str, command: int | None) -> models.Decided:
    result = store.commands.result(command) if command is not None else None
    confirmed = bool(result.get("done")) if result is not None else None
    rounds = dict(store.aggregated_rounds(name) if not result or "rounds" not in result else result["rounds"])
    return models.Decided(
        device=name, standing="revoked", command=command, confirmed=confirmed,
        sentence=say.revoke_access(name, aggregator(settings.lock)[0] if command is not None else "gone", confirmed),
        stays=tuple(models.Stays(run_id=run_id, rounds=numbers) for run_id, numbers in rounds.items()),
        stays_text=say.stays(rounds),
    )  # fmt: skip


@router.get("/invitations")
def invitations(devices: DevicesDep) -> list[models.ListedInvitation]:
    """Return the invitations, without their secrets."""
    return devices.invitations()


@router.post("/invitations", status_code=201)
def invite(
    store: StoreDep, settings: SettingsDep, wanted: NewInvitations, who: Who
) -> list[models.MadeInvitation]:  # fmt: skip
    """Make invitations, each of which enrolls one device, once; their secrets are in this answer only."""
    if settings.lock is None:
        raise Refused(
            "this dashboard makes no invitations", "it does not know the address of the device API",
            "on the aggregator's machine: thinwire devices invite",
        )  # fmt: skip
    address = InviteAddress.read(settings.lock.parent)
    made = store.invitations.invite(wanted.count, wanted.names, wanted.expires_s, wanted.approve_manually, who)
    return [
        models.MadeInvitation(
            **address.row(one.id, one.name, one.secret, one.expires_at) | {"expires_at": one.expires_at},
            urls=address.urls,
        )
        for one in made
    ]


@router.post("/invitations/{number}/withdraw")
def withdraw(store: StoreDep, number: Number, who: Who) -> models.Withdrawn:
    """Withdraw an invitation: no device enrolls by it any more."""
    store.invitations.withdraw(number, who)
    return models.Withdrawn(invitation=number, sentence=say.withdrawn(number))


@router.get("/refusals")
def refusals(devices: DevicesDep) -> list[models.RefusedRequest]:
    """Return which requests the device API refused, and why."""
    return devices.refusals()
