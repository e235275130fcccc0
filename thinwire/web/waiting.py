"""Connections that wait for a request are bounded in time, in number and in bytes, so that none keeps a browser out."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

REQUEST_S = 10.0  # until a request is whole: a browser on a slow tunnel sends its 64 kB in less
MAX_HEAD_BYTES = 64 * 1024  # of one request; cookies and addresses of ours have less than one
MAX_STRANGERS = 64  # connections at once of which no request had a session; a browser opens six
KNOWN = "thinwire.known"

_numbers = itertools.count()


def mark_known(scope: Scope) -> None:
    """Tell the connection that its request came with a session: newer strangers do not end it."""
    if found := scope.get("extensions", {}).get(KNOWN):
        found["mark"]()


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a time limit for each request; above MAX_STRANGERS the oldest stranger is ended.

    A stranger is a connection without an accepted session, whatever it does: it may be silent, stop inside a request,
    or never read its answer. Sessions keep their connections, and a new connection always finds a place.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.known, self.number = False, next(_numbers)
        self._late: asyncio.TimerHandle | None = None
        self._in_head, self._head_bytes = False, 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._expect()
        strangers = [one for one in self.connections if isinstance(one, BoundedProtocol) and not one.known]
        if len(strangers) > MAX_STRANGERS:
            oldest = min(strangers, key=lambda one: one.number)
            self.connections.discard(oldest)  # now, and not when its loss is told: the next may come before
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._whole()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn leaves it running where a connection was reset

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._late is None:
            self._expect()
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        self.scope["extensions"] = {KNOWN: {"mark": self._mark_known}}

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._whole()
        super().on_message_complete()

    def _mark_known(self) -> None:
        self.known = True

    def _expect(self) -> None:
        self._late = self.loop.call_later(REQUEST_S, self._too_late)

    def _whole(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        self._late = None
        if not self.transport.is_closing():
            self.transport.abort()
