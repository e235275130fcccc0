"""Bounded connections: strangers that keep many open, or finish no request, cannot keep a browser out.

A connection that waits for a request is bounded in time, number and bytes, until a request of it has a session.

A response is written in `pieces`, each when its client has read most of those before, and a client that reads nothing
is closed. If all were written at once, uvicorn would count the connection as idle and close it after 5 s, and over TLS
asyncio would drop what is not read 30 s later.

An event stream lasts for hours, so the guard's look at its session is not enough: `Watch` looks again while it lasts.
And a stream is an open connection, of which the server takes `MAX_CONNECTIONS`: `Places` bounds the streams of one
user, so that nobody takes those of all others.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import Message, Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from thinwire.core.net import neighbourhood
from thinwire.web.problems import problem

REQUEST_S = 10.0  # until a request is complete: a browser on a slow tunnel sends its 64 kB in less
MAX_HEADER_BYTES = 64 * 1024  # of one request; our cookies and addresses have less than 1 kB
PIECE = 64 * 1024  # bytes of a response that are written at once
TAKE_S = 300.0  # to read what is buffered: Linux buffers up to 4 MB itself, and reports reads by a third of that
MAX_STRANGERS = 64  # open connections without an accepted session; a browser opens six
KNOWN = "thinwire.known"

_numbers = itertools.count()


def pieces(message: Message) -> Iterator[Message]:
    """Yield a part of a response's body as messages of at most `PIECE` bytes."""
    body, more = message.get("body", b""), message.get("more_body", False)
    for at in range(0, max(1, len(body)), PIECE):
        end = at + PIECE
        yield {**message, "body": body[at:end], "more_body": more or end < len(body)}


def mark_known(scope: Scope) -> None:
    """Mark the connection of this request as one with a session, so that newer strangers do not close it."""
    if found := scope.get("extensions", {}).get(KNOWN):
        found["mark"]()


def allow_time(scope: Scope) -> None:
    """Set no time limit for this request as a whole, because its route bounds the time between two chunks."""
    if found := scope.get("extensions", {}).get(KNOWN):
        found["wait"]()


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a time limit for each request; above `MAX_STRANGERS` a stranger is closed.

    A stranger is a connection without an accepted session, whatever it does: it may be silent, stop inside a request,
    or never read its response. The oldest one of the neighbourhood with the most strangers is closed, so that one host
    that opens many keeps out only itself. Behind a proxy all strangers are of one neighbourhood.

    Invariant: connections with a session are never closed for a stranger, and a new connection always finds a place.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.known, self.number, self.near = False, next(_numbers), ""
        self._late: asyncio.TimerHandle | None = None
        self._untaken: asyncio.TimerHandle | None = None
        self._in_header, self._header_bytes, self._is_upload = False, 0, False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Start the time limit, and close a stranger if there are too many."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(PIECE)  # over TLS the default is 512 KiB
        self.near = neighbourhood(self.client[0]) if self.client else ""
        self._expect()
        strangers = [one for one in self.connections if isinstance(one, BoundedProtocol) and not one.known]
        if len(strangers) > MAX_STRANGERS:
            of = Counter(one.near for one in strangers)
            oldest = min(strangers, key=lambda one: (-of[one.near], one.number))
            self.connections.discard(oldest)  # now: the next connection may arrive before this loss is reported
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers of the connection."""
        self._whole()
        self._taken()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn leaves it running where a connection was reset

    def pause_writing(self) -> None:
        """Wait for the client to read, for at most `TAKE_S`."""
        super().pause_writing()
        self._untaken = self.loop.call_later(TAKE_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Write on: the client has read."""
        self._taken()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; close the connection if a request's head is too large."""
        if self.transport.is_closing():
            return
        if self._late is None and not self._is_upload:
            self._expect()
        super().data_received(data)
        if self._in_header:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self.transport.abort()

    def on_message_begin(self) -> None:
        """Start counting the bytes of the header, and give the request a way to mark its connection."""
        super().on_message_begin()
        self._in_header, self._header_bytes = True, 0
        self.scope["extensions"] = {KNOWN: {"mark": self._mark_known, "wait": self._wait}}

    def on_headers_complete(self) -> None:
        """Stop counting the bytes of the header."""
        self._in_header = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Stop the time limit: the request is complete."""
        self._whole()
        self._is_upload = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """End the time of an upload: what follows the answer to a refused one has the time limit of a request."""
        self._is_upload = False
        super().on_response_complete()

    def _wait(self) -> None:
        """Set no time limit for this request."""
        self._whole()
        self._is_upload = True

    def _mark_known(self) -> None:
        """Record that a request of this connection had a session."""
        self.known = True

    def _expect(self) -> None:
        """Start the time limit of a request."""
        self._late = self.loop.call_later(REQUEST_S, self._too_late)

    def _whole(self) -> None:
        """Stop the time limit of a request."""
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _taken(self) -> None:
        """Stop the time limit of a piece."""
        if self._untaken is not None:
            self._untaken.cancel()
            self._untaken = None

    def _too_late(self) -> None:
        """Close the connection: its request took too long."""
        self._late = None
        if not self.transport.is_closing():
            self.transport.abort()


HEARTBEAT_S: Final = 15.0
MAX_CONNECTIONS: Final = 512  # the sum of all places and strangers is less, so that a page always finds one
STILL_HERE: Final = ": still here\n\n"
STREAM: Final = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # a proxy must not buffer the events


class Watch:
    """Waits for news of a stream, and looks each `HEARTBEAT_S` whether its session is still open, news or not."""

    def __init__(self, still_known: Callable[[], bool]) -> None:
        self._still_known, self._looked_at = still_known, time.monotonic()

    async def wait(self, news: asyncio.Event) -> bool:
        """Return once there is news, or after `HEARTBEAT_S` without; False if the session has ended."""
        due = self._looked_at + HEARTBEAT_S
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(news.wait(), max(0.0, due - time.monotonic()))
            if time.monotonic() < due:
                return True
        self._looked_at = time.monotonic()
        return await run_in_threadpool(self._still_known)


class Places:
    """Counts the places of one kind of stream: so many in all, and fewer of them for each user, tokens included."""

    def __init__(self, most: int, of_one: int) -> None:
        self.most, self.of_one = most, of_one
        self._taken: Counter[str] = Counter()

    def refusal(self, user: str) -> Response | None:
        """Return the error for a user who gets no further stream; None for one who does."""
        if self._taken[user] >= self.of_one:
            return problem(503, "you have too many tabs open", f"a user gets {self.of_one} streams", "close some")
        if self._taken.total() >= self.most:
            return problem(503, "too many tabs are open", f"at most {self.most} get news", "close some")
        return None

    @contextlib.contextmanager
    def taken(self, user: str) -> Iterator[bool]:
        """Take a place while the block runs; it yields False if another request was faster and there is none."""
        if self.refusal(user) is not None:
            yield False
            return
        self._taken[user] += 1
        try:
            yield True
        finally:
            self._taken[user] -= 1
            if not self._taken[user]:
                del self._taken[user]
