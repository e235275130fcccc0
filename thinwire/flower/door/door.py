"""The door: the one address that devices reach. It passes the lane's paths and answers 404 to everything else."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from thinwire.core.clock import Clock
from thinwire.core.errors import ThinwireError
from thinwire.flower.door.guests import Guests
from thinwire.flower.door.requests import Gone, Receive, Request, Send
from thinwire.flower.wire.refusals import Refusal

Serve = Callable[[Request], Awaitable[None]]
TIMER_S = 0.002  # a timer of the loop may end so much too early
JSON = b"application/json"

log = logging.getLogger("thinwire.door")


class Door:
    """The ASGI app behind the gate: what comes here is signed (or the CA's request) and has a path that exists.

    `called` hears of every request of a device. A route raises `Refusal`; whatever else goes wrong in it is ours, and
    stays here.
    """

    def __init__(
        self, routes: Mapping[str, Serve], clock: Clock, called: Callable[[Request], None], guests: Guests | None = None
    ) -> None:
        self._routes, self._clock, self._called, self._guests = routes, clock, called, guests
        self.answers: Counter[str] = Counter()  # a route's name, and "target status" for what was refused

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        self.answers[request.route] += 1
        if self._guests is not None and request.route == "guest":
            self._called(request)
            await self._guests(scope, receive, send)
            return
        try:
            await self._serve(request)
        except (Gone, TimeoutError):
            request.wire.close()
            await request.hung_up()

    def refused(self, target: str, refusal: Refusal) -> None:
        """Count what was not let in, by path where there is such a path: without the names that strangers make up."""
        path = "/".join(target.partition("?")[0].split("/")[:4])
        self.answers["404" if refusal.status == 404 else f"{path} {refusal.status}"] += 1

    async def _serve(self, request: Request) -> None:
        try:
            await self._require_due(request)
            if request.admitted.row is not None:
                self._called(request)
            await self._routes[request.route](request)
        except Refusal as refusal:
            await self._refuse(request, refusal)
        except (Gone, TimeoutError):
            raise
        except Exception as error:
            await self._in_trouble(request, error)

    async def _require_due(self, request: Request) -> None:
        """Wait until the time that the request is stamped with, so that no start is earlier than what was served."""
        claim = request.admitted.claim
        if claim is None or (ahead_s := claim.signed_at() - self._clock.wall()) <= 0:
            return
        await asyncio.sleep(ahead_s + TIMER_S)
        if claim.signed_at() > (now := self._clock.wall()):
            raise Refusal(401, "clock", "the aggregator's clock was set back meanwhile", now=now)

    async def _refuse(self, request: Request, refusal: Refusal) -> None:
        self.refused(request.path, refusal)
        if request.answered:
            raise Gone from refusal
        body = refusal.body(self._clock.wall())
        await request.answer(refusal.status, body, JSON if body else b"", refusal.headers())
        if refusal.kind == "revoked":
            request.wire.close()

    async def _in_trouble(self, request: Request, error: Exception) -> None:
        """It is written here and not told outside: the device keeps what it has, and tries again."""
        disk = isinstance(error, (ThinwireError, OSError))
        if disk:
            log.error("a device could not be served: %s", error)
        else:
            log.error("a defect of Thinwire at %s", request.path, exc_info=error)
        why = ("disk", "it cannot read or write its state") if disk else ("internal", "a defect")
        await self._refuse(request, Refusal(503, *why))
