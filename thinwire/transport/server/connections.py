"""Connections of the device API: the bytes that each device sends and receives, and the limits on strangers.

Bytes are counted at the TCP socket, TLS included. Bytes that passed before the device was known are charged to the
device once it is known. All of it belongs to the event loop of the device API.

`KnownAddresses` and `UnauthenticatedConnections` limit the connections of strangers, without I/O. `TrafficCounter`
counts for one device, `Connection` is one connection, `ConnectionTable` holds what all connections share. The counts
are in memory: the end of the process loses those that no reply has carried yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import ssl
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import uvicorn
from uvicorn.server import ServerState

from thinwire.core.net import neighbourhood, tune
from thinwire.core.types import Transfer
from thinwire.transport.protocol.http import ApiError
from thinwire.transport.server.auth import Judge

HANDSHAKE_S = 10.0  # for a TLS handshake
HEADER_BYTES, HEADER_S = 16 * 2**10, 10.0  # for a request's line and headers
MAX_UNSIGNED_OF_ADDRESS, MAX_UNSIGNED = 32, 512  # unauthenticated connections of one address, and of all addresses
RESERVED_FOR_KNOWN = 64  # of MAX_UNSIGNED, for addresses from which a device has signed before
MAX_KNOWN = 16_384  # known addresses: more than the devices that one aggregator serves
FORGET_KNOWN_AFTER_S = 30 * 86_400.0  # without a signature from the address
UPDATE_KNOWN_EVERY_S = 86_400.0  # a known address's time is not updated more often
UNSIGNED_S = 30.0  # after which an unauthenticated connection is closed
BODY_BYTES_A_SECOND, BODY_WINDOW_S = 2**10, 30.0
CONNECTIONS_OF_ONE = 4  # device: a client has two, four while it reconnects; more would let one device delay others
CONNECTIONS_OF_A_GUEST = 16  # of one stock Flower node, which transfers objects on several connections
MAX_REFUSED_OF_CONNECTION = 3  # refused signatures; an honest device has at most one before it corrects its clock


@dataclass
class KnownAddresses:
    """The addresses from which a device has signed, with the last time (seconds since 1970), the latest at the end.

    Their reserved connections stay available while strangers use up the others. Above `MAX_KNOWN` the oldest address
    is forgotten.
    """

    at: OrderedDict[str, float] = field(default_factory=OrderedDict)
    changed: bool = False  # True if an address was added or updated since the last `to_bytes`

    def note(self, address: str, wall: float) -> None:
        """Record that a device signed from this address at the wall-clock time `wall`."""
        near = neighbourhood(address)
        if wall - self.at.get(near, -math.inf) > UPDATE_KNOWN_EVERY_S:
            self.changed = True
            self.at[near] = wall
            self.at.move_to_end(near)
            while len(self.at) > MAX_KNOWN:
                self.at.popitem(last=False)

    def contains(self, address: str, wall: float) -> bool:
        """Return True if a device has signed from this address in the last 30 days."""
        return wall - self.at.get(neighbourhood(address), -math.inf) < FORGET_KNOWN_AFTER_S

    def to_bytes(self) -> bytes:
        """Return the table as JSON bytes to be stored, and mark it as unchanged."""
        self.changed = False
        return json.dumps(self.at).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> KnownAddresses:
        """Return the table that `to_bytes` gave; raise ValueError if it is invalid."""
        said = json.loads(data)
        if not isinstance(said, dict) or not all(isinstance(wall, float | int) for wall in said.values()):
            raise ValueError("it is no table of addresses")
        newest = sorted(said.items(), key=lambda item: item[1])[-MAX_KNOWN:]
        return cls(OrderedDict((str(near), float(wall)) for near, wall in newest))


C = TypeVar("C")


@dataclass
class UnauthenticatedConnections(Generic[C]):
    """The unauthenticated connections. The oldest ends when one more would be too many.

    Invariant: at most 32 are of one address and 512 of all, at most 448 of these of addresses from which no device has
    signed before.
    """

    _near: dict[C, str] = field(default_factory=dict)  # oldest first, like the two below
    _of: dict[str, dict[C, None]] = field(default_factory=dict)
    _new: dict[C, None] = field(default_factory=dict)  # of addresses from which no device has signed
    refused_connections: int = 0

    def add(self, connection: C, address: str, known: bool = False) -> C | None:
        """Add a connection, and return the one that must end for it, or None. It counts until `remove`.

        `known` means that a device has signed from this address before.
        """
        near = neighbourhood(address)
        ended: C | None = None
        if len(of := self._of.get(near, {})) >= MAX_UNSIGNED_OF_ADDRESS:
            ended = next(iter(of))
        elif not known and len(self._new) >= MAX_UNSIGNED - RESERVED_FOR_KNOWN:
            ended = next(iter(self._new))
        elif len(self._near) >= MAX_UNSIGNED:
            ended = next(iter(self._new or self._near))
        if ended is not None:
            self.refused_connections += 1
            self.remove(ended)
        self._near[connection] = near
        self._of.setdefault(near, {})[connection] = None
        if not known:
            self._new[connection] = None
        return ended

    def remove(self, connection: C) -> None:
        """Remove a connection that was closed or authenticated."""
        if (near := self._near.pop(connection, None)) is None:
            return
        self._new.pop(connection, None)
        self._of[near].pop(connection)
        if not self._of[near]:
            del self._of[near]

    def __len__(self) -> int:
        return len(self._near)


@dataclass(eq=False)
class TrafficCounter:
    """The bytes and requests of one device, over all of its connections. It belongs to the API's event loop.

    `sent_bytes` and `received_bytes` are the aggregator's. `wires` are the open connections, oldest first; at most
    `max_wires` stay open.
    """

    max_wires: int = CONNECTIONS_OF_ONE
    sent_bytes: int = 0
    received_bytes: int = 0
    requests: int = 0
    wires: dict[Connection, None] = field(default_factory=dict)  # a dict for its order: oldest first
    _reported: tuple[int, int, int] = (0, 0, 0)

    def take_unreported(self) -> tuple[int, int, int]:
        """Return (bytes sent, bytes received, requests) since the previous call."""
        before = self._reported
        now = self._reported = self.sent_bytes, self.received_bytes, self.requests
        return now[0] - before[0], now[1] - before[1], now[2] - before[2]

    def give_back(self, taken: Transfer) -> None:
        """Count what a reply took as unreported again, because the reply was not stored."""
        sent, received, requests = self._reported
        sent, received = sent - (taken.sent_bytes or 0), received - (taken.received_bytes or 0)
        self._reported = sent, received, requests - taken.requests


@dataclass(eq=False)
class Connection:
    """Holds a TCP connection of the device API.

    `signed` is True once a request on it was admitted. Times are seconds of `ConnectionTable.now`. `header_since` is
    set while a request's line and headers are awaited. `body_since` begins the window in which the speed of a body is
    measured; `body_bytes` arrived in it. `unsent` gives the bytes that the socket has not accepted yet.
    """

    address: str = ""
    tls: bool = False
    account: TrafficCounter = field(default_factory=TrafficCounter)
    open: bool = True
    signed: bool = False
    opened_at: float = 0.0
    header_since: float | None = None
    body_since: float | None = None
    body_bytes: int = 0
    on_close: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None
    abort: Callable[[], None] = lambda: None
    unsent: Callable[[], int] = lambda: 0

    def belongs_to(self, account: TrafficCounter) -> None:
        """Charge the connection's bytes, past and future, to `account`.

        If the account then has more than `max_wires` open connections, its oldest one is aborted.
        """
        if account is not self.account:
            if self not in self.account.wires:  # its own counter: the bytes from before the device was known
                account.sent_bytes += self.account.sent_bytes
                account.received_bytes += self.account.received_bytes
            self.account.wires.pop(self, None)
            self.account = account
            if self.open:
                account.wires[self] = None
                if len(account.wires) > account.max_wires:
                    next(iter(account.wires)).abort()

    def too_slow(self, now: float) -> bool:
        """Return True if a signature, the end of the headers, or the next KiB of a body is overdue."""
        if not self.signed and now - self.opened_at > UNSIGNED_S:
            return True
        if self.header_since is not None and now - self.header_since > HEADER_S:
            return True
        if self.body_since is None or now - self.body_since < BODY_WINDOW_S:
            return False
        slow = self.body_bytes < BODY_BYTES_A_SECOND * (now - self.body_since)
        self.body_since, self.body_bytes = now, 0
        return slow


@dataclass
class ConnectionTable:
    """The state that all connections share: the judge of requests, unauthenticated connections, and open connections.

    `now` is a monotonic clock and `wall` the wall clock, both in seconds. `refused` is called with the target and the
    refusal of each refused request.
    """

    judge: Judge
    config: uvicorn.Config
    tls: ssl.SSLContext | None
    now: Callable[[], float]
    wall: Callable[[], float]
    state: ServerState = field(default_factory=ServerState)
    strangers: UnauthenticatedConnections[Connection] = field(default_factory=UnauthenticatedConnections)
    known: KnownAddresses = field(default_factory=KnownAddresses)
    open: set[Connection] = field(default_factory=set)
    refused: Callable[[str, ApiError], None] = lambda target, refusal: None

    def add(self, wire: Connection, transport: asyncio.Transport) -> None:
        """Register a new connection; the oldest unauthenticated one is aborted if there are too many."""
        peer: Any = transport.get_extra_info("peername")
        wire.address, wire.opened_at = str(peer[0]) if peer else "", self.now()
        wire.header_since = wire.opened_at
        too_many = self.strangers.add(wire, wire.address, self.known.contains(wire.address, self.wall()))
        if too_many is not None:
            too_many.abort()
            self.remove(too_many)
        self.open.add(wire)
        wire.abort, wire.unsent = transport.abort, transport.get_write_buffer_size
        found = transport.get_extra_info("socket")
        if found is not None:
            with contextlib.suppress(OSError):  # the socket may be closed already
                tune(found)

    def sign(self, wire: Connection) -> None:
        """Mark a connection as authenticated, and note its address as known."""
        if not wire.signed and wire.open:
            wire.signed = True
            self.strangers.remove(wire)
            self.known.note(wire.address, self.wall())

    def remove(self, wire: Connection) -> None:
        """Remove a closed connection, and call its `on_close`."""
        if wire in self.open:
            self.open.discard(wire)
            wire.open = False
            wire.account.wires.pop(wire, None)
            self.strangers.remove(wire)
            wire.on_close()

    def watch(self) -> None:
        """Abort every connection that is too slow."""
        now = self.now()
        for wire in [wire for wire in self.open if wire.too_slow(now)]:
            wire.abort()
