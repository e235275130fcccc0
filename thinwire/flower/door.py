"""The door: the one address that devices reach. It passes the lane's paths and answers 404 to everything else."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import uvicorn
import uvloop

from thinwire.core.errors import ThinwireError
from thinwire.flower.refusals import Refusal
from thinwire.flower.requests import Gone, Receive, Request, Send
from thinwire.flower.wire import WireProtocol

Route = Callable[[Request], Awaitable[None]]
BACKLOG = 1024
KEEP_ALIVE_S = 120  # of an idle connection: longer than the poll, so that a push seldom needs a new one
CLOSING_S = 3  # what is in progress when the door closes gets so long

log = logging.getLogger("thinwire.door")


class Door:
    """The ASGI app. A route raises `Refusal`; whatever else goes wrong in it is ours, and stays here."""

    def __init__(self, routes: Mapping[str, Route]) -> None:
        self._routes = routes
        self.answers: Counter[str] = Counter()  # "path" and "path status" for what was refused

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope, receive, send)
        route = self._routes.get(request.path) if request.method == "POST" else None
        try:
            if route is None:
                self.answers["404"] += 1
                await request.answer(404)
                return
            self.answers[request.path] += 1
            await self._serve(route, request)
        except (Gone, TimeoutError):
            request.wire.close()

    async def _serve(self, route: Route, request: Request) -> None:
        try:
            await route(request)
        except Refusal as refusal:
            self.answers[f"{request.path} {refusal.status}"] += 1
            await request.answer(refusal.status, refusal.body(), b"application/json")
        except (Gone, TimeoutError):
            raise
        except Exception as error:
            await self._in_trouble(request, error)

    async def _in_trouble(self, request: Request, error: Exception) -> None:
        """It is written here and not told outside: the device keeps what it has, and tries again."""
        disk = isinstance(error, (ThinwireError, OSError))
        if disk:
            log.error("a device could not be served: %s", error)
        else:
            log.error("a defect of Thinwire at %s", request.path, exc_info=error)
        refusal = (
            Refusal(503, "disk", "it cannot read or write its state") if disk else Refusal(503, "internal", "a defect")
        )
        self.answers[f"{request.path} 503"] += 1
        if request.answered:
            raise Gone from error
        await request.answer(503, refusal.body(), b"application/json")


class _Server(uvicorn.Server):
    """uvicorn's server, told to end by an event: its own loop looks ten times a second whether it should."""

    def __init__(self, config: uvicorn.Config, up: Callable[[], None]) -> None:
        super().__init__(config)
        self.ending, self._up = asyncio.Event(), up

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._up()

    async def main_loop(self) -> None:
        await self.ending.wait()


class Serving:
    """The door's thread: its loop, the SuperLink's lifespan in it, and uvicorn on a socket that we bound.

    `background` runs in that loop beside it, until the end.
    """

    def __init__(
        self,
        app: Door,
        host: str,
        port: int,
        lifespan: Callable[[], AbstractAsyncContextManager[None]],
        background: Callable[[], Awaitable[None]],
    ) -> None:
        self._socket = _bound(host, port)
        self._lifespan, self._background = lifespan, background
        self.address = _address(self._socket)
        self._up = threading.Event()
        self._server = _Server(
            uvicorn.Config(
                app, http=WireProtocol, ws="none", lifespan="off", log_config=None, log_level="error", access_log=False,
                server_header=False, date_header=False, timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=CLOSING_S,
            ),
            self._up.set,
        )  # fmt: skip
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="thinwire-door", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._up.wait()
        if self._failure is not None:
            raise ThinwireError("the door for devices did not open", why=repr(self._failure)) from self._failure

    def soon(self, call: Callable[..., None], *args: Any) -> None:
        """Call something in the door's loop; after its end, nothing."""
        try:
            self.loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            if self._thread.is_alive():
                raise

    def stop(self) -> None:
        self.soon(self._server.ending.set)
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            self._failure = error
            log.exception("the door ended")
        finally:
            self._up.set()

    async def _serve(self) -> None:
        async with self._lifespan():
            background = asyncio.ensure_future(self._background())
            try:
                await self._server.serve(sockets=[self._socket])
            finally:
                background.cancel()
                await asyncio.gather(background, return_exceptions=True)


def _bound(host: str, port: int) -> socket.socket:
    """A listening socket, or why there is none."""
    where = f"{host}:{port}"
    if not _is_loopback(host):
        raise ThinwireError(
            f"the door cannot be opened on {where}",
            why="devices on other machines need TLS, and this version does not have it yet",
            hint="--listen 127.0.0.1:9090",
        )
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind(address)
            made.listen(BACKLOG)
        except OSError:
            made.close()
            raise
    except (OSError, OverflowError) as error:
        raise ThinwireError(
            f"cannot listen on {where}",
            why=getattr(error, "strerror", None) or str(error),
            hint="another aggregator may run (thinwire aggregator status); or another port: --listen 127.0.0.1:0",
        ) from error
    return made


def _address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
