"""This module connects stock Flower nodes: it checks who may call, and runs a second SuperLink and flower-superexec for
them.

A foreign Flower run sees every node of its SuperLink's state. Invariant: the second SuperLink holds only stock nodes,
and our own SuperLink, which has no listener, holds none. The state is in memory: approved keys are registered again at
each start.

flower-superexec is the program that runs foreign apps. It serves only the second SuperLink, and ends with this process.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import uvicorn
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_der_public_key,
    load_pem_public_key,
)

from thinwire.core.clock import Clock, RealClock
from thinwire.core.fleet import Roster
from thinwire.core.log_file import MAX_LOG_BYTES, append_all
from thinwire.flower import QUIET
from thinwire.flower.link_state import config
from thinwire.transport.protocol.http import ApiError
from thinwire.transport.protocol.signing import (
    EARLIEST_S,
    LATEST_S,
    PUBLIC_KEY_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    fingerprint,
    public_der,
)
from thinwire.transport.server.auth import require_no_browser
from thinwire.transport.server.listener import bound

from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID  # isort: skip

from flwr.superlink.cli.flower_superlink import SuperLinkLifespan  # isort: skip
from flwr.superlink.main import create_app  # isort: skip

APPROVE = "thinwire devices approve --key FILE.pub --name NAME"
ALLOWED = frozenset({401, 403, 404, 409, 412, 413, 429, 503})


class StockPass:
    """Decides which stock nodes may call the second SuperLink; it is the `Guests` of transport/server/auth.py.

    Without TLS, on loopback, every node may call. With TLS only nodes may call whose key the operator approved by
    `thinwire devices approve --key`. Flower signs only a timestamp, so a stock node has no replay protection.
    """

    def __init__(self, roster: Roster, clock: Clock, superexec: SuperExec, *, private: bool) -> None:
        self._roster, self._clock, self._superexec, self._private = roster, clock, superexec, private
        self._superlink = StockSuperLink(authenticated=not private)
        self.paths = self._superlink.fleet_paths

    @property
    def control_address(self) -> str:
        """Return the address for `flwr run`, on this machine."""
        return self._superlink.control_address

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the second SuperLink and flower-superexec until the block ends."""
        async with self._superlink.running(), self._superexec.running(self.control_address):
            yield

    def may_pass(self, headers: Mapping[bytes, bytes]) -> ApiError | None:
        """Return None if a request with these headers may pass, else the refusal."""
        if self._private:
            return require_no_browser(headers)
        try:
            key = _key(headers)
            signature = base64.b64decode(headers.get(SIGNATURE_HEADER.encode(), b""), validate=True)
            timestamp = headers.get(TIMESTAMP_HEADER.encode(), b"")
            age_s = self._clock.wall() - datetime.fromisoformat(timestamp.decode("ascii")).timestamp()
        except (ValueError, TypeError, UnsupportedAlgorithm, binascii.Error, OverflowError):
            return ApiError(401, "signature", "the request is not signed as a Flower node signs")
        if not isinstance(key, ec.EllipticCurvePublicKey) or not EARLIEST_S < age_s < LATEST_S:
            return ApiError(401, "signature", "not a P-384 key, or a clock that is wrong")
        der = public_der(key)
        row = self._roster.by_fingerprint(fingerprint(der))
        if row is None or row.how != "stock":
            return ApiError(412, "unknown", f"this key was not approved: {APPROVE}")
        try:
            key.verify(signature, timestamp, ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            return ApiError(401, "signature", "the signature does not fit")
        if row.state != "approved":
            return ApiError(403, row.state, f"{row.name} may not call")
        self._superlink.admitted(row.name, der)
        return None

    def who(self, headers: Mapping[bytes, bytes]) -> str:
        """Return the fingerprint of the request's key, because one key has many forms in PEM; "" without TLS."""
        key = None if self._private else _key(headers)
        return fingerprint(public_der(key)) if isinstance(key, ec.EllipticCurvePublicKey) else ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def told(event: Any) -> None:
            if event["type"] == "http.response.start":
                event = dict(event, status=outside(event["status"]))
            await send(event)

        await self._superlink(scope, receive, told)


def _key(headers: Mapping[bytes, bytes]) -> object:
    return load_pem_public_key(base64.b64decode(headers.get(PUBLIC_KEY_HEADER.encode(), b""), validate=True))


def outside(status: int) -> int:
    """Return the status that the device API may send: only its own 4xx codes, and never 500.

    >>> [outside(status) for status in (200, 400, 422, 401, 500, 502)]
    [200, 409, 409, 401, 503, 503]
    """
    if status < 400 or status in ALLOWED:
        return status
    return 409 if status < 500 else 503


def stock_guests(roster: Roster, said: Path, *, private: bool) -> StockPass:
    """Return the gateway; the file `said` gets the output of flower-superexec and of the foreign apps."""
    return StockPass(roster, RealClock(), SuperExec(said), private=private)


FLEET = "/v1/fleet/"


class StockSuperLink:
    """Runs a second SuperLink with a state of its own and a listener on loopback for `flwr run`.

    If it is `authenticated`, only registered keys are nodes; else a node may use any key that it made itself.
    """

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
        """Return the paths that stock nodes call."""
        return frozenset(path for path, methods in self._app.openapi()["paths"].items()
                         if path.startswith(FLEET) and "post" in methods)  # fmt: skip

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the app and its listener in the current event loop until the block ends."""
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
            server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]  # only older releases have it
            serving = asyncio.ensure_future(server.serve(sockets=[self._socket]))
            try:
                yield
            finally:
                server.should_exit = server.force_exit = True
                with contextlib.suppress(asyncio.CancelledError):
                    await serving

    async def _from_here(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle a request that arrived by the listener; refuse pages in a browser, because the API runs code."""
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

    def admitted(self, name: str, der: bytes) -> None:
        """Register a key once; it is never deleted, because Flower never accepts a deleted key again."""
        pem = load_der_public_key(der).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        if not self.state.get_node_id_by_public_key(pem):
            self.state.create_node(
                owner_aid=NOOP_FLWR_AID, owner_name=NOOP_ACCOUNT_NAME, public_key=pem,
                heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL, name=name,
            )  # fmt: skip


FIRST_S, MAX_S = 1.0, 60.0  # seconds between two starts of a program that ends by itself
STEADY_S = 30.0  # a program that ran this long is started again after FIRST_S
END_S = 3.0

log = logging.getLogger("thinwire.stock")


class SuperExec:
    """Runs flower-superexec, and starts it again with back-off when it ends; its output goes to the file `said`."""

    def __init__(self, said: Path) -> None:
        self._said = said
        self.pid = 0

    @asynccontextmanager
    async def running(self, address: str) -> AsyncIterator[None]:
        """Keep flower-superexec running until the block ends."""
        keeping = asyncio.ensure_future(self._keep(address))
        try:
            yield
        finally:
            keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeping

    async def _keep(self, address: str) -> None:
        loop, wait_s = asyncio.get_running_loop(), FIRST_S
        while True:
            began = loop.time()
            code = await self._once(address)
            wait_s = FIRST_S if loop.time() - began > STEADY_S else min(wait_s * 2, MAX_S)
            log.warning("flower-superexec ended (%s); started again in %.0f s; see %s", code, wait_s, self._said)
            await asyncio.sleep(wait_s)

    async def _once(self, address: str) -> int | str:
        here, there = os.pipe()
        said = (os.fdopen(here, "rb", 0), self._said, MAX_LOG_BYTES)
        threading.Thread(target=append_all, args=said, name="stock.log", daemon=True).start()
        try:
            process = await asyncio.create_subprocess_exec(
                *_command(address), stdin=asyncio.subprocess.DEVNULL, stdout=there, stderr=there,
                env=_environment(), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return error.strerror or str(error)
        finally:
            os.close(there)
        self.pid = process.pid
        try:
            return await process.wait()
        finally:
            self.pid = 0
            if process.returncode is None:
                process.terminate()
                try:
                    await asyncio.wait_for(process.wait(), END_S)
                except TimeoutError:
                    process.kill()


def _environment() -> dict[str, str]:
    """Return the environment of flower-superexec, in which programs of this Python environment are found first."""
    beside = str(Path(sys.executable).parent)
    return {**os.environ, **QUIET, "PATH": os.pathsep.join([beside, os.environ.get("PATH", os.defpath)])}


def _command(address: str) -> list[str]:
    """Return the command line; the program of this Python environment is used if it exists, whatever the PATH."""
    beside = Path(sys.executable).with_name("flower-superexec")
    program = str(beside) if beside.exists() else "flower-superexec"
    return [program, "--insecure", "--runtime-api-address", address, "--parent-pid", str(os.getpid())]
