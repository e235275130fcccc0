"""The device's HTTP client: one keep-alive connection with signed requests, and responses of bounded length.

`Connection` sends a `HttpRequest` and yields its response. It corrects the clock that is signed, and ends when this
machine gets another address. A response is read by its length, so that a cut is noticed. `PollingReader` reads a socket
that may be silent for minutes.
"""

from __future__ import annotations

import hashlib
import http.client
import io
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thinwire.core.errors import BadPayload, ReplyUnreadable
from thinwire.transport.device.connect import Address, TlsConnection, dial, has_new_address
from thinwire.transport.device.identity import ServerClock, Trust
from thinwire.transport.protocol.http import INLINE_BYTES, LENGTH, ApiError, inflate
from thinwire.transport.protocol.signing import NOTHING, Signer

SILENT_S = 60.0  # time-out without a byte, added to a pull's wait; also the time-out for each piece that is sent
ADDRESS_CHECK_S = 5.0  # how often a waiting connection checks this machine's address
PIECE_BYTES = 64 * 2**10  # sent in one step: an uplink of 2 kB/s needs less than SILENT_S
SLOWEST_BYTES_A_S = 2**10  # of an uplink: what the kernel still has to send delays the response
MAX_REFUSAL_BYTES = 65_536


class AddressChanged(ConnectionError):
    """Raised if this machine gets another address; the request in progress is then repeated at once."""


class Connection:
    """Holds a connection to the aggregator, used by one thread at a time, except for `close`.

    A refusal of the aggregator is raised as `ApiError`. OSError and `http.client.HTTPException` mean that nobody
    answers. If the aggregator refuses a timestamp, the clock takes over the aggregator's time, and the request is
    repeated once.
    """

    def __init__(
        self,
        address: Address,
        signer: Signer,
        clock: ServerClock,
        trust: Callable[[], Trust | None] = lambda: None,
        *,
        check_every_s: float = ADDRESS_CHECK_S,
        has_new_address: Callable[[TlsConnection], bool] = lambda line: has_new_address(line.sock),
    ) -> None:
        self.address, self._signer, self._clock, self._trust = address, signer, clock, trust
        self._check_every_s, self._has_new_address = check_every_s, has_new_address
        self._busy = threading.Lock()
        self._line: TlsConnection | None = None
        self._http: http.client.HTTPConnection | None = None
        self._inlet: PollingReader | None = None
        self._wait_s = 0.0
        self.closed = False
        self._is_peer_known = False  # the peer is the process with which the device registered last

    @contextmanager
    def request(self, request: HttpRequest) -> Iterator[http.client.HTTPResponse]:
        """Send a request, and yield its response; the connection is dropped if the response was not read completely."""
        with self._busy:
            try:
                response = self._exchange(request)
                yield response
                if not response.isclosed() or response.will_close:
                    self._drop()  # its rest would be read as the next response
            except ApiError:
                raise
            except BaseException:
                self._drop()
                raise

    def open(self) -> float:
        """Connect if the connection is not open, and return one round trip in seconds."""
        with self._busy:
            try:
                return self._opened().rtt_s
            except BaseException:
                self._drop()
                raise

    def require_dates(self) -> None:
        """Raise `Unreachable` if the peer's certificate is not valid now, as far as the time is known."""
        if self._line is not None and self._line.dates is not None:
            self._clock.require_valid(*self._line.dates, str(self.address))

    def mark_peer_known(self) -> None:
        """Record that the peer of this connection is the process with which the device registered."""
        self._is_peer_known = self._line is not None

    def is_peer_known(self) -> bool:
        """Return True if the connection is open, and its peer is the process with which the device registered.

        While another thread uses the connection, the answer is what that thread has seen.
        """
        if self._busy.acquire(blocking=False):
            try:
                if self._inlet is not None and self._inlet.has_input():
                    self._drop()
            finally:
                self._busy.release()
        return self._is_peer_known

    def close(self) -> None:
        """Close the connection for good, from any thread; a thread that waits on it stops waiting."""
        self.closed = True
        if (line := self._line) is not None:
            line.hang_up()
        if self._busy.acquire(timeout=1.0):
            try:
                self._drop()
            finally:
                self._busy.release()

    def _exchange(self, request: HttpRequest) -> http.client.HTTPResponse:
        try:
            return self._exchange_once(request)
        except ApiError as refusal:
            if refusal.kind != "clock" or not refusal.now:
                raise
            self._clock.learn(refusal.now)
        return self._exchange_once(request)

    def _exchange_once(self, request: HttpRequest) -> http.client.HTTPResponse:
        if self._inlet is not None and self._inlet.has_input():
            self._drop()  # the peer closed it while it was idle
        line = self._opened()
        self.require_dates()
        whole = self._send(request, line)
        assert self._http is not None
        self._wait_s = request.wait_s + min(request.length, INLINE_BYTES) / SLOWEST_BYTES_A_S
        response = self._http.getresponse()
        if response.chunked and response.status < 400:
            raise http.client.HTTPException("an answer in chunks, which no aggregator gives")
        if response.status < 400:
            return response
        # http.client would read a chunk of -1 bytes endlessly. A response that stays unread ends the connection.
        body = b"" if response.chunked else response.read(MAX_REFUSAL_BYTES)
        refusal = ApiError.read(response.status, body, {name.lower(): value for name, value in response.getheaders()})
        if not whole or not response.isclosed() or response.will_close:
            self._drop()
        raise refusal

    def _send(self, request: HttpRequest, line: TlsConnection) -> bool:
        """Send the request; return False if the peer responded before it had the whole request."""
        connection = self._http
        assert connection is not None
        line.sock.settimeout(SILENT_S)
        connection.putrequest(request.method, request.target, skip_accept_encoding=True)
        signed = self._signer.headers(
            request.method, request.target, request.digest, request.length, whole_key=request.whole_key
        )
        for name, value in {**signed, **request.headers}.items():
            connection.putheader(name, value)
        if request.method in ("POST", "PUT"):
            connection.putheader("content-length", str(request.length))
        if isinstance(request.body, bytes) and request.length <= PIECE_BYTES:
            connection.endheaders(request.body or None)
            return True
        connection.endheaders()
        return self._stream(connection, request.body)

    def _stream(self, connection: http.client.HTTPConnection, body: bytes | FileRange) -> bool:
        assert self._inlet is not None
        for data in _pieces(body):
            if self._inlet.has_input():
                return False
            try:
                connection.send(data)
            except (BrokenPipeError, ConnectionResetError):
                return False  # the response may have arrived all the same
        return True

    def _opened(self) -> TlsConnection:
        if self.closed:
            raise ConnectionAbortedError("this link was closed")
        if self._line is None:
            self._line = line = dial(self.address, self._trust())
            if self.closed:
                raise ConnectionAbortedError("this link was closed")
            self._inlet = PollingReader(line.sock, self._check_every_s, self._check_silence)
            self._http = connection = http.client.HTTPConnection(self.address.host, self.address.port)
            connection.auto_open = 0  # only `dial` connects, because it verifies the peer
            connection.sock = self._inlet
        return self._line

    def _check_silence(self, silent_s: float) -> None:
        """Raise if this machine's address changed or the silence lasts too long; called regularly during silence."""
        if self._line is not None and self._has_new_address(self._line):
            raise AddressChanged("this machine's address has changed")
        if silent_s >= self._wait_s + SILENT_S:
            raise TimeoutError(f"nothing came for {silent_s:.0f} s")

    def _drop(self) -> None:
        line, self._line, self._inlet = self._line, None, None
        self._is_peer_known = False
        if self._http is not None:
            self._http.close()
            self._http = None
        if line is not None:
            line.sock.close()


@contextmanager
def translate_disk_errors(path: Path) -> Iterator[None]:
    """Translate an `OSError` while a reply is read from its file; outside of it an `OSError` is the network's."""
    try:
        yield
    except OSError as error:
        raise ReplyUnreadable(f"cannot read {path}", why=error.strerror or str(error)) from error


MAX_REST_BYTES = INLINE_BYTES  # inline parts that do not fit on this disk; nothing else stays unread


@dataclass(frozen=True)
class FileRange:
    """A part of a file from byte `start` on. `digest` is the one that is signed: that of the whole part."""

    path: Path
    start: int
    length: int
    digest: bytes


def _pieces(body: bytes | FileRange) -> Iterator[bytes]:
    """Yield a body in the pieces that are sent; raise `ReplyUnreadable` if its file is not readable."""
    if isinstance(body, bytes):
        yield from (body[at : at + PIECE_BYTES] for at in range(0, len(body), PIECE_BYTES))
        return
    left = body.length
    with translate_disk_errors(body.path), open(body.path, "rb", buffering=0) as file:
        file.seek(body.start)
        while left:
            data = file.read(min(PIECE_BYTES, left))
            if not data:
                raise ReplyUnreadable(f"{body.path} is shorter than its header says")
            left -= len(data)
            yield data


@dataclass(frozen=True)
class HttpRequest:
    """Describes a request. `wait_s` is how long the aggregator may hold back the response on purpose."""

    method: str
    target: str
    body: bytes | FileRange = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    wait_s: float = 0.0
    whole_key: bool = False

    @property
    def length(self) -> int:
        """Return the body's length in bytes."""
        return self.body.length if isinstance(self.body, FileRange) else len(self.body)

    @property
    def digest(self) -> bytes:
        """Return the SHA-256 that is signed for the body."""
        if isinstance(self.body, FileRange):
            return self.body.digest
        return hashlib.sha256(self.body).digest() if self.body else NOTHING


def read_block(response: http.client.HTTPResponse, most: int) -> bytes:
    """Read the next block of a body; raise `BadPayload` if it is larger than `most` bytes."""
    (length,) = LENGTH.unpack(read_exactly(response, LENGTH.size))
    if length > most:
        raise BadPayload(f"a block of {length} bytes", why=f"at most {most} are read")
    data = read_exactly(response, length)
    try:
        return inflate(data, most) if data else b""
    except ValueError as error:
        raise BadPayload("cannot read what the aggregator says", why=str(error)) from error


def read_rest(response: http.client.HTTPResponse) -> None:
    """Read the rest of a response if it is short; a longer rest stays unread, which drops the connection."""
    if response.length is not None and response.length > MAX_REST_BYTES:
        return
    rest = len(response.read(MAX_REST_BYTES + 1))
    if rest <= MAX_REST_BYTES and response.length:
        raise http.client.IncompleteRead(b"", response.length)


def read_all(response: http.client.HTTPResponse, most: int) -> bytes:
    """Return the rest of a body; raise an error of the network if it is cut short.

    `read(count)` alone would not notice a cut.
    """
    if response.length is None or response.length > most:
        raise BadPayload(f"an answer of {response.length} bytes", why=f"at most {most} are read")
    return response.read()


def read_exactly(response: http.client.HTTPResponse, count: int) -> bytes:
    """Return `count` bytes of a body; raise `http.client.IncompleteRead` if fewer arrive."""
    data = response.read(count) if count else b""
    if len(data) != count:
        raise http.client.IncompleteRead(data, count - len(data))
    return data


_NOT_YET = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class PollingReader:
    """A socket as http.client sees it: something to send on, and a file to read from. It may stay silent for minutes.

    `has_input` reads the bytes that arrived already, without waiting; the file returns them later. `on_silence` is
    called every `check_every_s` seconds of silence with its duration, and ends the wait by raising.
    """

    def __init__(self, sock: socket.socket, check_every_s: float, on_silence: Callable[[float], None]) -> None:
        self._sock, self._check_every_s, self._on_silence = sock, check_every_s, on_silence
        self._ahead = b""

    def has_input(self) -> bool:
        """Return True if the peer sent something or closed the connection. TLS's own messages do not count."""
        before = self._sock.gettimeout()
        self._sock.settimeout(0.0)
        try:
            self._ahead += self._sock.recv(65_536)
        except _NOT_YET:
            return False
        except OSError:
            return True
        finally:
            self._sock.settimeout(before)
        return True

    def makefile(self, mode: str, *_: Any) -> io.BufferedReader:
        """Return a file that reads from this socket."""
        return io.BufferedReader(_Reading(self))

    def sendall(self, data: Any) -> None:
        """Send all bytes."""
        self._sock.sendall(data)

    def close(self) -> None:
        """Do nothing.

        http.client calls it when it is done, although a response may not be read yet. The connection's owner closes the
        socket.
        """

    def read_into(self, buffer: Any) -> int:
        """Fill a buffer with the next bytes, and return their number."""
        if self._ahead:
            data, self._ahead = self._ahead[: len(buffer)], self._ahead[len(buffer) :]
            buffer[: len(data)] = data
            return len(data)
        began = time.monotonic()
        self._sock.settimeout(self._check_every_s)
        while True:
            try:
                return self._sock.recv_into(buffer)
            except TimeoutError:
                self._on_silence(time.monotonic() - began)


class _Reading(io.RawIOBase):
    def __init__(self, inlet: PollingReader) -> None:
        self._inlet = inlet

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._inlet.read_into(memoryview(buffer).cast("B"))
