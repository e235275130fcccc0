"""Connections of strangers: which one is closed when there are too many, and when one takes too long."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from thinwire.web import connections
from thinwire.web.connections import MAX_STRANGERS, BoundedProtocol, allow_time

PATIENCE_S = 20.0


class Line(asyncio.Transport):
    """A connection without a network: what the server writes to it, and whether it aborted it."""

    def __init__(self, address: str, protocol: BoundedProtocol) -> None:
        super().__init__({"peername": (address, 1), "sockname": ("127.0.0.1", 2)})
        self.protocol, self.written, self.aborted = protocol, b"", asyncio.Event()
        protocol.connection_made(self)

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.aborted.is_set()

    def abort(self) -> None:
        self.aborted.set()

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Server:
    """The server's part of connections, in the running loop."""

    def __init__(self, app: Any = None) -> None:
        self.config, self.state = uvicorn.Config(app or Response(), lifespan="off", log_config=None), ServerState()

    def connect(self, address: str) -> Line:
        return Line(address, BoundedProtocol(self.config, self.state, {}))


def test_one_host_that_opens_many_connections_keeps_out_only_itself() -> None:
    async def tried() -> None:
        server = Server()
        browser = server.connect("192.0.2.1")
        flood = [server.connect(f"2001:db8::{number:x}") for number in range(2 * MAX_STRANGERS)]
        late = server.connect("192.0.2.2")
        assert not browser.aborted.is_set()
        assert not late.aborted.is_set()
        closed = [line.aborted.is_set() for line in flood]
        assert closed == [True] * (MAX_STRANGERS + 2) + [False] * (MAX_STRANGERS - 2), "the oldest of its own"
        assert len(server.state.connections) == MAX_STRANGERS

    asyncio.run(tried())


def test_of_strangers_from_everywhere_the_oldest_is_closed() -> None:
    async def tried() -> None:
        server = Server()
        lines = [server.connect(f"198.51.100.{number}") for number in range(MAX_STRANGERS + 2)]
        assert [line.aborted.is_set() for line in lines] == [True] * 2 + [False] * MAX_STRANGERS

    asyncio.run(tried())


def test_the_body_of_an_upload_that_was_refused_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sender could name a length without an end and send a byte now and then."""

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        allow_time(scope)
        await Response(status_code=422)(scope, receive, send)

    async def tried() -> None:
        server = Server(refuse)
        line = server.connect("192.0.2.1")
        line.protocol.data_received(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 999999\r\n\r\nx")
        await asyncio.gather(*server.state.tasks)
        assert line.written.startswith(b"HTTP/1.1 422")
        monkeypatch.setattr(connections, "REQUEST_S", 0.0)
        line.protocol.data_received(b"x")
        await asyncio.wait_for(line.aborted.wait(), PATIENCE_S)

    asyncio.run(tried())
