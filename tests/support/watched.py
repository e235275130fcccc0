"""A device API whose connections are watched, and raw sockets to it."""

from __future__ import annotations

import contextlib
import gc
import socket
import ssl
from pathlib import Path

from tests.support.callers import PATIENCE_S, Caller, TlsPlace
from tests.support.fleet_words import until
from thinwire.core.clock import VirtualClock
from thinwire.transport.server.http_protocol import HttpProtocol

ASSIGNMENT_CA = b"GET /tw/v1/ca HTTP/1.1\r\nhost: x\r\n\r\n"


ASSIGNMENT_NOTHING = b"GET /nothing HTTP/1.1\r\nhost: x\r\n\r\n"


class Watched(TlsPlace):
    """A device API whose patience is moved on by hand."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.patience = VirtualClock()
        self.wires = self.fleet._listener.wires
        self.wires.now = self.patience.now

    def later(self, seconds: float) -> None:
        """So much time passes, and the device API looks around."""
        self.fleet._listener.now(lambda: self.patience.advance(seconds))
        self.fleet._listener.now(self.wires.watch)

    @property
    def open(self) -> int:
        return len(self.wires.open)


def plain(here: Watched) -> socket.socket:
    """A TCP connection that the device API has seen."""
    before = set(here.wires.open)
    raw = socket.create_connection(here.address, timeout=PATIENCE_S)
    until(lambda: set(here.wires.open) - before)
    return raw


def tls(here: Watched) -> ssl.SSLSocket:
    assert here.authority is not None
    return here.context().wrap_socket(plain(here), server_hostname=here.authority.server_name())


def heard(raw: socket.socket) -> bytes:
    """All that comes until the other end hangs up."""
    came = b""
    with contextlib.suppress(ConnectionError, ssl.SSLEOFError):
        while data := raw.recv(65_536):
            came += data
    raw.close()
    return came


def answered(line: socket.socket, request: bytes) -> bytes:
    """The status line of the answer to a request on a connection that stays."""
    line.sendall(request)
    came, wanted = b"", 0
    while b"\r\n\r\n" not in came or len(came.partition(b"\r\n\r\n")[2]) < wanted:
        data = line.recv(65_536)
        assert data, f"it was hung up after {came[:80]!r}"
        came += data
        header = came.partition(b"\r\n\r\n")[0].lower().split(b"\r\n")
        wanted = next((int(each.split(b":")[1]) for each in header if each.startswith(b"content-length")), 0)
    return came.partition(b"\r\n")[0]


def hello_of_tls() -> bytes:
    """The first flight of a handshake."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="x.invalid").do_handshake()
    return outgoing.read()


def request_of(caller: Caller, method: str, path: str, body: bytes, length: int, digest: bytes) -> bytes:
    signed = caller.signer.headers(method, path, digest, length)
    lines = "".join(f"{name}: {value}\r\n" for name, value in signed.items())
    return f"{method} {path} HTTP/1.1\r\nhost: x\r\n{lines}content-length: {length}\r\n\r\n".encode() + body


def kept(here: Watched) -> list[HttpProtocol]:
    """By type alone: some objects of other tests warn when they are requested their class."""
    found = [each for each in gc.get_objects() if type(each) is HttpProtocol]
    return [each for each in found if each.wires is here.wires]
