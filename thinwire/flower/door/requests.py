"""One request at the door, judged already: its body as it comes, held to its digest, and its answer."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

from thinwire.core.fleet import DeviceRow
from thinwire.core.messages import FREE_HEADER_BYTES
from thinwire.flower.door.account import Account, admitted_of, wire_of
from thinwire.flower.wire.framing import inflated, unblock
from thinwire.flower.wire.refusals import Refusal, unknown_path
from thinwire.flower.wire.signing import Claim, Identity

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
RATIO = 32  # what a header may inflate to beyond FREE_HEADER_BYTES: so many times its own length
DRAIN_S, DRAIN_BYTES = 5.0, 64 * 2**20  # how much of a body is still read after it was answered


class Gone(Exception):
    """The device hung up in the middle of its request."""


class Request:
    """What a route sees. `whole` reads a small body at once, `blocks` a large one in pieces."""

    def __init__(self, scope: Any, receive: Receive, send: Send) -> None:
        self.admitted = admitted_of(scope)
        self.wire = wire_of(scope)
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.path: str = scope["raw_path"].decode("ascii", "replace")
        self._receive, self._send = receive, send
        self._more, self.answered = True, False

    @property
    def route(self) -> str:
        return self.admitted.found.route.name

    @property
    def names(self) -> dict[str, str]:
        """What the path names."""
        return self.admitted.found.names

    @property
    def length(self) -> int:
        return self.admitted.length

    @property
    def row(self) -> DeviceRow:
        """The device that signed."""
        if self.admitted.row is None:
            raise unknown_path()
        return self.admitted.row

    @property
    def identity(self) -> Identity:
        assert self.admitted.identity is not None
        return self.admitted.identity

    @property
    def claim(self) -> Claim:
        assert self.admitted.claim is not None
        return self.admitted.claim

    def of(self, row: DeviceRow) -> Request:
        """The same request, now that its key has a row."""
        self.admitted = replace(self.admitted, row=row)
        return self

    def charge(self, account: Account) -> None:
        """From now on this device answers for the connection's bytes."""
        account.requests += 1
        self.wire.belongs_to(account)

    async def whole(self) -> bytes:
        """All of the body; 401 when it is not what was signed."""
        data = b"".join([piece async for piece in self.blocks(1)])
        if len(data) != self.length or hashlib.sha256(data).digest() != self.claim.digest:
            raise Refusal(401, "signature", "the body is not the one that was signed")
        return data

    async def head(self, most: int) -> tuple[bytes, memoryview]:
        """The JSON of the body's first block, of at most `most` bytes, and what follows it.

        The digests in a head do not shrink: what inflates to more than `RATIO` times its length says nothing.
        """
        data = await self.whole()
        try:
            head, rest = unblock(data)
            return inflated(head, min(most, FREE_HEADER_BYTES + RATIO * len(head))), rest
        except ValueError as error:
            raise Refusal(409, "protocol", str(error)) from error

    async def blocks(self, least: int) -> AsyncIterator[bytes]:
        """The body in pieces of at least `least` bytes but for the last; what came before a cut is given too."""
        pieces, size = list[bytes](), 0
        try:
            while self._more:
                piece = await self._next()
                pieces.append(piece)
                size += len(piece)
                if size >= least:
                    yield b"".join(pieces)
                    pieces, size = [], 0
        except Gone:
            if size:
                yield b"".join(pieces)
            raise
        if size:
            yield b"".join(pieces)

    async def answer(
        self, status: int, body: bytes = b"", kind: bytes = b"", headers: list[tuple[bytes, bytes]] | None = None
    ) -> None:
        """The whole answer. What is left of the request's body is read and dropped, so that a device that is
        still sending finds the answer and not a broken connection.
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
        self.answered = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes, more: bool) -> None:
        if not self.wire.open:
            raise Gone
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def hung_up(self) -> None:
        """Until uvicorn knows too that the connection is gone: it would answer 500 to what nobody answers."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _next(self) -> bytes:
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
                async with asyncio.timeout(DRAIN_S):
                    size += len(await self._next())
        except (Gone, TimeoutError):
            self._more = False
        if self._more:
            self.wire.close()
