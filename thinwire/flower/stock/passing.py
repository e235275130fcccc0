"""Which stock nodes pass the door to the second SuperLink, and what its answers look like outside."""

from __future__ import annotations

import base64
import binascii
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from thinwire.core.clock import Clock, RealClock
from thinwire.core.fleet import Roster
from thinwire.flower.door.guests import require_no_browser
from thinwire.flower.stock.superexec import SuperExec
from thinwire.flower.stock.superlink import StockSuperLink
from thinwire.flower.wire.refusals import Refusal
from thinwire.flower.wire.signing import (
    EARLIEST_S,
    LATEST_S,
    PUBLIC_KEY_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    fingerprint,
    public_der,
)

APPROVE = "thinwire devices approve --key FILE.pub --name NAME"
ALLOWED = frozenset({401, 403, 404, 409, 412, 413, 429, 503})


class StockPass:
    """The Guests of flower/door/guests.py. On a plain loopback door every node passes; on a TLS door those whose key
    the operator approved by `thinwire devices approve --key`. Flower signs a timestamp only: a stock node has no replay
    protection.
    """

    def __init__(self, roster: Roster, clock: Clock, superexec: SuperExec, *, private: bool) -> None:
        self._roster, self._clock, self._superexec, self._private = roster, clock, superexec, private
        self._superlink = StockSuperLink(authenticated=not private)
        self.paths = self._superlink.fleet_paths

    @property
    def control_address(self) -> str:
        """Where `flwr run` goes, on this machine."""
        return self._superlink.control_address

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with self._superlink.running(), self._superexec.running(self.control_address):
            yield

    def may_pass(self, headers: Mapping[bytes, bytes]) -> Refusal | None:
        if self._private:
            return require_no_browser(headers)
        try:
            key = _key(headers)
            signature = base64.b64decode(headers.get(SIGNATURE_HEADER.encode(), b""), validate=True)
            timestamp = headers.get(TIMESTAMP_HEADER.encode(), b"")
            age_s = self._clock.wall() - datetime.fromisoformat(timestamp.decode("ascii")).timestamp()
        except (ValueError, TypeError, UnsupportedAlgorithm, binascii.Error, OverflowError):
            return Refusal(401, "signature", "the request is not signed as a Flower node signs")
        if not isinstance(key, ec.EllipticCurvePublicKey) or not EARLIEST_S < age_s < LATEST_S:
            return Refusal(401, "signature", "not a P-384 key, or a clock that is wrong")
        der = public_der(key)
        row = self._roster.by_fingerprint(fingerprint(der))
        if row is None or row.how != "stock":
            return Refusal(412, "unknown", f"this key was not approved: {APPROVE}")
        try:
            key.verify(signature, timestamp, ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            return Refusal(401, "signature", "the signature does not fit")
        if row.state != "approved":
            return Refusal(403, row.state, f"{row.name} may not call")
        self._superlink.let_in(row.name, der)
        return None

    def who(self, headers: Mapping[bytes, bytes]) -> str:
        """The fingerprint; one key has many spellings in PEM."""
        key = None if self._private else _key(headers)
        return fingerprint(public_der(key)) if isinstance(key, ec.EllipticCurvePublicKey) else ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def told(event: Any) -> None:
            if event["type"] == "http.response.start":
                event = dict(event, status=outside(event["status"]))
            await send(event)

        await self._superlink(scope, receive, told)


def _key(headers: Mapping[bytes, bytes]) -> object:
    return load_pem_public_key(base64.b64decode(headers.get(PUBLIC_KEY_HEADER.encode(), b""), validate=True))


def outside(status: int) -> int:
    """A status as the door may say it: no other 4xx than its own, and no 500.

    >>> [outside(status) for status in (200, 400, 422, 401, 500, 502)]
    [200, 409, 409, 401, 503, 503]
    """
    if status < 400 or status in ALLOWED:
        return status
    return 409 if status < 500 else 503


def stock_guests(roster: Roster, said: Path, *, private: bool) -> StockPass:
    """All of it together; `said` is where flower-superexec and the foreign apps write."""
    return StockPass(roster, RealClock(), SuperExec(said), private=private)
