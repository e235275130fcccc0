"""One request at the door: its headers at once, its body as it comes, its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from thinwire.flower.framing import LENGTH
from thinwire.flower.refusals import Refusal
from thinwire.flower.wire import wire_of

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
STALLED_S = 30.0  # without a byte for so long, a body is given up
DRAIN_S, DRAIN_BYTES = 5.0, 64 * 2**20  # how much of a body is still read after it was answered


class Gone(Exception):
    """The device hung up in the middle of its request."""


class Request:
    """What a route sees. `head` is read first, then `blocks`; nothing is buffered beyond what is asked for."""

    def __init__(self, scope: Any, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["raw_path"].decode("ascii", "replace")
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.wire = wire_of(scope)
        self._receive, self._send = receive, send
        self._rest, self._more, self.answered = b"", True, False

    @property
    def length(self) -> int:
        """The body's length; 400 where it is not said: no body of unknown size is taken."""
        try:
            return int(self.headers[b"content-length"])
        except (KeyError, ValueError):
            raise Refusal(400, "protocol", "a request says its length") from None

    async def head(self, most: int) -> bytes:
        """The first block of the body, refused before it is read when it is larger than `most`."""
        (length,) = LENGTH.unpack(await self._exactly(LENGTH.size))
        if length > most or length + LENGTH.size > self.length:
            raise Refusal(413, "too-large", f"a head of {length} bytes, {most} are read")
        return await self._exactly(length)

    async def blocks(self, least: int) -> AsyncIterator[bytes]:
        """The rest of the body, in pieces of at least `least` bytes but for the last."""
        pieces, size = [self._rest], len(self._rest)
        self._rest = b""
        while self._more:
            pieces.append(await self._next())
            size += len(pieces[-1])
            if size >= least:
                yield b"".join(pieces)
                pieces, size = [], 0
        if size:
            yield b"".join(pieces)

    async def answer(self, status: int, body: bytes = b"", kind: bytes = b"application/octet-stream") -> None:
        """The whole answer. What is left of the request's body is read and dropped, so that a device that is
        still sending finds the answer and not a broken connection.
        """
        headers = [(b"content-length", str(len(body)).encode())]
        if body:
            headers.append((b"content-type", kind))
        await self.begin(status, headers)
        await self._send({"type": "http.response.body", "body": body, "more_body": self._more})
        if self._more:
            await self._drain()
            await self._send({"type": "http.response.body", "body": b""})

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.answered = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes, more: bool) -> None:
        if not self.wire.open:
            raise Gone
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _exactly(self, count: int) -> bytes:
        pieces, size = [self._rest], len(self._rest)
        while size < count:
            if not self._more:
                raise Refusal(400, "protocol", "the body is shorter than its head says")
            pieces.append(await self._next())
            size += len(pieces[-1])
        data = b"".join(pieces)
        self._rest = data[count:]
        return data[:count]

    async def _next(self) -> bytes:
        async with asyncio.timeout(STALLED_S):
            event = await self._receive()
        if event["type"] == "http.disconnect":
            raise Gone
        self._more = event.get("more_body", False)
        body: bytes = event.get("body", b"")
        return body

    async def _drain(self) -> None:
        end, size = time.monotonic() + DRAIN_S, 0
        try:
            while self._more and size < DRAIN_BYTES and time.monotonic() < end:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + DRAIN_S):
                    size += len(await self._next())
        except (Gone, TimeoutError):
            self._more = False
        if self._more:
            self.wire.close()
