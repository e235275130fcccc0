"""FlowerFleet: core/fleet.py's Fleet over the embedded SuperLink and the door."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key

from thinwire.core.clock import Clock, RealClock
from thinwire.core.errors import DataLost
from thinwire.core.fleet import Arrival, DeviceRow, Envelope, NodeLeft, Roster, Spool
from thinwire.core.types import UpdateId
from thinwire.flower.door import Door, Serving
from thinwire.flower.enrolment import by_loopback
from thinwire.flower.entry import Entry
from thinwire.flower.exchange import Exchange
from thinwire.flower.framing import HELLO, PULL, PUSH
from thinwire.flower.grid import Grid
from thinwire.flower.lane import HelloRoute
from thinwire.flower.pull import PullRoute
from thinwire.flower.push import PushRoute
from thinwire.flower.sessions import Sessions
from thinwire.flower.signing import Verifier
from thinwire.flower.superlink import TASK_HEARTBEAT_S, SuperLink

GRACE_S = 4.0  # a device whose connection closed gets so long to come back
POLL_S = 25.0  # how long a pull waits
MOST_BYTES = 4 * 2**30  # of one answer, where the server sets no limit


class FlowerFleet:
    """One thread calls it; the door has its own. `limit` gives the most bytes that an answer to an ask may have."""

    def __init__(
        self,
        roster: Roster,
        spool: Spool,
        clock: Clock | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        grace_s: float = GRACE_S,
        poll_s: float = POLL_S,
        limit: Callable[[str], int] = lambda ask_id: MOST_BYTES,
    ) -> None:
        clock = clock or RealClock()
        self._spool, self._superlink = spool, SuperLink()
        self._exchange = Exchange(Grid(self._superlink), self._wake)
        self._nodes: dict[str, int] = {}
        self._sessions = Sessions(clock, grace_s, poll_s, self._left)
        self._sweep_s = min(1.0, grace_s / 4)
        entry = Entry(roster, self._sessions, Verifier(clock.wall()), clock, self._called)
        enrol = by_loopback(roster)
        self._pull = PullRoute(entry, self._exchange, self._sessions, clock, poll_s)
        hello = HelloRoute(entry, enrol, roster, spool, self._exchange, self._sessions, clock, poll_s)
        push = PushRoute(entry, self._exchange, self._sessions, spool, clock, limit)
        for row in roster.rows():
            if row.state != "revoked":
                self._register(row)
        for head in spool.heads():
            self._exchange.arrived(head)
        self._door = Door({HELLO: hello, PULL: self._pull, PUSH: push})
        self._serving = Serving(self._door, host, port, self._superlink.running, self._background)
        self._serving.start()

    @property
    def address(self) -> str:
        """host:port of the door."""
        return self._serving.address

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
        self._exchange.send(asks)

    def poll(self, wait_s: float) -> Sequence[Arrival]:
        return self._exchange.poll(wait_s)

    def open(self, update_id: UpdateId) -> Iterator[bytes]:
        return self._spool.open(update_id)

    def ack(self, update_ids: Sequence[UpdateId]) -> None:
        for update_id in update_ids:
            self._spool.delete(update_id)
            self._exchange.acked(update_id)

    def cancel(self, ask_ids: Sequence[str]) -> None:
        self._exchange.cancel(ask_ids)

    def close(self) -> None:
        """Answer who waits, then close the door. A second close changes nothing."""
        self._pull.closing = True
        self._serving.soon(self._sessions.wake_all)
        self._serving.stop()

    def stats(self) -> dict[str, Any]:
        """Counters of the door, for benchmarks: requests by path, refusals by path and status, bytes on the wire."""
        total = self._sessions.total()
        answers = dict(self._door.answers)
        paths = {name.rsplit("/", 1)[1]: answers.pop(name, 0) for name in (HELLO, PULL, PUSH)}
        return {
            "requests": paths,
            "refused": answers,
            "sent_bytes": total.sent_bytes,
            "received_bytes": total.received_bytes,
        }

    def _wake(self, devices: Iterable[str]) -> None:
        self._serving.soon(self._sessions.wake, devices)

    def _register(self, row: DeviceRow) -> int:
        """The device's node in Flower's registry."""
        if (node_id := self._nodes.get(row.fingerprint)) is None:
            pem = load_der_public_key(row.public_key).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
            node_id = self._nodes[row.fingerprint] = self._superlink.node(row.name, pem)
            self._exchange.register(row.name, node_id)
        return node_id

    def _called(self, row: DeviceRow) -> None:
        self._superlink.node_is_here(self._register(row))

    def _left(self, device: str, why: str) -> None:
        if node_id := self._exchange.node_of(device):
            self._superlink.node_has_left(node_id)
        self._exchange.arrived(NodeLeft(device, why))

    async def _background(self) -> None:
        """Notice who has left, and keep Flower's task alive."""
        loop = asyncio.get_running_loop()
        beat_at = loop.time()
        while True:
            self._sessions.sweep()
            if loop.time() >= beat_at:
                self._superlink.beat()
                beat_at = loop.time() + TASK_HEARTBEAT_S
            await asyncio.sleep(self._sweep_s)
