"""Connections of strangers: which one is closed when there are too many, and when one takes too long."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from tests.support.certificates import Authority
from thinwire.store import Store
from thinwire.web import connections
from thinwire.web.app import create_app
from thinwire.web.bundle import script
from thinwire.web.connections import MAX_STRANGERS, BoundedProtocol, allow_time
from thinwire.web.security import STATIC
from thinwire.web.settings import Settings

PATIENCE_S = 20.0


class Line(asyncio.Transport):
    """A connection without a network: what the server writes to it, and whether it aborted it."""

    def __init__(self, address: str, protocol: BoundedProtocol) -> None:
        super().__init__({"peername": (address, 1), "sockname": ("127.0.0.1", 2)})
        self.protocol, self.written, self.aborted = protocol, b"", asyncio.Event()
        self.most, self.full = 0, asyncio.Event()  # what it holds before it is full; 0 for who reads at once
        protocol.connection_made(self)

    def write(self, data: Any) -> None:
        self.written += bytes(data)
        if self.most and len(data) > self.most:
            self.full.set()
            self.protocol.pause_writing()

    def take(self) -> None:
        """Read what was written."""
        self.protocol.resume_writing()

    def is_closing(self) -> bool:
        return self.aborted.is_set()

    def abort(self) -> None:
        self.aborted.set()

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...


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


def test_a_large_response_is_not_complete_before_its_client_takes_it(store: Store) -> None:
    """A connection without a further request is closed 5 s after a response, and over TLS 30 s later cut off."""
    large = script(STATIC)

    async def tried() -> None:
        server = Server(create_app(Settings(store.url, port=8080), store))
        line = server.connect("192.0.2.1")
        line.most = 1000
        request = f"GET /static/{large.name} HTTP/1.1\r\nhost: 127.0.0.1:8080\r\n\r\n"
        line.protocol.data_received(request.encode())
        (task,) = server.state.tasks
        await asyncio.wait_for(line.full.wait(), PATIENCE_S)
        assert len(line.written) < len(large.body) / 2
        assert not line.protocol.cycle.response_complete
        while not task.done():
            line.take()
            await asyncio.sleep(0)
        assert line.written.partition(b"\r\n\r\n")[2] == large.body

    asyncio.run(tried())


def test_a_client_that_takes_what_is_written_stays_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "TAKE_S", 0.0)

    async def tried() -> None:
        line = Server().connect("192.0.2.1")
        line.protocol.pause_writing()
        line.take()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not line.aborted.is_set()
        line.protocol.pause_writing()
        await asyncio.wait_for(line.aborted.wait(), PATIENCE_S)

    asyncio.run(tried())


@pytest.mark.parametrize("tls", [False, True])
def test_a_client_that_takes_nothing_of_a_response_is_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tls: bool
) -> None:
    """It would hold its connection, and what is written to it, for ever."""
    monkeypatch.setattr(connections, "TAKE_S", 0.0)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    async def tried() -> None:
        ended = asyncio.Event()

        async def send_64_mb(_scope: Scope, _receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(1024):
                await send({"type": "http.response.body", "body": bytes(65536), "more_body": True})
            await send({"type": "http.response.body"})
            ended.set()

        server = Server(send_64_mb)
        listening = await asyncio.get_running_loop().create_server(
            lambda: BoundedProtocol(server.config, server.state, {}), "127.0.0.1", 0,
            ssl=Authority().chain(tmp_path) if tls else None,
        )  # fmt: skip
        port = listening.sockets[0].getsockname()[1]
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context if tls else None, limit=1024)
        try:
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await asyncio.wait_for(ended.wait(), PATIENCE_S)
            assert not server.state.connections
        finally:
            writer.transport.abort()
            listening.close()

    asyncio.run(tried())
