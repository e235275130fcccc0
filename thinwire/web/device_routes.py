"""The routes about devices: who they are, and a person's word on who may take part."""

from __future__ import annotations

from fastapi import APIRouter

from thinwire.core.errors import NotFound, Refused
from thinwire.core.fleet import DeviceRow
from thinwire.store import Store
from thinwire.web import device_models as models
from thinwire.web import device_sentences as say
from thinwire.web.addresses import DeviceName, Number
from thinwire.web.device_reading import Devices
from thinwire.web.models import Refusal
from thinwire.web.service import aggregator
from thinwire.web.settings import Settings

WHO = "page"  # in the audit: until there are users, whoever has logged in to the page


def device_routes(settings: Settings, store: Store, devices: Devices) -> APIRouter:
    router = APIRouter(prefix="/api", responses={status: {"model": Refusal} for status in (401, 404, 409)})

    @router.get("/devices")
    def listed() -> list[models.Device]:
        return devices.all()

    @router.get("/devices/{name}")
    def one(name: DeviceName) -> models.DevicePage:
        return devices.one(name)

    @router.post("/devices/{name}/approve")
    def approve(name: DeviceName, compared: models.Compared) -> models.Decided:
        """The row counts at the device's next call."""
        _the_same(store, name, compared)
        store.roster.approve(name, WHO, compared.fingerprint)
        said = say.approved(name, aggregator(settings.lock)[0])
        return models.Decided(device=name, standing="approved", sentence=said)

    @router.post("/devices/{name}/revoke")
    def revoke(name: DeviceName, compared: models.Compared) -> models.Decided:
        """The row counts at once; the aggregator is left an order to clear what is open, unless none is running."""
        _the_same(store, name, compared)
        store.roster.revoke(name, WHO, compared.fingerprint)
        if aggregator(settings.lock)[0] == "gone":
            return _shut_out(name, None)
        return _shut_out(name, store.order("revoke", args={"device": name}, who=WHO))

    @router.get("/devices/{name}/revocations/{number}")
    def revocation(name: DeviceName, number: Number) -> models.Decided:
        """How far the order of that number has come."""
        store.result(number)  # NotFound
        return _shut_out(name, number)

    @router.get("/invitations")
    def invitations() -> list[models.Invitation]:
        return devices.invitations()

    @router.post("/invitations/{number}/withdraw")
    def withdraw(number: Number) -> models.Withdrawn:
        store.invitations.withdraw(number, WHO)
        return models.Withdrawn(invitation=number, sentence=say.withdrawn(number))

    @router.get("/refusals")
    def refused() -> list[models.DoorRefusal]:
        return devices.refusals()

    def _shut_out(name: str, order: int | None) -> models.Decided:
        result = store.result(order) if order is not None else None
        confirmed = bool(result.get("done")) if result is not None else None
        rounds = dict(store.folded_rounds(name) if not result or "rounds" not in result else result["rounds"])
        return models.Decided(
            device=name, standing="revoked", order=order, confirmed=confirmed,
            sentence=say.shut_out(name, aggregator(settings.lock)[0] if order is not None else "gone", confirmed),
            stays=tuple(models.Stays(run_id=run_id, rounds=numbers) for run_id, numbers in rounds.items()),
            stays_text=say.stays(rounds),
        )  # fmt: skip

    return router


def _the_same(store: Store, name: str, compared: models.Compared) -> DeviceRow:
    """Names move from key to key (a rename, another key joins): what counts is the key that the person saw."""
    row = next((row for row in store.roster.rows() if row.name == name), None)
    if row is None:
        raise NotFound(f"no device {name}", why="nobody of that name has come, or it was renamed meanwhile")
    if row.fingerprint != compared.fingerprint:
        raise Refused(
            f"{name} has another key than the one that was shown",
            why="the name went to another device meanwhile", hint="look at it again, and compare its fingerprint",
        )  # fmt: skip
    return row
