"""The ASGI app of the device API: one admitted request, its body and its response.

The app serves the paths of its routes, and answers everything else with 404. `Request` reads a body as it arrives and
checks it against its signed digest.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from thinwire.core.clock import Clock
from thinwire.core.errors import ThinwireError
from thinwire.core.fleet import DeviceRow
from thinwire.core.serialization import FREE_HEADER_BYTES
from thinwire.transport.protocol.http import ApiError, inflate, unblock, unknown_path
from thinwire.transport.protocol.signing import Identity, SignatureHeaders
from thinwire.transport.server.auth import AuthenticatedRequest, Guests
from thinwire.transport.server.connections import Connection, TrafficCounter

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
RATIO = 32  # beyond FREE_HEADER_BYTES a header may inflate to this many times its own length
DRAIN_S, DRAIN_BYTES = 5.0, 64 * 2**20  # limits for reading the rest of a body after the response


class ConnectionClosed(Exception):
    """Raised if the device closed the connection in the middle of its request."""


class Request:
    """An admitted request, as a route sees it.

    `whole` reads a small body at once, `blocks` a large one in pieces.
    """

    def __init__(self, scope: Any, receive: Receive, send: Send) -> None:
        self.admitted: AuthenticatedRequest = scope["extensions"]["thinwire"]["admitted"]
        self.wire: Connection = scope["extensions"]["thinwire"]["wire"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.path: str = scope["raw_path"].decode("ascii", "replace")
        self._receive, self._send = receive, send
        self._more, self.answered = True, False

    @property
    def route(self) -> str:
        """Return the route's name."""
        return self.admitted.found.route.name

    @property
    def names(self) -> dict[str, str]:
        """Return the named parts of the path."""
        return self.admitted.found.names

    @property
    def length(self) -> int:
        """Return the body's length in bytes."""
        return self.admitted.length

    @property
    def row(self) -> DeviceRow:
        """Return the row of the device that signed; raise `ApiError` 404 if the key has none."""
        if self.admitted.row is None:
            raise unknown_path()
        return self.admitted.row

    @property
    def identity(self) -> Identity:
        """Return the key that signed."""
        assert self.admitted.identity is not None
        return self.admitted.identity

    @property
    def claim(self) -> SignatureHeaders:
        """Return what the signature headers claim."""
        assert self.admitted.claim is not None
        return self.admitted.claim

    def of(self, row: DeviceRow) -> Request:
        """Set the row that the key has now, and return this request."""
        self.admitted = replace(self.admitted, row=row)
        return self

    def charge(self, account: TrafficCounter) -> None:
        """Count the request, and charge the connection's bytes to this device."""
        account.requests += 1
        self.wire.belongs_to(account)

    async def whole(self) -> bytes:
        """Return the complete body; raise `ApiError` 401 if it is not the one that was signed."""
        data = b"".join([piece async for piece in self.blocks(1)])
        if len(data) != self.length or hashlib.sha256(data).digest() != self.claim.digest:
            raise ApiError(401, "signature", "the body is not the one that was signed")
        return data

    async def header(self, most: int) -> tuple[bytes, memoryview]:
        """Return the JSON of the body's first block, of at most `most` bytes, and the bytes after the block.

        A block may inflate to `FREE_HEADER_BYTES` and `RATIO` times its length: a header's digests are incompressible,
        so a larger one is refused.
        """
        data = await self.whole()
        try:
            header, rest = unblock(data)
            return inflate(header, min(most, FREE_HEADER_BYTES + RATIO * len(header))), rest
        except ValueError as error:
            raise ApiError(409, "protocol", str(error)) from error

    async def blocks(self, least: int) -> AsyncIterator[bytes]:
        """Yield the body in pieces of at least `least` bytes, except the last; bytes before a cut are yielded too."""
        pieces, size = list[bytes](), 0
        try:
            while self._more:
                piece = await self._next()
                pieces.append(piece)
                size += len(piece)
                if size >= least:
                    yield b"".join(pieces)
                    pieces, size = [], 0
        except ConnectionClosed:
            if size:
                yield b"".join(pieces)
            raise
        if size:
            yield b"".join(pieces)

    async def answer(
        self, status: int, body: bytes = b"", kind: bytes = b"", headers: list[tuple[bytes, bytes]] | None = None
    ) -> None:
        """Send the complete response.

        The rest of the request's body is read and dropped. A device that is still sending thus finds the response and
        not a broken connection.
        """
        said = [(b"content-length", str(len(body)).encode()), *(headers or [])]
        if kind:
            said.append((b"content-type", kind))
        await self.begin(status, said)
        await self._send({"type": "http.response.body", "body": body, "more_body": self._more})
        if self._more:
            await self._drain()
            await self._send({"type": "http.response.body", "body": b""})

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the response's status and headers."""
        self.answered = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes, more: bool) -> None:
        """Send a piece of the response's body; `more` is False for the last one.

        Raises `ConnectionClosed` if the connection is closed.
        """
        if not self.wire.open:
            raise ConnectionClosed
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def wait_until_closed(self) -> None:
        """Wait until uvicorn has noticed that the connection is closed.

        Otherwise uvicorn would answer 500 to a request without a response.
        """
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _next(self) -> bytes:
        event = await self._receive()
        if event["type"] == "http.disconnect":
            raise ConnectionClosed
        self._more = event.get("more_body", False)
        body: bytes = event.get("body", b"")
        return body

    async def _drain(self) -> None:
        end, size = time.monotonic() + DRAIN_S, 0
        try:
            while self._more and size < DRAIN_BYTES and time.monotonic() < end:
                async with asyncio.timeout(DRAIN_S):
                    size += len(await self._next())
        except (ConnectionClosed, TimeoutError):
            self._more = False
        if self._more:
            self.wire.close()


Serve = Callable[[Request], Awaitable[None]]
TIMER_S = 0.002  # a timer of the event loop may end this much too early
JSON = b"application/json"

log = logging.getLogger("thinwire.device_api")


class DeviceApi:
    """The ASGI app behind the authenticator: every request here is signed, or fetches the CA, and has a known path.

    `called` is called with every request of a device. A route raises `ApiError`. Any other exception in a route is a
    defect of the aggregator, and its text is not sent to the device. `answers` counts the requests.
    """

    def __init__(
        self, routes: Mapping[str, Serve], clock: Clock, called: Callable[[Request], None], guests: Guests | None = None
    ) -> None:
        self._routes, self._clock, self._called, self._guests = routes, clock, called, guests
        self.answers: Counter[str] = Counter()  # by the route's name, and by "target status" for refused requests

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Serve one request as an ASGI app."""
        request = Request(scope, receive, send)
        self.answers[request.route] += 1
        if self._guests is not None and request.route == "guest":
            self._called(request)
            await self._guests(scope, receive, send)
            return
        try:
            await self._serve(request)
        except (ConnectionClosed, TimeoutError):
            request.wire.close()
            await request.wait_until_closed()

    def refused(self, target: str, refusal: ApiError) -> None:
        """Count a refused request by its path, or as 404 if there is no such path.

        Names that strangers make up do not enter the count.
        """
        path = "/".join(target.partition("?")[0].split("/")[:4])
        self.answers["404" if refusal.status == 404 else f"{path} {refusal.status}"] += 1

    async def _serve(self, request: Request) -> None:
        try:
            await self._require_due(request)
            if request.admitted.row is not None:
                self._called(request)
            await self._routes[request.route](request)
        except ApiError as refusal:
            await self._refuse(request, refusal)
        except (ConnectionClosed, TimeoutError):
            raise
        except Exception as error:
            await self._refuse_failure(request, error)

    async def _require_due(self, request: Request) -> None:
        """Wait until the time that the request is stamped with, so that no start is earlier than a served request."""
        claim = request.admitted.claim
        if claim is None or (ahead_s := claim.signed_at() - self._clock.wall()) <= 0:
            return
        await asyncio.sleep(ahead_s + TIMER_S)
        if claim.signed_at() > (now := self._clock.wall()):
            raise ApiError(401, "clock", "the aggregator's clock was set back meanwhile", now=now)

    async def _refuse(self, request: Request, refusal: ApiError) -> None:
        self.refused(request.path, refusal)
        if request.answered:
            raise ConnectionClosed from refusal
        body = refusal.body(self._clock.wall())
        await request.answer(refusal.status, body, JSON if body else b"", refusal.headers())
        if refusal.kind == "revoked":
            request.wire.close()

    async def _refuse_failure(self, request: Request, error: Exception) -> None:
        """Log a failure of the aggregator, and refuse the request without details.

        The device keeps its data and tries again.
        """
        disk = isinstance(error, (ThinwireError, OSError))
        if disk:
            log.error("a device could not be served: %s", error)
        else:
            log.error("a defect of Thinwire at %s", request.path, exc_info=error)
        why = ("disk", "it cannot read or write its state") if disk else ("internal", "a defect")
        await self._refuse(request, ApiError(503, *why))
