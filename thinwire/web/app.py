"""The dashboard's application: security middleware, then HTML, login, API and static files."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

import thinwire
from thinwire.core.clock import HEARD, down_since_of, last_beat
from thinwire.core.disk_reserve import disk_full_text
from thinwire.store import ROLES, Store
from thinwire.web import (  # fmt: skip
    alerts,
    device_routes,
    event_feed,
    live,
    login,
    model_routes,
    plan_routes,
    run_actions,
    run_list,
    run_routes,
    uploads,
    user_routes,
)
from thinwire.web.access import Access, RunId, SettingsDep, visitor
from thinwire.web.alerts import AlertWatch
from thinwire.web.bundle import BundledFiles, script, styles
from thinwire.web.device_queries import Devices
from thinwire.web.device_routes import DeviceName
from thinwire.web.event_feed import EventFeeds
from thinwire.web.live import Live, News
from thinwire.web.login import LoginFlow, PasswordChecks
from thinwire.web.model_routes import MODELS, ModelFiles
from thinwire.web.plan_routes import Planning
from thinwire.web.problems import DescribedApp, add_handlers
from thinwire.web.run_list import RunListReader
from thinwire.web.run_queries import Reader
from thinwire.web.security import STATIC, Guard, shell
from thinwire.web.settings import Settings, aggregator
from thinwire.web.uploads import Uploads, remove_each_hour

pages = APIRouter(include_in_schema=False)
ROUTERS = (  # in the order in which a path is looked up, and in which the OpenAPI document lists them
    login.router, run_list.router, plan_routes.router, uploads.router, run_actions.router, live.router,
    run_routes.router, model_routes.router, device_routes.router, alerts.router, event_feed.router, user_routes.router,
    pages,
)  # fmt: skip
ZIPPED_BYTES = 1000  # least size of a compressed response: a smaller one fits into one packet anyway
FIRST_VIEW = "since=0&round=0&held=0&client=0&sort=device&descending=false"  # as static/view.js and clients.js write it
ZIP_LEVEL = 5  # of 1 to 9: from 6 on the time doubles for 2 %


@pages.get("/healthz")
async def health() -> dict[str, bool]:
    """Confirm to a monitor that the dashboard answers."""
    return {"ok": True}


@pages.get("/")
@pages.get("/alerts")
@pages.get("/devices")
@pages.get("/new")
@pages.get("/compare")
@pages.get("/users")
@pages.get("/audit")
def page(request: Request, settings: SettingsDep) -> Response:
    """Return the HTML of a page, which its JavaScript fills."""
    return _shell(request, 0, settings)


@pages.get("/devices/{name}")
def device_page(request: Request, settings: SettingsDep, name: DeviceName) -> Response:  # noqa: ARG001 - the route checks it
    """Return the HTML of a device's page."""
    return _shell(request, 1, settings)


@pages.get("/runs/{run_id}")
def run_page(request: Request, settings: SettingsDep, run_id: RunId) -> Response:
    """Return the HTML of a run's page. If its address has no choice, the HTML makes the browser read the view, too."""
    return _shell(request, 1, settings, "" if request.url.query else f"runs/{run_id}/view?{FIRST_VIEW}")


def _shell(request: Request, depth: int, settings: Settings, first: str = "") -> Response:
    """Return the HTML with the status as it is now: its script reads again only what changes after it.

    A command that starts the aggregator again may name paths of keys: a viewer, who does not start it, gets none.
    """
    person = visitor(request).person
    starts = (settings.start_command, settings.reachable_command) if person.role != ROLES[0] else ("", "")
    files = script(STATIC).name, styles(STATIC).name
    home, news = settings.home_option, request.app.state.live.told()
    return shell(person, depth, home, starts, *files, news, first)


class Compression(GZipMiddleware):
    """Compresses responses, but no model file: weights get no smaller, and a large one would stop the event loop."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        as_it_is = scope["type"] == "http" and MODELS in scope["path"]
        await (self.app(scope, receive, send) if as_it_is else super().__call__(scope, receive, send))


def create_app(settings: Settings, store: Store, closing: Callable[[], bool] = lambda: False) -> Guard:
    """Return the application with its routes and its live event stream.

    `closing` returns True once the server is about to end: the event streams then end too, because the server waits for
    them.
    """
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
        redirect_slashes=False,  # it would redirect to an address without the prefix of a proxy
    )  # fmt: skip
    for router in ROUTERS:  # `include_router` would analyse each route again for each application, which takes 0.05 s
        app.router.routes.extend(router.routes)
    app.mount("/static", BundledFiles(STATIC, script(STATIC), styles(STATIC)))
    add_handlers(app, settings.home_option)
    app.add_middleware(Compression, minimum_size=ZIPPED_BYTES, compresslevel=ZIP_LEVEL)

    checks = PasswordChecks()
    runs = settings.lock.parent / "runs" if settings.lock else None
    state = app.state  # its names are those that `from_state` gets
    state.settings, state.store, state.live, state.feeds, state.checks = settings, store, live, feeds, checks
    state.reader = Reader(store, settings.home_option)
    state.run_list = RunListReader(store, state.reader, runs)
    state.model_files = ModelFiles(store, settings)
    state.devices = Devices(store, settings.lock)
    state.login_flow = LoginFlow(settings, store, checks)
    state.planning, state.uploads = Planning(store, settings.lock), Uploads(settings.lock)
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
