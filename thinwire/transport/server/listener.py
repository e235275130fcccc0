"""The thread of the device API: its socket, its event loop, and the tasks that run in that loop."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, cast

import uvicorn
import uvloop

from thinwire.core.clock import Clock
from thinwire.core.errors import ThinwireError
from thinwire.core.net import bind, host_port, is_loopback
from thinwire.transport.server.app import DeviceApi
from thinwire.transport.server.auth import Judge
from thinwire.transport.server.connections import ConnectionTable
from thinwire.transport.server.http_protocol import HttpProtocol, protocol_of

BACKLOG = 1024
KEEP_ALIVE_S = 600  # of an idle authenticated connection: longer than a poll lasts
CLOSING_S = 3.0  # for requests in progress when the listener stops
WATCH_S = 1.0  # how often slow connections are searched, and until a failed task begins again

log = logging.getLogger("thinwire.device_api")


class Listener:
    """Listens at `host`:`port` and serves the ASGI app in a thread of its own.

    `lifespan` is a context in the event loop that surrounds the listening, `background` a task that runs meanwhile; it
    begins again after an error.
    Without `tls` the address must be a loopback one. `judge` admits requests.
    """

    def __init__(
        self,
        api: DeviceApi,
        judge: Judge,
        host: str,
        port: int,
        clock: Clock,
        lifespan: Callable[[], AbstractAsyncContextManager[None]],
        background: Callable[[], Awaitable[None]],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        if tls is None and not is_loopback(host):
            raise ThinwireError(
                f"the device API does not open on {host}:{port} without TLS",
                why="devices on other machines would talk to it in the clear",
                hint="--listen 127.0.0.1:9090",
            )
        self._socket = bound(host, port)
        self._lifespan, self._background = lifespan, background
        self.address = host_port(*self._socket.getsockname()[:2])
        config = uvicorn.Config(
            cast(Any, api), http=HttpProtocol, ws="none", lifespan="off", log_config=None, log_level="error",
            access_log=False, server_header=False, date_header=False, proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )  # fmt: skip
        config.load()
        self.wires = ConnectionTable(judge, config, tls, time.monotonic, clock.wall, refused=api.refused)
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._up, self._ending = threading.Event(), asyncio.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="thinwire-device-api", daemon=True)

    def start(self) -> None:
        """Start the thread, and return once it listens; raise `ThinwireError` if it cannot."""
        self._thread.start()
        self._up.wait()
        if self._failure is not None:
            raise ThinwireError("the device API did not open", why=repr(self._failure)) from self._failure

    def soon(self, call: Callable[..., None], *args: Any) -> None:
        """Call a function in the event loop; do nothing after the loop has ended."""
        try:
            self.loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            if self._thread.is_alive():
                raise

    def now(self, call: Callable[[], None], within_s: float = 5.0) -> None:
        """Call a function in the event loop, and wait until it returned; raise the exception that it raised.

        After the loop has ended, and from its own thread, the function is called directly.
        """
        done, raised = threading.Event(), list[Exception]()

        def called() -> None:
            try:
                call()
            except Exception as error:
                raised.append(error)
            finally:
                done.set()

        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self.soon(called)
            while not done.wait(within_s) and self._thread.is_alive():
                log.warning("the device API has been busy for %g s", within_s)
        else:
            called()
        if raised:
            raise raised[0]

    def stop(self) -> None:
        """End the thread, and close the socket; requests in progress get `CLOSING_S`."""
        self.soon(self._ending.set)
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            self._failure = error
            log.exception("the device API ended")
        finally:
            self._up.set()

    async def _serve(self) -> None:
        async with self._lifespan():
            server = await self.loop.create_server(
                lambda: cast(asyncio.Protocol, protocol_of(self.wires)), sock=self._socket, backlog=BACKLOG
            )
            tasks = [asyncio.ensure_future(self._repeat(work)) for work in (self._background, self._watch)]
            self._up.set()
            try:
                await self._ending.wait()
                server.close()
                await self._let_go()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _repeat(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run a task, and begin it again WATCH_S after an error, which is logged: a task that ended would be missed."""
        while True:
            try:
                await work()
            except Exception:
                log.exception("a task of the device API failed, and begins again")
            await asyncio.sleep(WATCH_S)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            self.wires.watch()

    def _serving(self) -> bool:
        return bool(self.wires.state.tasks) or any(wire.unsent() for wire in self.wires.open)

    async def _let_go(self) -> None:
        """Finish the requests in progress, then abort the remaining connections.

        A device whose pull is waiting loses nothing.
        """
        for http in list(self.wires.state.connections):
            http.shutdown()
        until = self.loop.time() + CLOSING_S
        while self._serving() and self.loop.time() < until:  # noqa: ASYNC110 - connections end in many ways
            await asyncio.sleep(0.02)
        for wire in list(self.wires.open):
            wire.abort()
        for task in list(self.wires.state.tasks):
            task.cancel()
        await asyncio.gather(*self.wires.state.tasks, return_exceptions=True)


def bound(host: str, port: int) -> socket.socket:
    """Return a listening socket; raise `Unreachable` with the reason if there is none."""
    made = bind(host, port, "--listen")
    made.listen(BACKLOG)
    return made
