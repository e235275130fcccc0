"""The routes under /api: reads of the store, and the orders that a person may leave there."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

import thinwire
from thinwire.core.home import SWEEPS
from thinwire.store import Store
from thinwire.store.groups import groups
from thinwire.web import models
from thinwire.web.addresses import Number, OfRound, RunId, Since
from thinwire.web.guard import session_token
from thinwire.web.live import Live
from thinwire.web.reading import Reader
from thinwire.web.service import aggregator
from thinwire.web.settings import Settings

STREAM = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # a proxy must not keep news back


def api_routes(settings: Settings, store: Store, reader: Reader, live: Live) -> APIRouter:
    router = APIRouter(prefix="/api", responses={404: {"model": models.Refusal}, 401: {"model": models.Refusal}})

    @router.get("/service")
    def service() -> models.Service:
        state, about = aggregator(settings.lock)
        return models.Service(
            aggregator=state, listen=str(about.get("listen", "")), urls=[str(url) for url in about.get("urls") or ()],
            tls=bool(about.get("pin")), version=thinwire.__version__, seq=store.last_seq(), now=time.time(),
        )  # fmt: skip

    @router.get("/runs")
    def runs() -> list[models.Run]:
        return reader.runs()

    @router.get("/groups")
    def swept() -> list[models.Group]:
        found = groups(settings.lock.parent / SWEEPS) if settings.lock else []
        return [models.Group(name=g.name, task=g.task, done=g.done, runs=g.runs, at=g.at) for g in found]

    @router.get("/runs/{run_id}")
    def run(run_id: RunId) -> models.RunPage:
        return reader.run(run_id)

    @router.get("/runs/{run_id}/rounds")
    def rounds(run_id: RunId, first: Since = 1) -> list[models.Round]:
        return reader.rounds(run_id, first)

    @router.get("/runs/{run_id}/rounds/{number}")
    def one_round(run_id: RunId, number: Number) -> models.RoundPage:
        return reader.round(run_id, number)

    @router.get("/runs/{run_id}/updates")
    def updates(run_id: RunId, number: OfRound = None) -> list[models.Update]:
        return reader.updates(run_id, number)

    @router.post("/runs/{run_id}/stop", status_code=202)
    def stop(run_id: RunId) -> models.Ordered:
        found = store.run(run_id)
        return models.Ordered(order=store.order("stop-run", found.run_id, who="page"))

    @router.get("/live", response_class=StreamingResponse)
    async def news(request: Request) -> Response:
        if live.full:
            return JSONResponse({"error": "too many tabs are open", "why": "", "try": "close some"}, 503)
        token, bearer = session_token(request.headers, settings), "authorization" in request.headers
        stream = live.stream(lambda: bearer or store.session(token))
        return StreamingResponse(stream, media_type="text/event-stream", headers=STREAM)

    return router
