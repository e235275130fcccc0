"""The route on which a device waits for asks: answered when there is one, or when the wait is over."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from thinwire.core.clock import Clock
from thinwire.core.protocol import read_json
from thinwire.core.types import Failure
from thinwire.transport.protocol.http import INLINE_BYTES, STREAM_BYTES, Refusal, block, etag, packed
from thinwire.transport.server.app import Gone, Request
from thinwire.transport.server.auth import Gate
from thinwire.transport.server.mailbox import Exchange, Outstanding
from thinwire.transport.server.presence import Session, Sessions

MOST_BYTES = 64 * 2**10  # of a pull's JSON: the ids of asks that are held
SPREAD = 1.1  # a device draws its wait from within a tenth of what it was told


@dataclass(frozen=True)
class Wanted:
    """What a pull says: which process it is, how long it waits, and which asks it holds already.

    What it holds decides what it gets, so an answer that was lost on the way is simply given again.
    """

    process: str
    wait_s: float
    held: frozenset[str]

    @classmethod
    def read(cls, data: bytes) -> Wanted:
        try:
            raw = read_json(data, MOST_BYTES)
            wait_s = float(raw["wait_s"])
            if math.isnan(wait_s):
                raise ValueError("it waits for NaN seconds")
            return cls(str(raw["process"]), wait_s, frozenset(str(held) for held in raw["held"]))
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
            raise Refusal(409, "protocol", f"cannot read the pull: {error}") from error


class PullRoute:
    """A waiting pull costs one timer and one event; hundreds of them cost nothing while nothing happens."""

    def __init__(self, gate: Gate, exchange: Exchange, sessions: Sessions, clock: Clock, poll_s: float) -> None:
        self._gate, self._exchange, self._sessions = gate, exchange, sessions
        self._clock, self._most_s = clock, poll_s * SPREAD
        self.closing = False

    async def __call__(self, request: Request) -> None:
        row = request.row
        wanted = Wanted.read((await request.head(MOST_BYTES))[0])
        session = self._sessions.of(row.name)
        if session is None or session.hello.process != wanted.process:
            raise Refusal(401, "hello", "this process has not said hello here")
        self._sessions.listen(session, request.wire)
        session.held, session.turn = set(wanted.held), session.turn + 1
        self._exchange.holds(session.device, session.held, self._clock.wall())
        with self._sessions.call(row.name, waits=True):
            outstanding, withdrawn = await self._wait(request, session, min(max(wanted.wait_s, 0.0), self._most_s))
            if self._gate.still(row).name != session.device:
                raise Refusal(401, "hello", "this device was renamed: say hello again")
            await self._answer(request, session, outstanding, withdrawn)

    async def _wait(self, request: Request, session: Session, wait_s: float) -> tuple[Outstanding | None, list[str]]:
        """Until there is something to say, or the wait is over. A newer pull of the same process ends this one."""
        loop, turn = asyncio.get_running_loop(), session.turn
        until = loop.time() + wait_s
        while True:
            if self.closing:
                raise Refusal(503, "closing", "the aggregator is closing", retry_after_s=1.0)
            if not request.wire.open:
                raise Gone
            if session.turn != turn:
                return None, []
            outstanding = self._exchange.next_for(session.device, session.held, self._clock.wall())
            withdrawn = self._exchange.withdrawn(session.held)
            if outstanding or withdrawn or loop.time() >= until:
                return outstanding, withdrawn
            session.woken.clear()
            timer = loop.call_at(until, session.woken.set)
            try:
                await session.woken.wait()
            finally:
                timer.cancel()

    async def _answer(
        self, request: Request, session: Session, outstanding: Outstanding | None, withdrawn: list[str]
    ) -> None:
        said = json.dumps({"cancelled": withdrawn}).encode() if withdrawn else b"{}"
        control = packed(said)
        if outstanding is None or not self._is_there(session.device, outstanding):
            await request.answer(200, control + block(b""))
            return
        ask, bundle = outstanding.spoken(session.protocol, session.hello.process), outstanding.envelope.bundle
        heads = control + packed(ask)
        length = outstanding.length if outstanding.length <= INLINE_BYTES else 0  # the device fetches larger ones
        self._exchange.pulled(outstanding, self._clock.wall())
        await request.begin(200, [(b"content-length", str(len(heads) + length).encode())])
        await request.write(heads, more=bool(length))
        if length and bundle is not None:
            async for data, more in read(bundle, 0, length):
                await request.write(data, more)

    def _is_there(self, device: str, outstanding: Outstanding) -> bool:
        """Whether the ask's parts still are; an ask that cannot be delivered fails here and now."""
        bundle = outstanding.envelope.bundle
        if not outstanding.length or (bundle and bundle.exists() and bundle.stat().st_size == outstanding.length):
            return True
        ask_id = outstanding.envelope.ask.ask_id
        self._exchange.answered(device, Failure("disk", "the aggregator lost the model of this ask", ask_id, device))
        return False


# The route on which a large ask's parts are fetched, from wherever the last attempt ended.


_FROM = re.compile(rb"bytes=(\d{1,18})-")


class BundleRoute:
    """Range and If-Range of RFC 9110, section 14, for one range that reaches to the end."""

    def __init__(self, exchange: Exchange, sessions: Sessions) -> None:
        self._exchange, self._sessions = exchange, sessions

    async def __call__(self, request: Request) -> None:
        outstanding = self._exchange.outstanding(request.row.name, request.names["ask"])
        bundle = outstanding.envelope.bundle if outstanding else None
        if outstanding is None or bundle is None or not outstanding.length:
            raise Refusal(404, "ask", "this ask is answered, withdrawn, or nobody's")
        tag, length = etag(outstanding.envelope.ask.parts), outstanding.length
        start = _start(request.headers, tag)
        if start > length:
            raise Refusal(409, "offset", f"there are {length} bytes", offset=length)
        headers = [(b"content-length", str(length - start).encode()), (b"etag", tag.encode())]
        if start:
            headers.append((b"content-range", f"bytes {start}-{length - 1}/{length}".encode()))
        with self._sessions.call(request.row.name):
            await request.begin(206 if start else 200, headers)
            if start == length:
                await request.write(b"", more=False)
            async for data, more in read(bundle, start, length):
                if self._exchange.outstanding(request.row.name, request.names["ask"]) is None:
                    request.wire.abort()  # withdrawn meanwhile: the device need not have what is buffered either
                    raise Gone
                await request.write(data, more)


def _start(headers: dict[bytes, bytes], tag: str) -> int:
    """Where to begin: what is asked for, when it is of this very bundle."""
    asked = _FROM.fullmatch(headers.get(b"range", b""))
    condition = headers.get(b"if-range", tag.encode())
    return int(asked[1]) if asked and condition == tag.encode() else 0


async def read(path: Path, start: int, length: int) -> AsyncIterator[tuple[bytes, bool]]:
    """A file from `start` in pieces, the next one read while this one is sent, and whether more follow."""
    left = length - start
    with await asyncio.to_thread(open, path, "rb", 0) as file:
        file.seek(start)
        ahead = asyncio.ensure_future(asyncio.to_thread(file.read, min(STREAM_BYTES, left)))
        try:
            while left:
                data = await ahead
                if not data:
                    raise OSError(f"{path} is shorter than its ask says")
                left -= len(data)
                ahead = asyncio.ensure_future(asyncio.to_thread(file.read, min(STREAM_BYTES, left)))
                yield data, left > 0
        finally:
            await asyncio.wait([ahead])
