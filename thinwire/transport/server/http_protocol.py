"""The asyncio protocols under the device API: TLS, then HTTP, with bounds and byte counts.

A connection is counted before its TLS handshake. A request is judged when its headers are complete: a refused request
never becomes a request of uvicorn. The protocols extend asyncio's `SSLProtocol` and uvicorn's `HttpToolsProtocol`, and
use a few of their private names.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from asyncio.sslproto import SSLProtocol
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from thinwire.transport.protocol.http import ApiError
from thinwire.transport.server.auth import RequestHeader
from thinwire.transport.server.connections import (
    HANDSHAKE_S,
    HEADER_BYTES,
    MAX_REFUSED_OF_CONNECTION,
    Connection,
    ConnectionTable,
)

UNREAD_BYTES = 64 * 2**10  # refusals that wait for a peer; one that reads none of them is disconnected
SWALLOWED_BYTES = 64 * 2**10  # of a refused request's body; above it the connection ends after the response
LINGER_S = 2.0  # how long a refused sender may still read the response
SSL_BUFFER_BYTES = 64 * 2**10  # while a body arrives
IDLE_BUFFER_BYTES = 4 * 2**10  # otherwise: each of hundreds of strangers and thousands of waiting devices has one

log = logging.getLogger("thinwire.device_api")


def protocol_of(wires: ConnectionTable) -> asyncio.BaseProtocol:
    """Return the protocol of a new connection."""
    wire = Connection(tls=wires.tls is not None)
    http = HttpProtocol(wires, wire)
    return http if wires.tls is None else TlsProtocol(wires, wire, http, wires.tls)


class CountedTransport:
    """A transport that counts the bytes written to it, and delegates everything else."""

    def __init__(self, transport: asyncio.Transport, wire: Connection) -> None:
        self._transport, self._wire = transport, wire

    def write(self, data: bytes) -> None:
        """Count and write the bytes."""
        self._wire.account.sent_bytes += len(data)
        self._transport.write(data)

    def writelines(self, pieces: Any) -> None:
        """Count and write the pieces."""
        self.write(b"".join(pieces))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class TlsProtocol(SSLProtocol):
    """asyncio's TLS under `HttpProtocol`, so that strangers are counted before their handshake, and all bytes after it.

    Its buffer is small except while a body arrives.
    """

    max_size = IDLE_BUFFER_BYTES

    def __init__(self, wires: ConnectionTable, wire: Connection, http: HttpProtocol, context: ssl.SSLContext) -> None:
        super().__init__(
            asyncio.get_running_loop(), http, context, cast(Any, None), server_side=True,
            ssl_handshake_timeout=cast(Any, HANDSHAKE_S), ssl_shutdown_timeout=cast(Any, LINGER_S),
        )  # fmt: skip
        self._wires, self._wire = wires, wire

    def connection_made(self, transport: Any) -> None:
        """Register the connection, and begin the handshake."""
        self._wires.add(self._wire, transport)
        super().connection_made(cast(Any, CountedTransport(transport, self._wire)))

    def get_buffer(self, n: int) -> memoryview:
        """Return the buffer for the next bytes: a large one while a body arrives, else a small one."""
        most = SSL_BUFFER_BYTES if self._wire.body_since is not None and self._wire.body_bytes else IDLE_BUFFER_BYTES
        if most != self.max_size:
            self.max_size = most  # type: ignore[misc]  # asyncio reads it from the instance
            self._ssl_buffer = bytearray(most)
            self._ssl_buffer_view = memoryview(self._ssl_buffer)
        return super().get_buffer(n)

    def buffer_updated(self, nbytes: int) -> None:
        """Count the received bytes and decrypt them."""
        self._wire.account.received_bytes += nbytes
        super().buffer_updated(nbytes)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Remove the connection."""
        super().connection_lost(exc)
        self._wires.remove(self._wire)


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, with each request judged at its headers.

    A refused request never becomes one of uvicorn's. The app finds the `Connection` and the `AuthenticatedRequest` of
    every other request in its scope (`Request` in app.py).
    """

    def __init__(self, wires: ConnectionTable, wire: Connection) -> None:
        super().__init__(wires.config, wires.state, {})
        self.wires, self.wire = wires, wire
        self._refused = False
        self._in_header, self._header_bytes = True, 0
        self._refusals, self._refusing = 0, False  # refused signatures so far; a refusal is being sent
        self._over = False  # the last response is sent: further bytes are ignored

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Register a plain connection, and set how it is closed."""
        if not self.wire.tls:
            self.wires.add(self.wire, transport)

        def close() -> None:
            if not transport.is_closing():  # a second close would clear asyncio's TLS state, which uvicorn still reads
                transport.close()

        self.wire.close = close
        counted = transport if self.wire.tls else CountedTransport(transport, self.wire)
        super().connection_made(counted)  # type: ignore[arg-type]  # it acts as one

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection, and call its `on_close`."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # after a reset uvicorn's timer would go on and keep this object alive
        if not self.wire.tls:
            self.wires.remove(self.wire)
        self.wire.open = False
        self.wire.on_close()

    def data_received(self, data: bytes) -> None:
        """Count and parse bytes; abort the connection if a request's line and headers exceed `HEADER_BYTES`."""
        self._refusing = False
        if not self.wire.tls:
            self.wire.account.received_bytes += len(data)
        if self._in_header:
            left = HEADER_BYTES - self._header_bytes
            self._header_bytes += len(data)
            if len(data) > left:
                self._parse(data[:left])
                if self._header_bytes > HEADER_BYTES:  # the limit is reached and the headers are not complete
                    self.wire.abort()
                    return
                data = data[left:]
        self._parse(data)

    def _parse(self, data: bytes) -> None:
        if not (self._over or self.transport.is_closing()):
            super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        """Close the connection without a response, because bytes that are not HTTP name no known path."""
        self.wire.close()

    def on_message_begin(self) -> None:
        """Begin a request, and start the time limit of its headers."""
        super().on_message_begin()
        if self.wire.header_since is None:
            self.wire.header_since = self.wires.now()

    def on_headers_complete(self) -> None:
        """Judge the request: pass it to uvicorn, refuse it, or end the connection."""
        self.wire.header_since = None
        self._in_header, self._header_bytes, self._refused = False, 0, self._over
        if self._over:
            return
        if self._busy():
            self.wire.abort()  # the clients of this package wait for a response before the next request
            self._refused = True
            return
        if self._refusing:  # also pipelined; the peer can still read the refusal
            self._over = self._refused = True
            self.wire.close()
            return
        method = self.parser.get_method().decode("ascii", "replace")
        target = self.url.decode("ascii", "replace")
        headers: dict[bytes, bytes] = {}
        for name, value in self.headers:
            headers[name] = value if name not in headers else b""  # a repeated header counts as missing
        try:
            admitted = self.wires.judge(RequestHeader(method, target, headers, self.wire.address, self.wire.signed))
        except ApiError as refusal:
            self._refuse(target, refusal, headers)
            return
        except Exception:
            log.exception("a defect of Thinwire while a request was authenticated")
            self._refuse(target, ApiError(503, "internal", "a defect"), headers)
            return
        if admitted.length:
            self.wire.body_since, self.wire.body_bytes = self.wires.now(), 0
        self.scope["extensions"] = {"thinwire": {"wire": self.wire, "admitted": admitted}}
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Count a piece of the body; pass it on unless the request was refused."""
        self.wire.body_bytes += len(body)
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request's body."""
        self.wire.body_since, self._in_header = None, True
        if self._refused:
            self._idle()
        else:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """End the response, and wait for the next request."""
        super().on_response_complete()
        self._idle()

    def _busy(self) -> bool:
        cycle: Any = self.cycle  # None before the first request, although uvicorn's annotation excludes it
        return cycle is not None and not cycle.response_complete

    def _idle(self) -> None:
        """Start the time limit for the next request of a stranger.

        A device may wait as long as the server keeps connections.
        """
        if not self.wire.signed:
            self.wire.header_since = self.wires.now()

    def _refuse(self, target: str, refusal: ApiError, headers: dict[bytes, bytes]) -> None:
        """Respond without a request object. The connection stays open if the rest of the body is small."""
        self._refused = self._refusing = True
        self._refusals += refusal.verified or refusal.status == 429
        self.wires.refused(target, refusal)
        if self.transport.get_write_buffer_size() > UNREAD_BYTES:
            self._over = True
            self.wire.abort()
            return
        said = headers.get(b"content-length", b"0")
        known = said.isdigit() and len(said) < 16 and b"transfer-encoding" not in headers
        length = int(said) if known else SWALLOWED_BYTES + 1
        stays = (
            length <= SWALLOWED_BYTES
            and refusal.status != 503
            and self._refusals < MAX_REFUSED_OF_CONNECTION
            and b"close" not in headers.get(b"connection", b"").lower()
        )
        body = b"" if self.parser.get_method() == b"HEAD" else refusal.body(self.wires.wall())
        lines = [b"HTTP/1.1 %d -" % refusal.status, b"content-length: %d" % len(body)]
        if body:
            lines.append(b"content-type: application/json")
        lines += [b"%s: %s" % pair for pair in refusal.headers()]
        if not stays:
            lines.append(b"connection: close")
        self.transport.write(b"\r\n".join([*lines, b"", body]))
        self._over = not stays
        if stays:
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        elif not length:
            self.wire.close()
        else:
            self.loop.call_later(LINGER_S, self.wire.close)  # if closed at once, the peer would never read the response
