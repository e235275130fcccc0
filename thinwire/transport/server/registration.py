"""The routes by which a device registers, enrolls and leaves.

`HelloRoute` registers a client process: the process reports its name and abilities, and learns how far its sequence
numbers went. `CaRoute` gives the CA certificates to compare with the pin, `JoinRoute` accepts an invitation, and
`LeaveRoute` revokes the device that sends the request.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from thinwire.core.clock import Clock
from thinwire.core.errors import BadPayload, NotInvited, Refused
from thinwire.core.fleet import ClientConnected, DeviceRow, Hello, Joining, Roster, Spool, Welcome
from thinwire.core.formatting import grouped
from thinwire.core.protocol import Range, read_json
from thinwire.core.types import DEVICE_NAME
from thinwire.transport.protocol import registration
from thinwire.transport.protocol.http import ApiError, pack
from thinwire.transport.protocol.signing import Identity
from thinwire.transport.server.app import Request
from thinwire.transport.server.auth import RequestAuthenticator
from thinwire.transport.server.mailbox import Mailbox
from thinwire.transport.server.presence import Presence
from thinwire.transport.server.tls import CertificateProvider, TrustedCas

MAX_HELLOS, WITHIN_S = 60, 60.0  # registrations of one device: each writes its row of the table of devices
SETTLE_S = 1.0  # a registration waits this long for the previous process's connection to close
SETTLE_STEP_S = 0.02
SPREAD_PER_S = 100.0  # devices that may reconnect in one second after an outage of the aggregator

log = logging.getLogger("thinwire.device_api")


class HelloRoute:
    """Registers client processes.

    `called` is called with the request of a device that was unknown before it registered. `speaks` is the range of
    protocol versions.
    """

    def __init__(
        self, roster: Roster, spool: Spool, mailbox: Mailbox, presence: Presence, clock: Clock,
        authenticator: RequestAuthenticator, cas: TrustedCas, called: Callable[[Request], None], speaks: Range,
    ) -> None:  # fmt: skip
        self._roster, self._spool = roster, spool
        self._mailbox, self._presence, self._clock = mailbox, presence, clock
        self._registered_at: dict[str, deque[float]] = {}  # when each device has registered
        self._conflicts: dict[str, str] = {}  # device -> reason why there is no common protocol version, logged once
        self._authenticator, self._cas, self._called, self._speaks = authenticator, cas, called, speaks

    async def __call__(self, request: Request) -> None:
        """Serve a registration."""
        header, _ = await request.header(registration.MAX_BYTES)
        if (known := request.admitted.row) is not None:
            self._require_pause(known.name)  # before parsing, which takes the most time
        try:
            said = registration.hello_from_bytes(header)
            version = self._speaks.agreed(Range(said.oldest, said.protocol))
        except registration.TooMuchReported as error:
            raise ApiError(409, "ledger", f"{error}; {error.hint}") from error
        except BadPayload as error:
            raise ApiError(409, "protocol", str(error)) from error
        except Refused as error:
            await self._log_version_conflict(request, said.name, str(error))
            raise ApiError(403, "protocol", f"{error}; {error.hint}") from error
        if request.admitted.row is None:
            self._called(request.of(await asyncio.to_thread(self._enrol, said, request.identity)))
        row = request.row
        said = replace(said, name=row.name)  # a renamed device reports its old name until it gets the new one
        if known is None:
            self._require_pause(row.name)
        self._cas.reported(row.name, said.trusted_pins)
        self._presence.renamed(self._roster.rows())
        await self._require_single_process(said)
        try:  # before the device counts as online: no run may select one that is refused
            await asyncio.to_thread(self._roster.seen, said, self._clock.wall())
        except Refused as error:
            raise ApiError(409, "ledger", f"{error}; {error.hint}") from error
        await self._require_single_process(said)
        self._authenticator.still(row)  # it may have been revoked meanwhile
        # There is no await since `_require_single_process`, so two registrations cannot both begin.
        if self._presence.begin(said, request.wire, version, row.fingerprint):
            self._mailbox.register_process(row.name, said.process)
            self._mailbox.add_arrival(ClientConnected(row.name, said))
        sequences = await asyncio.to_thread(self._sequences, row.name)
        runs, spread_s = await asyncio.to_thread(self._roster.runs), len(self._roster.rows()) / SPREAD_PER_S
        # A run that ends after this reads the arrival of this device from the mailbox, and sends it a stop.
        ended = await asyncio.to_thread(self._roster.ended, said.open_runs) if said.open_runs else ()
        welcome = Welcome(
            row.name, sequences, self._presence.poll_s, self._authenticator.clock.wall(), version, spread_s,
            self._cas.certificates(), runs, ended,
        )  # fmt: skip
        await request.answer(200, pack(registration.to_bytes(welcome)))

    def _enrol(self, said: Hello, identity: Identity) -> DeviceRow:
        """Bind a name to a key that has no row, by its first registration; it may block, so it is called in a thread.

        The authenticator admits an unknown key over plain HTTP on loopback alone. Whoever reaches that runs on this
        machine.
        """
        try:
            return self._roster.enrol(said.name, identity.fingerprint, identity.der, "loopback")
        except Refused as refused:
            raise ApiError(409, "name", str(refused)) from refused

    async def _log_version_conflict(self, request: Request, called: str, why: str) -> None:
        """Log a version conflict for the operator, who has to update one side.

        The device may have nobody in front of it.
        """
        name = request.admitted.row.name if request.admitted.row else ""
        if not name:
            self._require_pause(name)
        if self._conflicts.get(name) != why:
            self._conflicts[name] = why
            log.warning("%s cannot take part: %s", name or called, why)
            await asyncio.to_thread(self._roster.note, "protocol", request.wire.address, why, name or called)

    def _require_pause(self, name: str) -> None:
        """Raise `ApiError` 503 for a device that registers too often."""
        now, said = self._clock.now(), self._registered_at.setdefault(name, deque(maxlen=MAX_HELLOS))
        if len(said) == MAX_HELLOS and now - said[0] < WITHIN_S:
            raise ApiError(503, "busy", "too many hellos", retry_after_s=WITHIN_S - (now - said[0]))
        said.append(now)

    async def _require_single_process(self, said: Hello) -> None:
        """Raise `ApiError` 409 for a second live process of one name; a killed one gets `SETTLE_S` to be noticed."""
        for _ in range(round(SETTLE_S / SETTLE_STEP_S)):
            before = self._presence.of(said.name)
            if before is None or before.hello.process == said.process or not before.connected:
                return
            await asyncio.sleep(SETTLE_STEP_S)
        raise ApiError(409, "process", f"another process of {said.name!r} is connected")

    def _sequences(self, name: str) -> Mapping[str, int]:
        """Return the highest sequence of each run, among aggregated updates and those still in the spool."""
        highest = dict(self._roster.sequences(name))
        for header in self._spool.headers():
            update = header.update_id
            if update.device == name:
                highest[update.run] = max(update.sequence, highest.get(update.run, 0))
        return highest


JSON = b"application/json"
SECRET_DIGITS = 32
MAX_JOIN_BYTES = 16 * 2**10  # of a join's JSON: a stranger's 4 KiB could inflate to a thousand times as much


class CaRoute:
    """Serves the only anonymous response: the CA certificates, and the server name for which the leaf is issued."""

    def __init__(self, authority: CertificateProvider) -> None:
        self._authority = authority

    async def __call__(self, request: Request) -> None:
        """Serve the certificates as JSON."""
        said = {"cas": list(self._authority.cas()), "server_name": self._authority.server_name()}
        await request.answer(200, json.dumps(said).encode(), JSON)


class JoinRoute:
    """Enrolls one device for each invitation. From outside all unusable invitations look alike."""

    def __init__(
        self, roster: Roster, authenticator: RequestAuthenticator, clock: Clock, authority: CertificateProvider
    ) -> None:
        self._roster, self._authenticator, self._clock, self._authority = roster, authenticator, clock, authority

    async def __call__(self, request: Request) -> None:
        """Serve a request to join."""
        identity, address = request.identity, request.wire.address
        try:
            header, _ = await request.header(MAX_JOIN_BYTES)
            secret, name = _read(header)
        except ApiError:
            self._authenticator.failed_joins.failed(address, self._clock.now())
            raise
        known = self._roster.by_fingerprint(identity.fingerprint) is not None
        joining = Joining(secret, name, identity.fingerprint, identity.der, address)
        try:
            row = await asyncio.to_thread(self._roster.join, joining)
        except NotInvited as error:
            self._authenticator.failed_joins.failed(address, self._clock.now())
            log.warning("a join from %s as %r was refused: %s", address, name, error.why or error.what)
            await asyncio.to_thread(self._roster.note, "join", address, error.why or error.what, name)
            raise ApiError(403, "invitation", "no invitation that can be used") from error
        except Refused as error:
            self._authenticator.failed_joins.failed(address, self._clock.now())  # else a stranger could probe names
            await asyncio.to_thread(self._roster.note, "name", address, str(error), name)
            raise ApiError(409, "name", str(error)) from error
        if known:  # its first response was lost; counting limits how often a device may repeat the request
            self._authenticator.failed_joins.failed(address, self._clock.now())
        if row.state == "revoked":  # it used this invitation itself before it was revoked
            raise ApiError(403, "revoked", f"{row.name} was revoked")
        if row.state == "pending":
            log.warning("%s waits to be approved; its key's fingerprint is %s", row.name, grouped(row.fingerprint))
        await request.answer(200, self._said(row), JSON)

    def _said(self, row: DeviceRow) -> bytes:
        said = {
            "name": row.name, "state": row.state, "fingerprint": row.fingerprint, "cas": list(self._authority.cas()),
        }  # fmt: skip
        return json.dumps(said).encode()


class LeaveRoute:
    """Revokes the device that signed, and ends what it was doing here."""

    def __init__(self, roster: Roster, revoke_access: Callable[[str], None]) -> None:
        self._roster, self._revoke_access = roster, revoke_access

    async def __call__(self, request: Request) -> None:
        """Serve a request to leave."""
        name = request.row.name
        await request.whole()
        await asyncio.to_thread(self._roster.leave, name)
        await request.answer(200)
        self._revoke_access(name)


def _read(header: bytes) -> tuple[str, str]:
    """Return (secret, name) of a join; raise `ApiError` if they are invalid.

    An impossible secret is refused like any other wrong one.
    """
    try:
        raw = read_json(header, MAX_JOIN_BYTES)
        secret, name = raw["secret"], raw["name"]
        if not (isinstance(secret, str) and len(secret) == SECRET_DIGITS and isinstance(name, str)):
            raise TypeError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ApiError(403, "invitation", "no invitation that can be used") from None
    if not DEVICE_NAME.fullmatch(name):
        raise ApiError(409, "name", "a device's name has 1 to 63 of a-z, 0-9 and -")
    return secret, name
