"""The lane's first route, hello: a process says who it is, what it can do, and learns how far its sequences went."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from thinwire.core.clock import Clock
from thinwire.core.errors import BadPayload, NotInvited, Refused
from thinwire.core.fleet import DeviceRow, Hello, Joining, NodeJoined, Roster, Spool, Welcome
from thinwire.core.formatting import grouped
from thinwire.core.protocol import SPEAKS, Range, read_json
from thinwire.core.types import DEVICE_NAME
from thinwire.transport.protocol import registration
from thinwire.transport.protocol.http import Refusal, packed
from thinwire.transport.server.app import Request
from thinwire.transport.server.auth import Enrol, Gate
from thinwire.transport.server.mailbox import Exchange
from thinwire.transport.server.presence import Sessions

MOST_HELLOS, WITHIN_S = 60, 60.0  # of one device: each may be a row of the journal
SETTLE_S = 1.0  # a hello waits so long for the connection of the process before it to close
SETTLE_STEP_S = 0.02
SPREAD_PER_S = 100.0  # devices that may come back in one second after an aggregator was lost

log = logging.getLogger("thinwire.door")


class HelloRoute:
    """`cas` gives the certificates (PEM) that devices are to hold; `called` hears of a device that was not known
    before its hello; `still` refuses one that was shut out since its request was let in.
    """

    def __init__(
        self, enrol: Enrol, roster: Roster, spool: Spool, exchange: Exchange, sessions: Sessions, clock: Clock,
        poll_s: float, cas: Callable[[], tuple[str, ...]], called: Callable[[Request], None],
        held: Callable[[str, tuple[str, ...]], None], still: Callable[[DeviceRow], DeviceRow], speaks: Range = SPEAKS,
    ) -> None:  # fmt: skip
        self._enrol, self._roster, self._spool = enrol, roster, spool
        self._exchange, self._sessions, self._clock = exchange, sessions, clock
        self._said: dict[str, deque[float]] = {}  # when each device has said hello
        self._apart: dict[str, str] = {}  # devices without a version in common, and why: written down once
        self._poll_s, self._cas, self._called, self._held, self._still, self._speaks = (
            poll_s,
            cas,
            called,
            held,
            still,
            speaks,
        )

    async def __call__(self, request: Request) -> None:
        head, _ = await request.head(registration.MAX_BYTES)
        if (known := request.admitted.row) is not None:
            self._require_pause(known.name)  # before anything is parsed: that takes longer than all the rest
        try:
            said = registration.hello_from_bytes(head)
            version = self._speaks.agreed(Range(said.oldest, said.protocol))
        except BadPayload as error:
            raise Refusal(409, "protocol", str(error)) from error
        except Refused as error:
            await self._write_down(request, said.name, str(error))
            raise Refusal(403, "protocol", f"{error}; {error.hint}") from error
        if request.admitted.row is None:
            self._called(request.of(await asyncio.to_thread(self._enrol, said, request.identity)))
        row = request.row
        said = replace(said, name=row.name)  # a device that was renamed says its old one until it hears the new one
        if known is None:
            self._require_pause(row.name)
        self._held(row.name, said.holds)
        self._sessions.renamed(self._roster.rows())
        await self._alone(said)
        self._still(row)  # it may have been shut out meanwhile
        # Nothing awaited since `_alone`: two hellos cannot both begin.
        if self._sessions.begin(said, request.wire, version, row.fingerprint):
            self._exchange.greeted(row.name, said.process)
            self._exchange.arrived(NodeJoined(row.name, said))
        await asyncio.to_thread(self._roster.seen, said, self._clock.wall())
        sequences = await asyncio.to_thread(self._sequences, row.name)
        runs, spread_s = await asyncio.to_thread(self._roster.runs), len(self._roster.rows()) / SPREAD_PER_S
        welcome = Welcome(row.name, sequences, self._poll_s, self._clock.wall(), version, spread_s, self._cas(), runs)
        await request.answer(200, packed(registration.to_bytes(welcome)))

    async def _write_down(self, request: Request, called: str, why: str) -> None:
        """For the operator: somebody has to update one side, and the device may have nobody in front of it."""
        name = request.admitted.row.name if request.admitted.row else ""
        if not name:
            self._require_pause(name)
        if self._apart.get(name) != why:
            self._apart[name] = why
            log.warning("%s cannot take part: %s", name or called, why)
            await asyncio.to_thread(self._roster.note, "protocol", request.wire.address, why, name or called)

    def _require_pause(self, name: str) -> None:
        """`Refusal` 503 for a device that says hello all the time."""
        now, said = self._clock.now(), self._said.setdefault(name, deque(maxlen=MOST_HELLOS))
        if len(said) == MOST_HELLOS and now - said[0] < WITHIN_S:
            raise Refusal(503, "busy", "too many hellos", retry_after_s=WITHIN_S - (now - said[0]))
        said.append(now)

    async def _alone(self, said: Hello) -> None:
        """Refuse a second live process of one name; one that was just killed gets a moment to be noticed."""
        for _ in range(round(SETTLE_S / SETTLE_STEP_S)):
            before = self._sessions.of(said.name)
            if before is None or before.hello.process == said.process or not before.connected:
                return
            await asyncio.sleep(SETTLE_STEP_S)
        raise Refusal(409, "process", f"another process of {said.name!r} is connected")

    def _sequences(self, name: str) -> Mapping[str, int]:
        """The highest sequence of each run, folded or still in the spool."""
        highest = dict(self._roster.sequences(name))
        for head in self._spool.heads():
            update = head.update_id
            if update.device == name:
                highest[update.run] = max(update.sequence, highest.get(update.run, 0))
        return highest


# How a device comes in and goes for good: the CA to compare, the invitation to show, the farewell.


JSON = b"application/json"
SECRET_DIGITS = 32
MOST_BYTES = 16 * 2**10  # of a join's JSON: a stranger's 4 KiB could be inflated to a thousand times as much


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
