"""This module implements the protocol `Fleet` of core/fleet.py over the embedded SuperLink and the device API."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from thinwire.core.clock import HEARD, Clock, RealClock, write_heard
from thinwire.core.equipment import GIB
from thinwire.core.errors import DataLost, ThinwireError
from thinwire.core.fleet import (
    Arrival,
    ClientDisconnected,
    Delivered,
    DeviceRow,
    Envelope,
    FixedLimits,
    ReplyLimits,
    Roster,
    Spool,
)
from thinwire.core.link_state import POLL_S
from thinwire.core.protocol import SPEAKS, Range
from thinwire.core.serialization import ReplyLimit
from thinwire.core.statedir import write_atomically
from thinwire.core.types import Arrived, UpdateId
from thinwire.flower.link_state import SuperLink
from thinwire.transport.protocol.http import RouteMatch
from thinwire.transport.server.app import DeviceApi, Request, Serve
from thinwire.transport.server.assignments import BundleRoute, PullRoute, ReplyReceiver
from thinwire.transport.server.auth import Guests, RequestAuthenticator
from thinwire.transport.server.connections import CONNECTIONS_OF_A_GUEST, KnownAddresses, TrafficCounter
from thinwire.transport.server.listener import Listener
from thinwire.transport.server.mailbox import Mailbox
from thinwire.transport.server.presence import Presence
from thinwire.transport.server.registration import CaRoute, HelloRoute, JoinRoute, LeaveRoute
from thinwire.transport.server.tls import CertificateProvider, TrustedCas
from thinwire.transport.server.uploads import PushRoute, Uploads, push_bytes

GRACE_S = 4.0  # time to reconnect for a device whose connection closed
DEFAULT_REPLY_LIMIT = ReplyLimit(int(4 * GIB))  # of one reply, if the aggregator sets no limit
ADDRESSES = "addresses.json"  # addresses from which devices have signed
RENEW_S = 20.0  # between two checks of the certificate and of the CAs that devices trust
HEARD_S = 5.0  # between two records of the last message from each device
PARTING_S = 0.5  # time to read the reason for a device that is disconnected

log = logging.getLogger("thinwire.device_api")


class FlowerFleet:
    """Reaches devices over the device API; the LinkState of Flower's SuperLink is its table of devices and assignments.

    One thread calls it; the device API has a thread of its own. `limits` bound the reply to each assignment. In
    `directory` the addresses of devices and the times of their last messages are stored, if it is given.

    Invariant: without an `authority` the device API has no TLS and listens on loopback only. With one it has TLS, and a
    device enrolls only by an invitation.
    """

    def __init__(
        self,
        roster: Roster,
        spool: Spool,
        clock: Clock | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        authority: CertificateProvider | None = None,
        guests: Guests | None = None,
        grace_s: float = GRACE_S,
        poll_s: float = POLL_S,
        limits: ReplyLimits = FixedLimits(DEFAULT_REPLY_LIMIT),  # immutable
        speaks: Range = SPEAKS,
        directory: Path | None = None,
    ) -> None:
        self._clock = clock = clock or RealClock()
        self._roster, self._spool, self._superlink, self._guests = roster, spool, SuperLink(), guests
        self._guest_accounts: dict[str, TrafficCounter] = {}  # by fingerprint
        self._state = self._superlink.state
        self._state.watch(self._wake)
        self._mailbox = Mailbox(self._state)
        self._cas = TrustedCas(authority, roster)
        self._presence = Presence(self._state, clock, grace_s, poll_s, self._left)
        self._sweep_s, self._heard_s = min(1.0, grace_s / 4), min(HEARD_S, poll_s / 8)
        self._authenticator = RequestAuthenticator(roster, clock, private=authority is None, guests=guests)
        self._limits = limits
        reply_receiver = ReplyReceiver(self._mailbox, self._presence, spool, clock, limits)
        self._uploads = Uploads(reply_receiver, self._presence, spool, clock)
        self._authenticator.room = self._room
        self._pull = PullRoute(self._authenticator, self._mailbox, self._presence, clock)
        push = PushRoute(reply_receiver, self._uploads, self._presence, spool, clock, limits, self._pull)
        hello = HelloRoute(
            roster, spool, self._mailbox, self._presence, clock, self._authenticator, self._cas, self._called, speaks
        )
        routes: dict[str, Serve] = {
            "hello": hello, "pull": self._pull, "push": push, "part": self._uploads.receive_part,
            "offset": self._uploads.send_offset, "bundle": BundleRoute(self._mailbox, self._presence),
            "leave": LeaveRoute(roster, self._revoke_here),
        }  # fmt: skip
        if authority is not None:
            routes["ca"] = CaRoute(authority)
            routes["join"] = JoinRoute(roster, self._authenticator, clock, authority)
        self._enter_all(spool)
        self._device_api = DeviceApi(routes, self._authenticator.clock, self._called, guests)
        self._listener = Listener(
            self._device_api, self._authenticator.judge, host, port, self._authenticator.clock, self._lifespan,
            self._background, authority.context if authority else None,
        )  # fmt: skip
        self._addresses = directory / ADDRESSES if directory else None
        self._heard_file, self._heard = directory / HEARD if directory else None, dict[str, float]()
        self._renewed_at = self._heard_at = -math.inf  # times of the event loop; they outlast an error of `_background`
        self._listener.wires.known = _read_known(self._addresses)
        self._listener.start()

    @property
    def address(self) -> str:
        """Return host:port of the device API."""
        return self._listener.address

    def send(self, assignments: Sequence[Envelope]) -> None:
        """Queue all assignments; queue none and raise `DataLost` if the file of one does not have the length of its
        parts.
        """
        for envelope in assignments:
            length = sum(part.length for part in envelope.assignment.parts)
            there = envelope.bundle.stat().st_size if envelope.bundle and envelope.bundle.exists() else 0
            if length != there:
                raise DataLost(
                    (
                        f"the model for assignment {envelope.assignment.assignment_id} has {there} bytes on disk, "
                        f"{length} were announced"
                    ),
                    why=f"file {envelope.bundle}",
                    hint="restore a backup: thinwire aggregator restore",
                )
            self._limits.of(envelope.assignment.assignment_id)  # the run must be known before a device can reply
        self._mailbox.send(assignments)

    def poll(self, wait_s: float) -> Sequence[Arrival]:
        """Return replies, failures, and devices that connected or went offline, after at most `wait_s` seconds."""
        return self._mailbox.poll(wait_s)

    def delivered(self) -> Sequence[Delivered]:
        """Return the assignments delivered since the last call."""
        return self._mailbox.delivered()

    def open(self, update_id: UpdateId) -> Iterator[Arrived]:
        """Yield the parts of an update from the spool, in order."""
        return self._spool.open(update_id)

    def ack(self, update_ids: Sequence[UpdateId]) -> None:
        """Delete updates from the spool, so that they are not polled again."""
        for update_id in update_ids:
            self._spool.delete(update_id)
            self._mailbox.mark_acked(update_id)

    def cancel(self, assignment_ids: Sequence[str]) -> None:
        """Withdraw assignments; devices learn it at their next call."""
        self._mailbox.cancel(assignment_ids)

    def revoke_access(self, devices: Sequence[str]) -> None:
        """Disconnect revoked devices.

        When it returns, their waiting calls are answered, their uploads are deleted, and each open assignment has
        failed.
        """
        for device in devices:
            self._listener.now(lambda name=device: self._revoke_here(name))  # type: ignore[misc]  # mypy cannot type a default

    def drop_uploads(self, run_id: str) -> None:
        """Delete what a run's devices have not sent to the end, and its replies that were not readable."""
        try:
            self._listener.now(lambda: self._spool.drop_unused(run_id, self._uploads.end(run_id)))
        except OSError:
            log.exception("what is left of unfinished uploads of %s could not be removed", run_id)

    def drop_replies(self, run_id: str) -> None:
        """Delete all replies of a run that is over, and what `drop_uploads` deletes."""
        self.drop_uploads(run_id)
        try:
            self.ack([header.update_id for header in self._spool.headers() if header.update_id.run == run_id])
        except OSError:
            log.exception("what is left of the replies of %s could not be removed", run_id)

    def close(self) -> None:
        """Answer all waiting calls, then close the device API; a second call changes nothing."""
        self._pull.closing = True
        self._listener.soon(self._presence.wake_all)
        self._listener.stop()
        self._keep_known(self._listener.wires.known.to_bytes())

    def stats(self) -> dict[str, Any]:
        """Return counters for benchmarks: requests by route, refusals by path and status, bytes on the wire."""
        (sent, received), answers = self._presence.total(), dict(self._device_api.answers)
        names = ("hello", "pull", "push")
        requests = {name: answers.pop(name, 0) for name in names}
        requests |= {name: count for name, count in answers.items() if "/" not in name and not name[0].isdigit()}
        refused = {name: count for name, count in answers.items() if name not in requests}
        wires = self._listener.wires
        return {
            "requests": requests,
            "refused": refused,
            "sent_bytes": sent,
            "received_bytes": received,
            "connections": len(wires.open),
            "strangers": len(wires.strangers),
            "refused_connections": wires.strangers.refused_connections,
        }

    def _enter_all(self, spool: Spool) -> None:
        """Register the devices of the roster and the replies in the spool; delete unfinished uploads of revoked
        devices.
        """
        for row in self._roster.rows():
            if row.how == "stock":
                continue  # it belongs to the other SuperLink
            if not row.is_intact:
                log.warning(
                    "the key of %s is damaged in the database: this device is refused. Give it another name there "
                    "(thinwire devices rename %s NEW), then let it leave and join again", row.name, row.name,
                )  # fmt: skip
            elif row.state == "revoked":
                spool.drop_partial(row.name)
            else:
                self._state.register(row.name, row.public_key)
        for header in spool.headers():
            self._mailbox.add_arrival(header)

    @asynccontextmanager
    async def _lifespan(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._superlink.running())
            if self._guests is not None:
                await stack.enter_async_context(self._guests.running())
            yield

    def _room(self, row: DeviceRow, found: RouteMatch) -> int:
        """Return the largest body of a part or of a push, in bytes."""
        if found.route.name == "part":
            return self._uploads.max_body_bytes(row, found)
        return push_bytes(self._limits.max_header_bytes())

    def _wake(self, devices: Iterable[str]) -> None:
        self._listener.soon(self._presence.wake, devices)

    def _called(self, request: Request) -> None:
        """Record a request that a device or a guest was allowed to make."""
        self._listener.wires.sign(request.wire)
        if request.admitted.row is None:
            if self._guests is not None and (who := self._guests.who(request.headers)):
                request.charge(self._guest_accounts.setdefault(who, TrafficCounter(max_wires=CONNECTIONS_OF_A_GUEST)))
            return
        row = request.row
        if not self._state.knows(row.name):
            self._authenticator.still(row)  # it may have been revoked since its signature was checked
        self._state.register(row.name, row.public_key)
        request.charge(self._presence.account(row.name))

    def _left(self, device: str, why: str, silent_s: float) -> None:
        self._mailbox.add_arrival(ClientDisconnected(device, why, silent_s))

    def _revoke_here(self, device: str) -> None:
        """Disconnect a device, in the device API's loop: its waiting calls are answered with the reason first.

        A renamed device may still be connected under its old name, if it has not sent a hello since.
        """
        row = next((row for row in self._roster.rows() if row.name == device), None)
        before = self._state.names_of(row.public_key) if row else ()
        for name in {device, *before}:
            self._end(name)

    def _end(self, device: str) -> None:
        """Disconnect one name of a device, in memory first: an error of the disk must not keep the device connected."""
        self._presence.revoke_access(device)
        for wire in self._presence.account(device).wires:
            self._listener.loop.call_later(PARTING_S, wire.abort)
        taken = self._mailbox.revoke_access(device)
        self._uploads.revoke_access(device)
        try:
            for update_id in taken:
                self._spool.delete(update_id)
                self._mailbox.mark_acked(update_id)
            self._spool.drop_partial(device)
        except OSError:
            log.exception("%s is revoked, but what it sent could not be removed", device)

    async def _background(self) -> None:
        """Notice offline and renamed devices, store addresses and renew the certificate, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            self._presence.sweep()
            with suppress(ThinwireError):  # of the database: the next sweep may reach it
                self._presence.renamed(self._roster.rows())
            if self._addresses is not None and self._listener.wires.known.changed:
                await asyncio.to_thread(self._keep_known, self._listener.wires.known.to_bytes())
            if self._heard_file is not None and loop.time() >= self._heard_at + self._heard_s:
                self._heard_at = loop.time()
                if (heard := self._presence.last_seen()) != self._heard:
                    self._heard, ahead = heard, self._clock.wall() - self._clock.now()
                    walls = {name: at + ahead for name, at in heard.items()}
                    await asyncio.to_thread(write_heard, self._heard_file, walls)
            if loop.time() >= self._renewed_at + RENEW_S:
                self._renewed_at = loop.time()
                await asyncio.to_thread(self._renew)
            await asyncio.sleep(self._sweep_s)

    def _keep_known(self, table: bytes) -> None:
        """Store the addresses from which devices have signed: after a restart during a flood their connections stay
        reserved.
        """
        if self._addresses is not None:
            with suppress(ThinwireError):  # the addresses are no state: the next start works without them
                write_atomically(self._addresses, table)

    def _renew(self) -> None:
        """Renew the certificate; after a rotation make each device send a hello, by which it receives the new CA."""
        if self._cas.renew():
            self._listener.soon(self._presence.require_registration)


def _read_known(path: Path | None) -> KnownAddresses:
    """Return the addresses that the previous process stored; none if the file is missing or damaged."""
    if path is None or not path.exists():
        return KnownAddresses()
    try:
        return KnownAddresses.from_bytes(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        log.warning("the addresses of devices in %s are not readable, and are learned again: %s", path, error)
        return KnownAddresses()
