"""What the device API and the dashboard use of uvicorn, uvloop and asyncio that their makers do not document.

A new version that lacks one of these names fails here with the name, and not under load.
"""

from __future__ import annotations

import asyncio
import inspect
import ssl
from asyncio.sslproto import SSLProtocol
from typing import Any, cast

import pytest
import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

METHODS = {
    "connection_made", "connection_lost", "data_received", "send_400_response", "on_message_begin",
    "on_headers_complete", "on_body", "on_message_complete", "on_response_complete",
    "_unset_keepalive_if_required", "timeout_keep_alive_handler",
}  # fmt: skip
ATTRIBUTES = {
    "transport", "parser", "url", "headers", "scope", "cycle", "loop", "connections", "timeout_keep_alive",
    "timeout_keep_alive_task",
}  # fmt: skip


@pytest.fixture
def protocol() -> HttpToolsProtocol:
    async def app(scope, receive, send) -> None: ...

    config = uvicorn.Config(app, loop="none", log_config=None)
    config.load()

    async def make() -> HttpToolsProtocol:
        return HttpToolsProtocol(config, ServerState(), {})

    return asyncio.run(make())


def test_uvicorns_protocol_has_the_methods_that_ours_extend(protocol: HttpToolsProtocol) -> None:
    assert {name for name in METHODS if not callable(getattr(protocol, name, None))} == set()


def test_uvicorns_protocol_has_the_attributes_that_ours_read(protocol: HttpToolsProtocol) -> None:
    declared = inspect.getsource(HttpToolsProtocol)
    assert {name for name in ATTRIBUTES if not hasattr(protocol, name) and f"self.{name}" not in declared} == set()


def test_asyncios_tls_reads_into_a_buffer_of_its_instance() -> None:
    async def make() -> Any:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        return SSLProtocol(asyncio.get_running_loop(), asyncio.Protocol(), context, cast(Any, None), server_side=True)

    protocol = asyncio.run(make())
    assert len(protocol._ssl_buffer) == protocol.max_size == len(protocol._ssl_buffer_view)


def test_uvloop_makes_an_event_loop() -> None:
    loop = uvloop.new_event_loop()
    try:
        assert isinstance(loop, asyncio.AbstractEventLoop)
    finally:
        loop.close()
