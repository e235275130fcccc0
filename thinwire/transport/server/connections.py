"""A connection at the door: whose bytes it carries, how slow it may be, and how many there are of whom.

Bytes are those of the TCP socket, TLS included. What passed before its device was known is charged to it then.
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

from thinwire.transport.protocol.http import Refusal
from thinwire.transport.server.auth import Admitted, Judge
from thinwire.transport.server.limits import (
    BODY_BYTES_A_SECOND,
    BODY_WINDOW_S,
    CONNECTIONS_OF_ONE,
    HEAD_S,
    UNSIGNED_S,
    KnownAddresses,
    Strangers,
)


class Account:
    """Bytes and requests of one device, over all of its connections. Touched by the door's loop alone.

    `kept` are six numbers that may outlive this process (`Ledger`): these three, and what of each was told before.
    """

    def __init__(self, kept: list[int] | None = None, max_wires: int = CONNECTIONS_OF_ONE) -> None:
        self.max_wires = max_wires
        self._kept = [0] * NUMBERS if kept is None else kept
        for i in range(3):  # of a life before only what is not told yet matters
            self._kept[i], self._kept[3 + i] = self._kept[i] - self._kept[3 + i], 0
        self._told = [0, 0, 0]
        self.wires: dict[Wire, None] = {}  # that are open, oldest first

    @property
    def sent_bytes(self) -> int:
        return self._kept[0]

    @sent_bytes.setter
    def sent_bytes(self, count: int) -> None:
        self._kept[0] = count

    @property
    def received_bytes(self) -> int:
        return self._kept[1]

    @received_bytes.setter
    def received_bytes(self, count: int) -> None:
        self._kept[1] = count

    @property
    def requests(self) -> int:
        return self._kept[2]

    @requests.setter
    def requests(self, count: int) -> None:
        self._kept[2] = count

    def untold(self) -> tuple[int, int, int]:
        """(sent, received, requests) since the last time that this was asked."""
        now = [self._kept[i] for i in range(3)]
        sent, received, requests = (count - told for count, told in zip(now, self._told, strict=True))
        self._told = now
        return sent, received, requests

    def durable(self, told: tuple[int, int, int]) -> None:
        """What `untold` gave is in an answer that outlives this process, and is not told again by the next.

        A process that dies between the two has it told twice: with the answer, and with that after it. One that dies
        when a failure was reported and is not in the journal yet has it told never. What was given for an answer that
        could not be stored is told by the next process, not by this one.
        """
        for i in range(3):
            self._kept[3 + i] += told[i]


@dataclass(eq=False)
class Wire:
    """One connection. `signed` once a request on it was let in; `watch` ends it when it is too slow."""

    address: str = ""
    tls: bool = False
    account: Account = field(default_factory=Account)
    open: bool = True
    signed: bool = False
    opened_at: float = 0.0
    head_since: float | None = None  # a request's head is on its way
    body_since: float | None = None  # the window in which a body's speed is measured
    body_bytes: int = 0
    on_close: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None
    abort: Callable[[], None] = lambda: None
    unsent: Callable[[], int] = lambda: 0  # bytes that the socket has not taken yet

    def belongs_to(self, account: Account) -> None:
        """From now on its bytes are charged there; of more than `max_wires` the oldest is ended."""
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
        """Whether it keeps us waiting: for a signature, for the end of a head, or for a body's next KiB."""
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
class Wires:
    """All that connections share: who judges, how many strangers there are, and which are open."""

    judge: Judge
    config: uvicorn.Config
    tls: ssl.SSLContext | None
    now: Callable[[], float]
    wall: Callable[[], float]
    state: ServerState = field(default_factory=ServerState)
    strangers: Strangers[Wire] = field(default_factory=Strangers)
    known: KnownAddresses = field(default_factory=KnownAddresses)
    open: set[Wire] = field(default_factory=set)
    refused: Callable[[str, Refusal], None] = lambda target, refusal: None

    def came(self, wire: Wire, transport: asyncio.Transport) -> None:
        """Count a connection in; the oldest that nobody signed on makes room for it."""
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
            with contextlib.suppress(OSError):  # a socket that went away meanwhile
                notice_the_dead(found)

    def sign(self, wire: Wire) -> None:
        """The connection is a device's from now on."""
        if not wire.signed and wire.open:
            wire.signed = True
            self.strangers.gone(wire)
            self.known.note(wire.address, self.wall())

    def went(self, wire: Wire) -> None:
        if wire in self.open:
            self.open.discard(wire)
            wire.open = False
            wire.account.wires.pop(wire, None)
            self.strangers.gone(wire)
            wire.on_close()

    def watch(self) -> None:
        """End what is too slow."""
        now = self.now()
        for wire in [wire for wire in self.open if wire.too_slow(now)]:
            wire.abort()


def notice_the_dead(found: socket.socket) -> None:
    """Let the system end a connection whose other end has vanished: silent ones are tried, unread data is given up."""
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


def wire_of(scope: Any) -> Wire:
    wire: Wire = scope["extensions"]["thinwire"]["wire"]
    return wire


def admitted_of(scope: Any) -> Admitted:
    admitted: Admitted = scope["extensions"]["thinwire"]["admitted"]
    return admitted


# Counts that outlive their process: six numbers a device, each device's in a record of its own in a file.
#
# They are written where they changed, when `keep` is called, into the system's memory: a kill loses what was counted
# since, a power cut up to half a minute. A backup does not hold them. What does not verify counts as nothing.


NAME_BYTES = 64
NUMBERS = 6  # sent, received, requests, and what of each was told
MOST = 2**53  # a number is less, or damaged
FIELDS = struct.Struct(f"<{NAME_BYTES}s{NUMBERS}Q")  # and their CRC-32 behind them
RECORD_BYTES = 128  # with zeros to the end: no record lies in two blocks of a disk
HEAD = b"thinwire: bytes on the wire, version 1\n".ljust(RECORD_BYTES, b"\0")  # in the place of the first record

log = logging.getLogger("thinwire.door")


class Ledger:
    """The numbers by name, all 0 at first. They are in memory alone where `path` is None, and from the first error of
    the disk on, which is logged. Belongs to the door's loop.
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
        """The numbers of a device, to be changed in place."""
        return self._numbers.setdefault(name, [0] * NUMBERS)

    def keep(self, name: str | None = None) -> None:
        """Write what has changed since it was written: of this device, or of all."""
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
                self._path.unlink()  # its numbers grow old, and would be told twice
            self._give_up(error)

    def _write(self, file: int, name: str) -> None:
        if len(called := name.encode()) > NAME_BYTES:
            return  # no device's is
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
    """Name and numbers of a record; no name where it is damaged, zeros where they cannot be."""
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
    """Keep a file that is not ours, or is of another version, under a name that is free."""
    names = (path.with_name(f"{path.name}.old{number}") for number in itertools.count(1))
    aside = next(name for name in names if not name.exists())
    path.rename(aside)
    log.warning("%s holds no counts of this version: it is kept as %s", path, aside.name)
