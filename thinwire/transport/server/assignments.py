"""The routes by which a device receives assignments.

`PullRoute` waits until there is an assignment for the device, or the wait is over. `BundleRoute` serves the parts of a
large assignment from the byte at which the last attempt ended.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from thinwire.core.clock import Clock
from thinwire.core.link_state import Outstanding
from thinwire.core.protocol import read_json
from thinwire.core.types import Failure
from thinwire.transport.protocol.http import INLINE_BYTES, STREAM_BYTES, ApiError, block, etag, packed
from thinwire.transport.server.app import Gone, Request
from thinwire.transport.server.auth import RequestAuthenticator
from thinwire.transport.server.mailbox import Mailbox
from thinwire.transport.server.presence import DeviceConnection, Presence

MOST_BYTES = 64 * 2**10  # of a pull's JSON: the ids of assignments in flight
SPREAD = 1.1  # a device varies the wait that it was given by up to a tenth


@dataclass(frozen=True)
class Wanted:
    """The content of a pull: the process, the seconds that it waits, and the assignments that it has.

    The assignments that it has decide which one it gets, so a response that was lost is simply given again.
    """

    process: str
    wait_s: float
    held: frozenset[str]

    @classmethod
    def read(cls, data: bytes) -> Wanted:
        """Parse a pull's JSON; raise `ApiError` 409 if it is invalid."""
        try:
            raw = read_json(data, MOST_BYTES)
            wait_s = float(raw["wait_s"])
            if math.isnan(wait_s):
                raise ValueError("it waits for NaN seconds")
            return cls(str(raw["process"]), wait_s, frozenset(str(held) for held in raw["in_flight"]))
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
            raise ApiError(409, "protocol", f"cannot read the pull: {error}") from error


class PullRoute:
    """Serves pulls. A waiting pull costs one timer and one event, and no work while nothing happens.

    `poll_s` is the wait in seconds that devices are told. While `closing` is True, pulls are refused.
    """

    def __init__(
        self, gate: RequestAuthenticator, exchange: Mailbox, sessions: Presence, clock: Clock, poll_s: float
    ) -> None:
        self._gate, self._exchange, self._sessions = gate, exchange, sessions
        self._clock, self._most_s = clock, poll_s * SPREAD
        self.closing = False

    async def __call__(self, request: Request) -> None:
        """Serve a pull."""
        await self.serve(request, (await request.header(MOST_BYTES))[0])

    async def serve(self, request: Request, data: bytes) -> None:
        """Serve a pull whose JSON is `data`, also one that came behind a message of a phase."""
        row, wanted = request.row, Wanted.read(data)
        session = self._sessions.of(row.name)
        if session is None or session.must_greet or session.hello.process != wanted.process:
            raise ApiError(401, "hello", "this process has not said hello here")
        self._sessions.listen(session, request.wire)
        session.turn += 1
        self._exchange.holds(session.device, wanted.held, self._clock.wall())
        with self._sessions.call(row.name, waits=True):
            outstanding, withdrawn = await self._wait(request, session, min(max(wanted.wait_s, 0.0), self._most_s))
            if self._gate.still(row).name != session.device:
                raise ApiError(401, "hello", "this device was renamed: say hello again")
            await self._answer(request, session, outstanding, withdrawn)

    async def _wait(
        self, request: Request, session: DeviceConnection, wait_s: float
    ) -> tuple[Outstanding | None, list[str]]:
        """Wait for an assignment or a withdrawal, and return both.

        A newer pull of the same process ends this wait.
        """
        loop, turn = asyncio.get_running_loop(), session.turn
        until = loop.time() + wait_s
        while True:
            if self.closing:
                raise ApiError(503, "closing", "the aggregator is closing", retry_after_s=1.0)
            if not request.wire.open:
                raise Gone
            if session.turn != turn:
                return None, []
            outstanding = self._exchange.next_for(session.device, self._clock.wall())
            withdrawn = self._exchange.withdrawn(session.device)
            if outstanding or withdrawn or loop.time() >= until:
                return outstanding, withdrawn
            session.woken.clear()
            timer = loop.call_at(until, session.woken.set)
            try:
                await session.woken.wait()
            finally:
                timer.cancel()

    async def _answer(
        self, request: Request, session: DeviceConnection, outstanding: Outstanding | None, withdrawn: list[str]
    ) -> None:
        said = json.dumps({"cancelled": withdrawn}).encode() if withdrawn else b"{}"
        control = packed(said)
        if outstanding is None or not self._is_there(session.device, outstanding):
            await request.answer(200, control + block(b""))
            return
        assignment, bundle = outstanding.spoken(session.protocol), outstanding.envelope.bundle
        headers = control + packed(assignment)
        length = outstanding.length if outstanding.length <= INLINE_BYTES else 0  # the device fetches larger ones
        self._exchange.pulled(outstanding, self._clock.wall())
        await request.begin(200, [(b"content-length", str(len(headers) + length).encode())])
        await request.write(headers, more=bool(length))
        if length and bundle is not None:
            async for data, more in read(bundle, 0, length):
                await request.write(data, more)

    def _is_there(self, device: str, outstanding: Outstanding) -> bool:
        """Return True if the assignment's parts are still on disk; otherwise fail the assignment."""
        bundle = outstanding.envelope.bundle
        if not outstanding.length or (bundle and bundle.exists() and bundle.stat().st_size == outstanding.length):
            return True
        assignment_id = outstanding.envelope.assignment.assignment_id
        self._exchange.answered(
            device, Failure("disk", "the aggregator lost the model of this assignment", assignment_id, device)
        )
        return False


_FROM = re.compile(rb"bytes=(\d{1,18})-")


class BundleRoute:
    """Serves an assignment's parts from any byte to the end, with Range and If-Range of RFC 9110, section 14."""

    def __init__(self, exchange: Mailbox, sessions: Presence) -> None:
        self._exchange, self._sessions = exchange, sessions

    async def __call__(self, request: Request) -> None:
        """Serve the parts from the requested byte."""
        outstanding = self._exchange.outstanding(request.row.name, request.names["assignment"])
        bundle = outstanding.envelope.bundle if outstanding else None
        if outstanding is None or bundle is None or not outstanding.length:
            raise ApiError(404, "assignment", "this assignment is answered, withdrawn, or nobody's")
        tag, length = etag(outstanding.envelope.assignment.parts), outstanding.length
        start = _start(request.headers, tag)
        if start > length:
            raise ApiError(409, "offset", f"there are {length} bytes", offset=length)
        headers = [(b"content-length", str(length - start).encode()), (b"etag", tag.encode())]
        if start:
            headers.append((b"content-range", f"bytes {start}-{length - 1}/{length}".encode()))
        with self._sessions.call(request.row.name):
            await request.begin(206 if start else 200, headers)
            if start == length:
                await request.write(b"", more=False)
            async for data, more in read(bundle, start, length):
                if self._exchange.outstanding(request.row.name, request.names["assignment"]) is None:
                    request.wire.abort()  # withdrawn meanwhile: the device does not need the buffered bytes either
                    raise Gone
                await request.write(data, more)


def _start(headers: dict[bytes, bytes], tag: str) -> int:
    """Return the first byte to send: the requested one if the tag names this very bundle, else 0."""
    assigned = _FROM.fullmatch(headers.get(b"range", b""))
    condition = headers.get(b"if-range", tag.encode())
    return int(assigned[1]) if assigned and condition == tag.encode() else 0


async def read(path: Path, start: int, length: int) -> AsyncIterator[tuple[bytes, bool]]:
    """Yield (bytes, more) of a file from `start` to `length`; `more` is False for the last piece.

    The next piece is read while this one is sent. Raises OSError if the file is too short.
    """
    left = length - start
    with await asyncio.to_thread(open, path, "rb", 0) as file:
        file.seek(start)
        ahead = asyncio.ensure_future(asyncio.to_thread(file.read, min(STREAM_BYTES, left)))
        try:
            while left:
                data = await ahead
                if not data:
                    raise OSError(f"{path} is shorter than its assignment says")
                left -= len(data)
                ahead = asyncio.ensure_future(asyncio.to_thread(file.read, min(STREAM_BYTES, left)))
                yield data, left > 0
        finally:
            await asyncio.wait([ahead])
