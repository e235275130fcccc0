"""The bytes of a connection become requests: TLS under HTTP, each bounded and counted, and judged at its head."""

from __future__ import annotations

import asyncio
import logging
import ssl
from asyncio.sslproto import SSLProtocol
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from thinwire.transport.protocol.http import Refusal
from thinwire.transport.server.auth import Head
from thinwire.transport.server.connections import Wire, Wires
from thinwire.transport.server.limits import HANDSHAKE_S, HEAD_BYTES, MAX_REFUSED_OF_CONNECTION

UNREAD_BYTES = 64 * 2**10  # of refusals that wait for their reader: who reads none of them is cut off
SWALLOWED_BYTES = 64 * 2**10  # of a refused request's body: who sends more is cut off when the answer is out
LINGER_S = 2.0  # how long a refused sender gets to see why
SSL_BUFFER_BYTES = 64 * 2**10  # while a body comes in
IDLE_BUFFER_BYTES = 4 * 2**10  # else: hundreds of strangers and thousands of waiting devices have one each

log = logging.getLogger("thinwire.door")


def protocol_of(wires: Wires) -> asyncio.BaseProtocol:
    """The protocol of a connection that comes."""
    wire = Wire(tls=wires.tls is not None)
    http = HttpProtocol(wires, wire)
    return http if wires.tls is None else TlsProtocol(wires, wire, http, wires.tls)


class CountedTransport:
    """A transport that counts what is written; everything else is the transport's own."""

    def __init__(self, transport: asyncio.Transport, wire: Wire) -> None:
        self._transport, self._wire = transport, wire

    def write(self, data: bytes) -> None:
        self._wire.account.sent_bytes += len(data)
        self._transport.write(data)

    def writelines(self, pieces: Any) -> None:
        self.write(b"".join(pieces))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class TlsProtocol(SSLProtocol):
    """asyncio's TLS under our HTTP, so that strangers are counted before their handshake and bytes after it."""

    max_size = IDLE_BUFFER_BYTES

    def __init__(self, wires: Wires, wire: Wire, http: HttpProtocol, context: ssl.SSLContext) -> None:
        super().__init__(
            asyncio.get_running_loop(), http, context, cast(Any, None), server_side=True,
            ssl_handshake_timeout=cast(Any, HANDSHAKE_S), ssl_shutdown_timeout=cast(Any, LINGER_S),
        )  # fmt: skip
        self._wires, self._wire = wires, wire

    def connection_made(self, transport: Any) -> None:
        self._wires.came(self._wire, transport)
        super().connection_made(cast(Any, CountedTransport(transport, self._wire)))

    def get_buffer(self, n: int) -> memoryview:
        most = SSL_BUFFER_BYTES if self._wire.body_since is not None and self._wire.body_bytes else IDLE_BUFFER_BYTES
        if most != self.max_size:
            self.max_size = most  # type: ignore[misc]  # asyncio reads it from the instance
            self._ssl_buffer = bytearray(most)
            self._ssl_buffer_view = memoryview(self._ssl_buffer)
        return super().get_buffer(n)

    def buffer_updated(self, nbytes: int) -> None:
        self._wire.account.received_bytes += nbytes
        super().buffer_updated(nbytes)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._wires.went(self._wire)


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol behind a gate. A refused request never becomes one of uvicorn's; an app finds the `Wire` and
    the `Admitted` of the others in its scope (`wire_of`, `admitted_of`).
    """

    def __init__(self, wires: Wires, wire: Wire) -> None:
        super().__init__(wires.config, wires.state, {})
        self.wires, self.wire = wires, wire
        self._refused = False
        self._in_head, self._head_bytes = True, 0
        self._refusals, self._refusing = 0, False  # of signatures so far; one is on its way
        self._over = False  # the last answer is out: what still comes is not looked at

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        if not self.wire.tls:
            self.wires.came(self.wire, transport)

        def close() -> None:
            if not transport.is_closing():  # asyncio's TLS forgets itself at a second close, and uvicorn still asks it
                transport.close()

        self.wire.close = close
        counted = transport if self.wire.tls else CountedTransport(transport, self.wire)
        super().connection_made(counted)  # type: ignore[arg-type]  # it acts as one

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn leaves it running, and us held, where a connection was reset
        if not self.wire.tls:
            self.wires.went(self.wire)
        self.wire.open = False
        self.wire.on_close()

    def data_received(self, data: bytes) -> None:
        self._refusing = False
        if not self.wire.tls:
            self.wire.account.received_bytes += len(data)
        if self._in_head:
            left = HEAD_BYTES - self._head_bytes
            self._head_bytes += len(data)
            if len(data) > left:
                self._parse(data[:left])
                if self._head_bytes > HEAD_BYTES:  # so much, and it is not over
                    self.wire.abort()
                    return
                data = data[left:]
        self._parse(data)

    def _parse(self, data: bytes) -> None:
        if not (self._over or self.transport.is_closing()):
            super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP has no path that we know, and gets no answer."""
        self.wire.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self.wire.head_since is None:
            self.wire.head_since = self.wires.now()

    def on_headers_complete(self) -> None:
        self.wire.head_since = None
        self._in_head, self._head_bytes, self._refused = False, 0, self._over
        if self._over:
            return
        if self._busy():
            self.wire.abort()  # our clients wait for an answer before they ask again
            self._refused = True
            return
        if self._refusing:  # as above; the refusal itself is still read
            self._over = self._refused = True
            self.wire.close()
            return
        method = self.parser.get_method().decode("ascii", "replace")
        target = self.url.decode("ascii", "replace")
        headers: dict[bytes, bytes] = {}
        for name, value in self.headers:
            headers[name] = value if name not in headers else b""  # said twice is not said
        try:
            admitted = self.wires.judge(Head(method, target, headers, self.wire.address, self.wire.signed))
        except Refusal as refusal:
            self._refuse(target, refusal, headers)
            return
        except Exception:
            log.exception("a defect of Thinwire at the gate")
            self._refuse(target, Refusal(503, "internal", "a defect"), headers)
            return
        if admitted.length:
            self.wire.body_since, self.wire.body_bytes = self.wires.now(), 0
        self.scope["extensions"] = {"thinwire": {"wire": self.wire, "admitted": admitted}}
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.wire.body_bytes += len(body)
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self.wire.body_since, self._in_head = None, True
        if self._refused:
            self._idle()
        else:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._idle()

    def _busy(self) -> bool:
        cycle: Any = self.cycle  # None before the first request, whatever uvicorn's annotation says
        return cycle is not None and not cycle.response_complete

    def _idle(self) -> None:
        """Between two requests a device may wait as long as the server keeps connections, a stranger may not."""
        if not self.wire.signed:
            self.wire.head_since = self.wires.now()

    def _refuse(self, target: str, refusal: Refusal, headers: dict[bytes, bytes]) -> None:
        """Answer without a request object. The connection stays when the body that still comes is a small one."""
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
            self.loop.call_later(LINGER_S, self.wire.close)  # closed at once, it would never read the answer
