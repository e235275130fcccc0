"""Connections of the device API: the bytes that each device sends and receives, and the limits on slow connections.

Bytes are counted at the TCP socket, TLS included. Bytes that passed before the device was known are charged to the
device once it is known. All of it belongs to the event loop of the device API.

`TrafficCounter` counts for one device, `Connection` is one connection, `ConnectionTable` holds what all connections
share. `Ledger` stores the counts in a file, so that they survive a restart.

The ledger writes the changed counts when `Ledger.keep` is called, into the system's page cache. A killed process loses
the counts since the last call, a power cut those of up to half a minute. A backup does not contain them. A damaged
record counts as zero.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import ssl
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from thinwire.transport.protocol.http import ApiError
from thinwire.transport.server.auth import AuthenticatedRequest, Judge
from thinwire.transport.server.limits import (
    BODY_BYTES_A_SECOND,
    BODY_WINDOW_S,
    CONNECTIONS_OF_ONE,
    HEAD_S,
    UNSIGNED_S,
    KnownAddresses,
    UnauthenticatedConnections,
)


class TrafficCounter:
    """The bytes and requests of one device, over all of its connections. It belongs to the API's event loop.

    `kept` are six numbers that may outlive this process (`Ledger`): bytes sent, bytes received and requests, and how
    much of each was reported before. `wires` are the open connections, oldest first; at most `max_wires` stay open.
    """

    def __init__(self, kept: list[int] | None = None, max_wires: int = CONNECTIONS_OF_ONE) -> None:
        self.max_wires = max_wires
        self._kept = [0] * NUMBERS if kept is None else kept
        for i in range(3):  # of an earlier process only the unreported counts matter
            self._kept[i], self._kept[3 + i] = self._kept[i] - self._kept[3 + i], 0
        self._told = [0, 0, 0]
        self.wires: dict[Connection, None] = {}  # a dict for its order: oldest first

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that the aggregator sent to the device."""
        return self._kept[0]

    @sent_bytes.setter
    def sent_bytes(self, count: int) -> None:
        self._kept[0] = count

    @property
    def received_bytes(self) -> int:
        """Return the bytes that the aggregator received from the device."""
        return self._kept[1]

    @received_bytes.setter
    def received_bytes(self, count: int) -> None:
        self._kept[1] = count

    @property
    def requests(self) -> int:
        """Return the number of the device's requests."""
        return self._kept[2]

    @requests.setter
    def requests(self, count: int) -> None:
        self._kept[2] = count

    def untold(self) -> tuple[int, int, int]:
        """Return (bytes sent, bytes received, requests) since the previous call."""
        now = [self._kept[i] for i in range(3)]
        sent, received, requests = (count - told for count, told in zip(now, self._told, strict=True))
        self._told = now
        return sent, received, requests

    def durable(self, told: tuple[int, int, int]) -> None:
        """Mark counts of `untold` as reported, because the reply that carries them is durable.

        The next process does not report them again. A process that dies before this call reports them twice: in the
        reply, and in the one after it. A process that dies after it reported a failure, and before the journal has that
        failure, loses them. Counts for a reply that could not be stored are reported by the next process, not by this
        one.
        """
        for i in range(3):
            self._kept[3 + i] += told[i]


@dataclass(eq=False)
class Connection:
    """Holds a TCP connection of the device API.

    `signed` is True once a request on it was admitted. Times are seconds of `ConnectionTable.now`. `head_since` is set
    while a request's line and headers are awaited. `body_since` begins the window in which the speed of a body is
    measured; `body_bytes` arrived in it. `unsent` gives the bytes that the socket has not accepted yet.
    """

    address: str = ""
    tls: bool = False
    account: TrafficCounter = field(default_factory=TrafficCounter)
    open: bool = True
    signed: bool = False
    opened_at: float = 0.0
    head_since: float | None = None
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
        if self.head_since is not None and now - self.head_since > HEAD_S:
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

    def came(self, wire: Connection, transport: asyncio.Transport) -> None:
        """Register a new connection; the oldest unauthenticated one is aborted if there are too many."""
        peer: Any = transport.get_extra_info("peername")
        wire.address, wire.opened_at = str(peer[0]) if peer else "", self.now()
        wire.head_since = wire.opened_at
        too_many = self.strangers.came(wire, wire.address, self.known.holds(wire.address, self.wall()))
        if too_many is not None:
            too_many.abort()
            self.went(too_many)
        self.open.add(wire)
        wire.abort, wire.unsent = transport.abort, transport.get_write_buffer_size
        found = transport.get_extra_info("socket")
        if found is not None:
            with contextlib.suppress(OSError):  # the socket may be closed already
                notice_the_dead(found)

    def sign(self, wire: Connection) -> None:
        """Mark a connection as authenticated, and note its address as known."""
        if not wire.signed and wire.open:
            wire.signed = True
            self.strangers.gone(wire)
            self.known.note(wire.address, self.wall())

    def went(self, wire: Connection) -> None:
        """Remove a closed connection, and call its `on_close`."""
        if wire in self.open:
            self.open.discard(wire)
            wire.open = False
            wire.account.wires.pop(wire, None)
            self.strangers.gone(wire)
            wire.on_close()

    def watch(self) -> None:
        """Abort every connection that is too slow."""
        now = self.now()
        for wire in [wire for wire in self.open if wire.too_slow(now)]:
            wire.abort()


def notice_the_dead(found: socket.socket) -> None:
    """Set the socket's keepalive and timeout, so that the system ends a connection whose peer has vanished.

    A silent connection is probed. Bytes that the peer does not acknowledge for 60 s end the connection.
    """
    found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 60),
        ("TCP_KEEPINTVL", 20),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 60_000),
    ):
        if hasattr(socket, option):
            found.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def wire_of(scope: Any) -> Connection:
    """Return the connection that an ASGI scope belongs to."""
    wire: Connection = scope["extensions"]["thinwire"]["wire"]
    return wire


def admitted_of(scope: Any) -> AuthenticatedRequest:
    """Return the admitted request that an ASGI scope belongs to."""
    admitted: AuthenticatedRequest = scope["extensions"]["thinwire"]["admitted"]
    return admitted


NAME_BYTES = 64
NUMBERS = 6  # sent, received, requests, and how much of each was reported
MOST = 2**53  # a larger number means a damaged record
FIELDS = struct.Struct(f"<{NAME_BYTES}s{NUMBERS}Q")  # followed by their CRC-32
RECORD_BYTES = 128  # padded with zeros, so that no record lies in two blocks of a disk
HEAD = b"thinwire: bytes on the wire, version 1\n".ljust(RECORD_BYTES, b"\0")  # takes the first record's place

log = logging.getLogger("thinwire.door")


class Ledger:
    """The six numbers of each device, by name, in one record of a file each. They begin at 0.

    They stay in memory only if `path` is None, and from the first disk error on, which is logged. It belongs to the
    API's event loop.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._numbers, self._written = dict[str, list[int]](), dict[str, list[int]]()
        self._places = dict[str, int]()
        self._free: Iterator[int] = itertools.count(1)
        if path is not None:
            try:
                self._read(path)
            except OSError as error:
                self._give_up(error)

    def of(self, name: str) -> list[int]:
        """Return the six numbers of a device, to be changed in place."""
        return self._numbers.setdefault(name, [0] * NUMBERS)

    def keep(self, name: str | None = None) -> None:
        """Write the numbers that changed since the last write: those of one device, or of all."""
        names = self._numbers if name is None else (name,)
        changed = [one for one in names if self._numbers[one] != self._written.get(one)]
        if self._path is None or not changed:
            return
        try:
            with _opened(self._path, os.O_WRONLY) as file:
                for one in changed:
                    self._write(file, one)
        except OSError as error:
            with suppress(OSError):
                self._path.unlink()  # its outdated numbers would be reported twice
            self._give_up(error)

    def _write(self, file: int, name: str) -> None:
        if len(called := name.encode()) > NAME_BYTES:
            return  # longer than any device's name
        if name not in self._places:
            self._places[name] = next(self._free)
        numbers = self._numbers[name]
        fields = FIELDS.pack(called, *numbers)
        record = fields + zlib.crc32(fields).to_bytes(4, "little")
        _put(file, record.ljust(RECORD_BYTES, b"\0"), self._places[name] * RECORD_BYTES)
        self._written[name] = list(numbers)

    def _read(self, path: Path) -> None:
        try:
            held = path.read_bytes()
        except FileNotFoundError:
            held = b""
        if not HEAD.startswith(held[:RECORD_BYTES]):
            _put_aside(path)
            held = b""
        if len(held) < RECORD_BYTES:
            with _opened(path, os.O_WRONLY | os.O_CREAT) as file:
                _put(file, HEAD, 0)
        free, places = list[int](), max(1, len(held) // RECORD_BYTES)
        for place in range(1, places):
            name, numbers = _verified(held[place * RECORD_BYTES : (place + 1) * RECORD_BYTES])
            if name and name not in self._places:
                self._places[name], self._numbers[name], self._written[name] = place, numbers, list(numbers)
            else:
                free.append(place)
        self._free = itertools.chain(free, itertools.count(places))

    def _give_up(self, error: OSError) -> None:
        log.warning("bytes on the wire are not counted over a restart: %s", error)
        self._path = None


def _verified(record: bytes) -> tuple[str, list[int]]:
    """Return the name and the numbers of a record.

    The name is "" if the record is damaged. The numbers are zeros if they are impossible.
    """
    fields = record[: FIELDS.size]
    called, *numbers = FIELDS.unpack(fields)
    if record[FIELDS.size : FIELDS.size + 4] != zlib.crc32(fields).to_bytes(4, "little"):
        return "", []
    possible = all(told <= count < MOST for count, told in zip(numbers[:3], numbers[3:], strict=True))
    return called.rstrip(b"\0").decode("utf-8", "replace"), numbers if possible else [0] * NUMBERS


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags, 0o600)
    try:
        yield file
    finally:
        os.close(file)


def _put(file: int, record: bytes, at: int) -> None:
    if (length := os.pwrite(file, record, at)) < len(record):
        raise OSError(f"{length} of {len(record)} bytes could be written")


def _put_aside(path: Path) -> None:
    """Rename a file of another kind or version to a free name."""
    names = (path.with_name(f"{path.name}.old{number}") for number in itertools.count(1))
    aside = next(name for name in names if not name.exists())
    path.rename(aside)
    log.warning("%s holds no counts of this version: it is kept as %s", path, aside.name)
