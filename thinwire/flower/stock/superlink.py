"""The second SuperLink: its own state, a listener on loopback for `flwr run`, and nobody of ours in it.

A foreign run sees every node of its state. So this one holds stock nodes alone, and our own SuperLink (which has no
listener) never hears of it. What it knows is in memory: approved keys are registered again at each start.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import uvicorn
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key

from thinwire.flower.door.guests import require_no_browser
from thinwire.flower.door.listener import bound
from thinwire.flower.superlink import config  # first: it sets what flwr reads when it is imported

from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID  # isort: skip
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan  # isort: skip
from flwr.superlink.main import create_app  # isort: skip

FLEET = "/v1/fleet/"


class StockSuperLink:
    """`authenticated`: only keys that were registered are nodes; else any key that a node made for itself."""

    def __init__(self, *, authenticated: bool) -> None:
        self._socket = bound("127.0.0.1", 0)
        self.control_address = f"127.0.0.1:{self._socket.getsockname()[1]}"
        wanted = replace(config(), enable_supernode_auth=authenticated, port=self._socket.getsockname()[1])
        self._app = create_app(wanted, SuperLinkLifespan)
        self._app.state.enable_supernode_auth = authenticated
        self.state: Any = self._app.state.linkstate_factory.state()
        self._lifespan: dict[str, Any] = {}

    @property
    def fleet_paths(self) -> frozenset[str]:
        """What stock nodes call."""
        return frozenset(path for path, methods in self._app.openapi()["paths"].items()
                         if path.startswith(FLEET) and "post" in methods)  # fmt: skip

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Its lifespan and its listener, in the loop that enters this."""
        async with self._app.router.lifespan_context(self._app) as found:
            self._lifespan = dict(found or {})
            server = uvicorn.Server(
                uvicorn.Config(
                    self._from_here,
                    interface="asgi3",
                    lifespan="off",
                    log_config=None,
                    log_level="error",
                    access_log=False,
                    ws="none",
                    proxy_headers=False,
                )
            )
            server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]  # older releases have it
            serving = asyncio.ensure_future(server.serve(sockets=[self._socket]))
            try:
                yield
            finally:
                server.should_exit = server.force_exit = True
                with contextlib.suppress(asyncio.CancelledError):
                    await serving

    async def _from_here(self, scope: Any, receive: Any, send: Any) -> None:
        """What comes in by the listener: whoever controls it runs code, so no page in a browser may."""
        if scope["type"] == "http" and (refusal := require_no_browser(dict(scope["headers"]))) is not None:
            body = refusal.body(time.time())
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return
        await self(scope, receive, send)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await self._app(dict(scope, state=dict(self._lifespan)), receive, send)

    def let_in(self, name: str, der: bytes) -> None:
        """Register a key, once; it is never deleted, because a deleted key could not come back."""
        pem = load_der_public_key(der).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        if not self.state.get_node_id_by_public_key(pem):
            self.state.create_node(
                owner_aid=NOOP_FLWR_AID, owner_name=NOOP_ACCOUNT_NAME, public_key=pem,
                heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL, name=name,
            )  # fmt: skip
