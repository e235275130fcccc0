"""One keep-alive connection of a device: signed requests, bodies from and to files, and what can go wrong in words."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from thinwire.core.errors import ThinwireError, Unreachable, UsageError
from thinwire.flower.framing import STREAM_BYTES, packed
from thinwire.flower.refusals import Refusal, as_error
from thinwire.flower.routes import HELLO
from thinwire.flower.signing import Signer

TIMEOUT_S = 30.0  # without a byte for so long, beyond what a pull waits anyway


class Connection:
    """Used by one thread at a time. `post` yields the answer of a 200; all else is raised: `Refusal` as the door said
    it, `Unreachable` when nobody answers. A request on a connection that the other end had closed is made again.
    """

    def __init__(self, url: str, signer: Signer) -> None:
        self.url, self._signer = url, signer
        self._host, self._port = _address(url)
        self._busy = threading.Lock()
        self._http: http.client.HTTPConnection | None = None
        self._closed = False

    @contextmanager
    def post(
        self, path: str, head: bytes, bundle: Path | None = None, length: int = 0, wait_s: float = 0.0
    ) -> Iterator[http.client.HTTPResponse]:
        with self._busy:
            try:
                answer = self._once_or_again(path, head, bundle, length, wait_s)
                if answer.status != 200:
                    raise Refusal.read(answer.status, answer.read(65_536))
                yield answer
            except (OSError, http.client.HTTPException) as error:
                self._drop()
                raise self._unreachable(error) from error
            except BaseException:
                self._drop()  # its answer may not have been read to the end
                raise

    def close(self) -> None:
        """From any thread: whoever waits on it stops waiting."""
        self._closed = True
        made = self._http
        if made is not None and made.sock is not None:
            with contextlib.suppress(OSError):  # it was closed already
                made.sock.shutdown(socket.SHUT_RDWR)
        if self._busy.acquire(timeout=1.0):
            try:
                self._drop()
            finally:
                self._busy.release()

    def _once_or_again(
        self, path: str, head: bytes, bundle: Path | None, length: int, wait_s: float
    ) -> http.client.HTTPResponse:
        if self._http is not None:
            try:
                return self._request(path, head, bundle, length, wait_s)
            except (ConnectionError, http.client.BadStatusLine):  # it was closed while it lay idle
                self._drop()
        return self._request(path, head, bundle, length, wait_s)

    def _request(
        self, path: str, head: bytes, bundle: Path | None, length: int, wait_s: float
    ) -> http.client.HTTPResponse:
        connection = self._open()
        if connection.sock is not None:
            connection.sock.settimeout(wait_s + TIMEOUT_S)
        body = packed(head) + (bundle.read_bytes() if bundle is not None and length else b"")
        connection.putrequest("POST", path, skip_accept_encoding=True)
        digest = hashlib.sha256(body).digest()
        for name, value in self._signer.headers("POST", path, digest, len(body), whole_key=path == HELLO).items():
            connection.putheader(name, value)
        connection.putheader("content-length", str(len(body)))
        connection.endheaders(body)
        return connection.getresponse()

    def _open(self) -> http.client.HTTPConnection:
        if self._closed:
            raise ConnectionAbortedError("this link was closed")
        if self._http is None:
            made = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S, blocksize=STREAM_BYTES)
            made.connect()
            self._http = made
        return self._http

    def _drop(self) -> None:
        if self._http is not None:
            self._http.close()
            self._http = None

    def _unreachable(self, error: Exception) -> ThinwireError:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if self._closed:
            return Unreachable("this link was closed", why=why)
        return Unreachable(
            f"cannot reach the aggregator at {self.url}",
            why=why,
            hint="start it there (thinwire aggregator start), or give its address: --aggregator URL",
        )


@contextmanager
def in_words(url: str) -> Iterator[None]:
    """Let a refusal out as what it means on a device."""
    try:
        yield
    except Refusal as refusal:
        raise as_error(refusal, url) from refusal


def _address(url: str) -> tuple[str, int]:
    """Host and port of http://HOST:PORT."""
    try:
        parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f"{url!r} is no address", why=str(error), hint="http://127.0.0.1:9090") from error
    if parts.scheme != "http" or not host:
        raise UsageError(
            f"{url!r} is no address of an aggregator", why="http://HOST:PORT is", hint="http://127.0.0.1:9090"
        )
    return host, port or 9090
