"""The dashboard's application: security middleware, then HTML, login, API and static files."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response

import thinwire
from thinwire.core.clock import HEARD, down_since_of, last_beat
from thinwire.core.disk_reserve import disk_full_text
from thinwire.store import Store
from thinwire.web.access import Access
from thinwire.web.alerts import AlertWatch, alert_routes
from thinwire.web.bundle import BundledFiles, script, styles
from thinwire.web.compare import compare_routes
from thinwire.web.device_queries import Devices
from thinwire.web.device_routes import DeviceName, device_routes, invitation_routes
from thinwire.web.event_feed import EventFeeds, event_routes
from thinwire.web.login import PasswordChecks, login_routes
from thinwire.web.plan_routes import plan_routes
from thinwire.web.problems import DescribedApp, add_handlers
from thinwire.web.routes import Live, News, RunId, api_routes, csv_routes, round_routes
from thinwire.web.run_actions import action_routes
from thinwire.web.run_list import list_routes
from thinwire.web.run_queries import Reader
from thinwire.web.security import STATIC, Guard, shell, visitor
from thinwire.web.settings import Settings, aggregator
from thinwire.web.uploads import remove_each_hour, upload_routes
from thinwire.web.user_routes import audit_routes, session_routes, token_routes, user_routes

ZIPPED_BYTES = 1000  # least size of a compressed response: a smaller one fits into one packet anyway
ZIP_LEVEL = 5  # of 1 to 9: from 6 on the time doubles for 2 %


def create_app(settings: Settings, store: Store, closing: Callable[[], bool] = lambda: False) -> Guard:
    """Return the application with its routes and its live event stream.

    `closing` returns True once the server is about to end: the event streams then end too, because the server waits for
    them.
    """
    reader = Reader(store, settings.home_option)
    devices = Devices(store, settings.lock)
    live = Live(lambda: look(store, settings.lock), closing)
    feeds = EventFeeds(store, closing)
    watch = AlertWatch(store, settings.lock).running() if settings.lock else contextlib.nullcontext()

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        work = live.run(), feeds.run(), remove_each_hour(settings.lock)
        looking = [asyncio.create_task(one) for one in work]
        try:
            with watch:
                yield
        finally:
            live.close()
            feeds.close()
            for task in looking:
                task.cancel()
            await asyncio.gather(*looking, return_exceptions=True)

    app = DescribedApp(
        title="Thinwire", version=thinwire.__version__, lifespan=lifespan,
        docs_url=None, redoc_url=None, openapi_url="/api/v1/openapi.json",
    )  # fmt: skip
    add_handlers(app, settings.home_option)
    checks = PasswordChecks()
    app.include_router(login_routes(settings, store, checks))
    runs = settings.lock.parent / "runs" if settings.lock else None
    app.include_router(list_routes(store, reader, runs))
    app.include_router(compare_routes(store))
    app.include_router(plan_routes(settings, store))
    app.include_router(upload_routes(settings))
    app.include_router(csv_routes(reader))
    app.include_router(action_routes(store))
    app.include_router(api_routes(settings, store, reader, live))
    app.include_router(round_routes(reader))
    app.include_router(device_routes(settings, store, devices))
    app.include_router(invitation_routes(settings, store, devices))
    app.include_router(alert_routes(store))
    for router in (
        event_routes(feeds),
        session_routes(settings, store, checks),
        user_routes(store),
        token_routes(store),
        audit_routes(store),
    ):
        app.include_router(router)
    files = script(STATIC), styles(STATIC)
    _pages(app, settings.home_option, tuple(one.name for one in files))
    app.mount("/static", BundledFiles(STATIC, *files))
    app.add_middleware(GZipMiddleware, minimum_size=ZIPPED_BYTES, compresslevel=ZIP_LEVEL)
    return Guard(app, settings, store, Access.of(app))


def look(store: Store, lock: Path | None) -> News:
    """Return the status that browser tabs receive; it is called four times a second and must be cheap."""
    state, about = aggregator(lock)
    rows, tls = store.roster.rows(), bool(about.get("pin"))
    pending = sum(row.standing(tls) == "pending" for row in rows)
    down_since = down_since_of(lock) if lock and state == "gone" else 0.0
    heard, alerts = last_beat(lock.with_name(HEARD)) if lock else 0.0, store.alerts.counts()
    disk = disk_full_text(lock.parent) if lock and state == "running" else ""
    return News(store.changes(), state, down_since, "", store.audit.last(), pending, heard, *alerts, disk)


def _pages(app: FastAPI, home: str, files: tuple[str, ...]) -> None:
    """Add the routes of the HTML pages; `files` are the names of the script and the styles."""

    @app.get("/healthz", include_in_schema=False)
    def health() -> dict[str, bool]:
        return {"ok": True}

    @app.get("/", include_in_schema=False)
    @app.get("/alerts", include_in_schema=False)
    @app.get("/devices", include_in_schema=False)
    @app.get("/new", include_in_schema=False)
    @app.get("/compare", include_in_schema=False)
    @app.get("/users", include_in_schema=False)
    @app.get("/audit", include_in_schema=False)
    def page(request: Request) -> Response:
        return shell(visitor(request).person, 0, home, *files)

    @app.get("/devices/{name}", include_in_schema=False)
    def device_page(request: Request, name: DeviceName) -> Response:  # noqa: ARG001 - as below
        return shell(visitor(request).person, 1, home, *files)

    @app.get("/runs/{run_id}", include_in_schema=False)
    def run_page(request: Request, run_id: RunId) -> Response:  # noqa: ARG001 - JavaScript reads it from the address
        return shell(visitor(request).person, 1, home, *files)
