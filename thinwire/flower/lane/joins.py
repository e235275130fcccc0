"""How a device comes in and goes for good: the CA to compare, the invitation to show, the farewell."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable

from thinwire.core.clock import Clock
from thinwire.core.errors import NotInvited, Refused
from thinwire.core.fleet import DeviceRow, Joining, Roster
from thinwire.core.json_bounds import read_json
from thinwire.core.texts import grouped
from thinwire.core.types import DEVICE_NAME
from thinwire.flower.door.gate import Gate
from thinwire.flower.door.requests import Request
from thinwire.flower.wire.refusals import Refusal

JSON = b"application/json"
SECRET_DIGITS = 32
MOST_BYTES = 16 * 2**10  # of a join's JSON: a stranger's 4 KiB could be inflated to a thousand times as much

log = logging.getLogger("thinwire.door")


class CaRoute:
    """The only anonymous answer: the certificates to compare with the pin, and the name that the leaf is asked by."""

    def __init__(self, cas: Callable[[], tuple[str, ...]], server_name: Callable[[], str]) -> None:
        self._cas, self._server_name = cas, server_name

    async def __call__(self, request: Request) -> None:
        said = {"cas": list(self._cas()), "server_name": self._server_name()}
        await request.answer(200, json.dumps(said).encode(), JSON)


class JoinRoute:
    """One invitation, one device. From outside all invitations that cannot be used look alike."""

    def __init__(self, roster: Roster, gate: Gate, clock: Clock, cas: Callable[[], tuple[str, ...]]) -> None:
        self._roster, self._gate, self._clock, self._cas = roster, gate, clock, cas

    async def __call__(self, request: Request) -> None:
        identity, address = request.identity, request.wire.address
        try:
            head, _ = await request.head(MOST_BYTES)
            secret, name = _read(head)
        except Refusal:
            self._gate.failed_joins.failed(address, self._clock.now())
            raise
        known = self._roster.by_fingerprint(identity.fingerprint) is not None
        joining = Joining(secret, name, identity.fingerprint, identity.der, address)
        try:
            row = await asyncio.to_thread(self._roster.join, joining)
        except NotInvited as error:
            self._gate.failed_joins.failed(address, self._clock.now())
            log.warning("a join from %s as %r was refused: %s", address, name, error.why or error.what)
            await asyncio.to_thread(self._roster.note, "join", address, error.why or error.what, name)
            raise Refusal(403, "invitation", "no invitation that can be used") from error
        except Refused as error:
            self._gate.failed_joins.failed(address, self._clock.now())  # else names could be tried out
            await asyncio.to_thread(self._roster.note, "name", address, str(error), name)
            raise Refusal(409, "name", str(error)) from error
        if known:  # a reply was lost; who asks again and again for what it has may not write here as often
            self._gate.failed_joins.failed(address, self._clock.now())
        if row.state == "revoked":  # its invitation was used by itself, before it was shut out
            raise Refusal(403, "revoked", f"{row.name} was revoked")
        if row.state == "pending":
            log.warning("%s waits to be approved; its key's fingerprint is %s", row.name, grouped(row.fingerprint))
        await request.answer(200, self._said(row), JSON)

    def _said(self, row: DeviceRow) -> bytes:
        said = {"name": row.name, "state": row.state, "fingerprint": row.fingerprint, "cas": list(self._cas())}
        return json.dumps(said).encode()


class LeaveRoute:
    """A device shuts itself out; `shut_out` ends what it was doing here."""

    def __init__(self, roster: Roster, shut_out: Callable[[str], None]) -> None:
        self._roster, self._shut_out = roster, shut_out

    async def __call__(self, request: Request) -> None:
        name = request.row.name
        await request.whole()
        await asyncio.to_thread(self._roster.leave, name)
        await request.answer(200)
        self._shut_out(name)


def _read(head: bytes) -> tuple[str, str]:
    """(secret, name); what cannot be one is refused as any other secret would be."""
    try:
        raw = read_json(head, MOST_BYTES)
        secret, name = raw["secret"], raw["name"]
        if not (isinstance(secret, str) and len(secret) == SECRET_DIGITS and isinstance(name, str)):
            raise TypeError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Refusal(403, "invitation", "no invitation that can be used") from None
    if not DEVICE_NAME.fullmatch(name):
        raise Refusal(409, "name", "a device's name has 1 to 63 of a-z, 0-9 and -")
    return secret, name
