"""FlowerFleet: core/fleet.py's Fleet over the embedded SuperLink and the door."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from thinwire.core.clock import HEARD, Clock, RealClock, write_heard
from thinwire.core.errors import DataLost, ThinwireError
from thinwire.core.fleet import Arrival, DeviceRow, Envelope, FixedLimits, NodeLeft, ReplyLimits, Roster, Spool, TakenUp
from thinwire.core.protocol import SPEAKS, Range
from thinwire.core.serialization import ReplyLimit
from thinwire.core.statedir import write_atomically
from thinwire.core.types import Arrived, UpdateId
from thinwire.flower.superlink import TASK_HEARTBEAT_S, Grid, Nodes, SuperLink
from thinwire.transport.protocol.http import Found
from thinwire.transport.server.app import Door, Request, Serve
from thinwire.transport.server.assignments import BundleRoute, PullRoute
from thinwire.transport.server.auth import Gate, Guests, by_loopback, welcomes_nobody
from thinwire.transport.server.connections import Account, Ledger
from thinwire.transport.server.limits import CONNECTIONS_OF_A_GUEST, KnownAddresses
from thinwire.transport.server.listener import Listener
from thinwire.transport.server.mailbox import Exchange
from thinwire.transport.server.presence import Sessions
from thinwire.transport.server.registration import CaRoute, HelloRoute, JoinRoute, LeaveRoute
from thinwire.transport.server.replies import Answers
from thinwire.transport.server.tls import Authority
from thinwire.transport.server.uploads import PushRoute, Uploads, push_bytes

GRACE_S = 4.0  # a device whose connection closed gets so long to come back
POLL_S = 120.0  # how long a pull waits: the heartbeat. 60 s would cost 1.5 MB a day (benchmarks/door.py)
MOST = ReplyLimit(4 * 2**30)  # of one answer, where the server sets no limit
ADDRESSES = "addresses.json"  # beside the ledger: where devices have signed before
HEARD_S = 5.0  # how often it is written down when each device was heard last
PARTING_S = 0.5  # who is shut out gets so long to read why

log = logging.getLogger("thinwire.door")


class FlowerFleet:
    """One thread calls it; the door has its own. `limits` say how large the reply to an ask may be.

    What is counted of the wire is kept in the file `ledger`, so that a restart in the middle of an exchange loses none,
    and a kill what the last second counted.
    Without an `authority` the door is a plain one, on loopback only; with one it is TLS, and nobody comes in but by an
    invitation.
    """

    def __init__(
        self,
        roster: Roster,
        spool: Spool,
        clock: Clock | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        authority: Authority | None = None,
        guests: Guests | None = None,
        grace_s: float = GRACE_S,
        poll_s: float = POLL_S,
        limits: ReplyLimits = FixedLimits(MOST),  # it is never changed
        speaks: Range = SPEAKS,
        ledger: Path | None = None,
    ) -> None:
        self._clock = clock = clock or RealClock()
        self._roster, self._spool, self._superlink, self._authority = roster, spool, SuperLink(), authority
        self._guests = guests
        self._guest_accounts: dict[str, Account] = {}  # by fingerprint
        self._exchange = Exchange(Grid(self._superlink), self._wake)
        self._nodes = Nodes(self._superlink, self._exchange)
        self._holds: dict[str, tuple[str, ...]] = {}  # the pins that each device that came since the start holds
        self._sessions = Sessions(clock, grace_s, poll_s, self._left, Ledger(ledger))
        self._sweep_s, self._heard_s = min(1.0, grace_s / 4), min(HEARD_S, poll_s / 8)
        self._gate = Gate(roster, clock, private=authority is None, guests=guests)
        self._limits = limits
        answers = Answers(self._exchange, self._sessions, spool, clock, limits)
        self._uploads = Uploads(answers, self._sessions, spool, clock)
        self._gate.room = self._room
        self._pull = PullRoute(self._gate, self._exchange, self._sessions, clock, poll_s)
        push = PushRoute(answers, self._uploads, self._sessions, spool, clock, limits)
        enrol = by_loopback(roster) if authority is None else welcomes_nobody
        hello = HelloRoute(
            enrol, roster, spool, self._exchange, self._sessions, clock, poll_s, self._cas, self._called,
            self._holds.__setitem__, self._gate.still, speaks,
        )  # fmt: skip
        routes: dict[str, Serve] = {
            "hello": hello, "pull": self._pull, "push": push, "part": self._uploads.take,
            "offset": self._uploads.tell, "bundle": BundleRoute(self._exchange, self._sessions),
            "leave": LeaveRoute(roster, self._shut_out_here),
        }  # fmt: skip
        if authority is not None:
            routes["ca"] = CaRoute(self._cas, authority.server_name)
            routes["join"] = JoinRoute(roster, self._gate, clock, self._cas)
        self._enter_all(spool)
        self._door = Door(routes, clock, self._called, guests)
        self._listener = Listener(
            self._door, self._gate.judge, host, port, clock, self._lifespan, self._background,
            authority.context if authority else None,
        )  # fmt: skip
        self._addresses = ledger.with_name(ADDRESSES) if ledger else None
        self._heard_file, self._heard = ledger.with_name(HEARD) if ledger else None, dict[str, float]()
        self._listener.wires.known = _read_known(self._addresses)
        self._listener.start()

    @property
    def address(self) -> str:
        """host:port of the door."""
        return self._listener.address

    def send(self, asks: Sequence[Envelope]) -> None:
        """All of them or, where a bundle is not what its ask says, none."""
        for envelope in asks:
            length = sum(part.length for part in envelope.ask.parts)
            there = envelope.bundle.stat().st_size if envelope.bundle and envelope.bundle.exists() else 0
            if length != there:
                raise DataLost(
                    f"the model for ask {envelope.ask.ask_id} has {there} bytes on disk, {length} were announced",
                    why=f"file {envelope.bundle}",
                    hint="restore a backup: thinwire aggregator restore",
                )
            self._limits.of(envelope.ask.ask_id)  # the run is known from here on, before anybody can reply
        self._exchange.send(asks)

    def poll(self, wait_s: float) -> Sequence[Arrival]:
        return self._exchange.poll(wait_s)

    def taken_up(self) -> Sequence[TakenUp]:
        return self._exchange.taken_up()

    def open(self, update_id: UpdateId) -> Iterator[Arrived]:
        return self._spool.open(update_id)

    def ack(self, update_ids: Sequence[UpdateId]) -> None:
        for update_id in update_ids:
            self._spool.delete(update_id)
            self._exchange.acked(update_id)

    def cancel(self, ask_ids: Sequence[str]) -> None:
        self._exchange.cancel(ask_ids)

    def shut_out(self, devices: Sequence[str]) -> None:
        """When it returns, who waited is answered, what was being sent is gone, and each open ask is refused."""
        for device in devices:
            self._listener.now(lambda name=device: self._shut_out_here(name))  # type: ignore[misc]  # mypy cannot type a default

    def close(self) -> None:
        """Answer who waits, then close the door. A second close changes nothing."""
        self._pull.closing = True
        self._listener.soon(self._sessions.wake_all)
        self._listener.stop()
        self._sessions.keep()
        self._keep_known(self._listener.wires.known.taken())

    def stats(self) -> dict[str, Any]:
        """Counters of the door, for benchmarks: requests by route, refusals by path and status, bytes on the wire."""
        (sent, received), answers = self._sessions.total(), dict(self._door.answers)
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
            "turned_away": wires.strangers.turned_away,
        }

    def _enter_all(self, spool: Spool) -> None:
        """Who is known, and which answers lie in the spool; what who was shut out was uploading is gone."""
        for row in self._roster.rows():
            if row.how == "stock":
                continue  # it is another SuperLink's
            if not row.is_intact:
                log.warning(
                    "the key of %s is damaged in the database: this device is refused. Give it another name there "
                    "(thinwire devices rename %s NEW), then let it leave and join again", row.name, row.name,
                )  # fmt: skip
            elif row.state == "revoked":
                spool.drop_partial(row.name)
            else:
                self._nodes.register(row)
        for head in spool.heads():
            self._exchange.arrived(head)

    @asynccontextmanager
    async def _lifespan(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._superlink.running())
            if self._guests is not None:
                await stack.enter_async_context(self._guests.running())
            yield

    def _room(self, row: DeviceRow, found: Found) -> int:
        """The most bytes that the body of a part or of a push may have."""
        if found.route.name == "part":
            return self._uploads.room(row, found)
        return push_bytes(self._limits.max_header_bytes())

    def _cas(self) -> tuple[str, ...]:
        return self._authority.cas() if self._authority else ()

    def _wake(self, devices: Iterable[str]) -> None:
        self._listener.soon(self._sessions.wake, devices)

    def _called(self, request: Request) -> None:
        """A device, or a guest, made a request that was let in."""
        self._listener.wires.sign(request.wire)
        if request.admitted.row is None:
            if self._guests is not None and (who := self._guests.who(request.headers)):
                request.charge(self._guest_accounts.setdefault(who, Account(max_wires=CONNECTIONS_OF_A_GUEST)))
            return
        if not self._exchange.node_of(request.row.name):
            self._gate.still(request.row)  # it may have been shut out since it was let in
        request.charge(self._sessions.account(request.row.name))
        self._nodes.is_here(request.row)

    def _left(self, device: str, why: str, silent_s: float) -> None:
        self._nodes.has_left(device)
        self._exchange.arrived(NodeLeft(device, why, silent_s))

    def _shut_out_here(self, device: str) -> None:
        """In the door's loop: waiters first, so that each is told why before its connection goes.

        A device that was renamed has come under its old name, and may not have said hello since.
        """
        row = next((row for row in self._roster.rows() if row.name == device), None)
        before = self._nodes.names_of(row) if row else ()
        for name in {device, *before}:
            self._end(name)

    def _end(self, device: str) -> None:
        """What is in memory first: a disk that refuses keeps nobody in."""
        node_id = self._exchange.node_of(device)
        self._sessions.shut_out(device)
        for wire in self._sessions.account(device).wires:
            self._listener.loop.call_later(PARTING_S, wire.abort)
        taken = self._exchange.shut_out(device)
        if node_id:
            self._superlink.node_has_left(node_id)
        self._uploads.shut_out(device)
        try:
            for update_id in taken:
                self._spool.delete(update_id)
                self._exchange.acked(update_id)
            self._spool.drop_partial(device)
        except OSError:
            log.exception("%s is shut out, but what it sent could not be removed", device)

    async def _background(self) -> None:
        """Notice who has left or was renamed, keep what was counted, Flower's task alive and the certificate fresh."""
        loop = asyncio.get_running_loop()
        beat_at = heard_at = loop.time()
        while True:
            self._sessions.sweep()
            with suppress(ThinwireError):  # of the database: the next look may reach it
                self._sessions.renamed(self._roster.rows())
            self._sessions.keep()
            if self._addresses is not None and self._listener.wires.known.changed:
                await asyncio.to_thread(self._keep_known, self._listener.wires.known.taken())
            if self._heard_file is not None and loop.time() >= heard_at:
                heard_at = loop.time() + self._heard_s
                if (heard := self._sessions.heard()) != self._heard:
                    self._heard, ahead = heard, self._clock.wall() - self._clock.now()
                    walls = {name: at + ahead for name, at in heard.items()}
                    await asyncio.to_thread(write_heard, self._heard_file, walls)
            if loop.time() >= beat_at:
                self._superlink.beat()
                await asyncio.to_thread(self._renew)
                beat_at = loop.time() + TASK_HEARTBEAT_S
            await asyncio.sleep(self._sweep_s)

    def _keep_known(self, table: bytes) -> None:
        """Write down where devices have signed: after a restart in the middle of a flood their places are kept."""
        if self._addresses is not None:
            with suppress(ThinwireError):  # it is a help and no state: the next start does without
                write_atomically(self._addresses, table)

    def _renew(self) -> None:
        """Keep the certificate fresh; after a rotation have each device say hello, and so take the new CA."""
        if self._authority is None:
            return
        if self._authority.renew():
            self._listener.soon(self._sessions.greet_again)
        rows = [row for row in self._roster.rows() if row.state == "approved" and row.how != "stock" and row.is_intact]
        self._authority.confirmed([self._holds.get(row.name, ()) for row in rows if row.how != "loopback"])


def _read_known(path: Path | None) -> KnownAddresses:
    """The addresses of the life before; none where the file is missing or damaged."""
    if path is None or not path.exists():
        return KnownAddresses()
    try:
        return KnownAddresses.from_bytes(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        log.warning("the addresses of devices in %s cannot be read, and are learned again: %s", path, error)
        return KnownAddresses()
