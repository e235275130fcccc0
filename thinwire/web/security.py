"""The dashboard's security: middleware in front of every route, login by a one-time code, and bounded connections.

The middleware checks a request in this order:

- Host, against names rebound to this address.
- Origin and Sec-Fetch-Site, against other sites in the same browser, also those on other ports of this machine.
- The size of the body.
- The session, and the least role of the route (web/access.py).

Every response, errors included, carries the headers of `HEADERS`.

Connections that wait for a request are bounded in time, number and bytes, so that strangers cannot keep a browser out.
"""

from __future__ import annotations

import asyncio
import html
import itertools
import re
import time
from collections import deque
from functools import cache
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs, urlsplit

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from thinwire.core.errors import ThinwireError
from thinwire.store import Store
from thinwire.web.access import ANYONE, Access
from thinwire.web.problems import problem
from thinwire.web.settings import Settings

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
SAFE = ("GET", "HEAD")
NEXT = re.compile(r"runs/[A-Za-z0-9_-]{1,80}|alerts|devices(/[a-z0-9-]{1,63})?")  # paths to which a login may redirect
MAX_BODY = 64 * 1024
LENGTH = re.compile(r"[0-9]{1,9}")  # int() raises on thousands of digits


class Guard:
    """ASGI middleware that answers every request without a valid session itself; the app sees only the others."""

    def __init__(self, app: ASGIApp, settings: Settings, store: Store, access: Access) -> None:
        self.app, self.settings, self.store, self.access = app, settings, store, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return  # there are no web sockets
        path = scope["path"]

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("Cache-Control", "no-cache" if path.startswith("/static/") else "no-store")
            await send(message)

        headers = Headers(scope=scope)
        refusal = self._foreign(scope["method"], headers) or self._too_large(headers)
        least = self.access.least(scope["method"], path)
        if refusal is None and least != ANYONE:
            refusal = await self._stranger(scope["method"], path, headers)
            if refusal is None:
                mark_known(scope)
        await (refusal or self.app)(scope, receive, send_guarded)

    def _foreign(self, method: str, headers: Headers) -> Response | None:
        """Return an error if the request names another host or comes from another site; else None."""
        host = headers.get("host", "")
        if _name(host) not in self.settings.host_names or len(headers.getlist("host")) != 1:
            return problem(
                421, "this page is not called that", "another name may be rebound to this address",
                "its address is on the aggregator's first lines",
            )  # fmt: skip
        origin = headers.get("origin")
        if origin is not None:
            if origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
                return _from_elsewhere()
        elif headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none") and not (
            method in SAFE and _opened_as_page(headers)
        ):
            return _from_elsewhere()
        return None

    def _too_large(self, headers: Headers) -> Response | None:
        """Return an error if the body is too large or has no length; else None."""
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers or not LENGTH.fullmatch(length) or int(length) > MAX_BODY:
            return problem(413, "the request is too large", f"a body has a length, of at most {MAX_BODY} bytes")
        return None

    async def _stranger(self, method: str, path: str, headers: Headers) -> Response | None:
        """Return an error or a redirect to the login if the request has no session; else None."""
        token = session_token(headers, self.settings)
        try:
            known = bool(token) and await run_in_threadpool(self.store.logins.valid, token)
        except ThinwireError as error:
            return problem(503, error.what, error.why, error.hint)
        if not known:
            return login_first(path) if method in SAFE and not path.startswith("/api/") else _unknown(self.settings)
        if method not in SAFE and "origin" not in headers and headers.get("sec-fetch-site") != "same-origin":
            return problem(
                403, "nothing says which page sent this", "another page may have", "send an Origin header"
            )  # fmt: skip
        return None


def session_token(headers: Headers, settings: Settings) -> str:
    """Return the session from the cookie; "" without one."""
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(settings.cookie)
    except CookieError:
        return ""
    return found.value if found else ""


def login_first(path: str) -> Response:
    """Redirect to the login, which redirects back; addresses are relative, so that any proxy prefix works."""
    depth = path.count("/") - 1
    where = f"?next={path.lstrip('/')}" if NEXT.fullmatch(path.lstrip("/")) else ""
    return RedirectResponse("../" * depth + "login" + where, 303)


def _opened_as_page(headers: Headers) -> bool:
    """Return True if a browser opens the response as a document, as for a link, and not in an image or a frame."""
    return headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest", "document") == "document"


def _from_elsewhere() -> Response:
    """Return the error for a request of another page."""
    return problem(
        403, "another page sent this request", "a page elsewhere must not act for who is logged in",
        "open the dashboard itself",
    )  # fmt: skip


def _name(host: str) -> str:
    """Return the host's name in lower case without its port: `[::1]:80` is `::1`."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _unknown(settings: Settings) -> Response:
    """Return the error for a request without a session."""
    return problem(
        401, "log in first", hint=f"thinwire aggregator status --login{settings.home_option} prints a fresh code"
    )


WRONG_CODES = 10  # in WINDOW_S, from all browsers together
WINDOW_S = 60.0


class Tries:
    """Counts the wrong codes of the last minute. It refuses no correct code, because nobody guesses 78 bits."""

    def __init__(self) -> None:
        self.wrong: deque[float] = deque(maxlen=WRONG_CODES)

    def too_many(self) -> bool:
        """Return True if `WRONG_CODES` were wrong within `WINDOW_S`."""
        return len(self.wrong) == WRONG_CODES and time.monotonic() - self.wrong[0] < WINDOW_S

    def note(self) -> None:
        """Count one wrong code."""
        self.wrong.append(time.monotonic())


def login_routes(settings: Settings, store: Store) -> APIRouter:
    """Return the routes of login and logout.

    GET shows the form or takes the code of a link; POST takes the form's code. A valid code starts a session of seven
    days in a cookie.
    """
    router, tries, home = APIRouter(include_in_schema=False), Tries(), settings.home_option

    async def enter(request: Request, code: str, after: str) -> Response:
        """Start a session with a one-time code and redirect to `after`; show the form again if it is not valid."""
        where = after if NEXT.fullmatch(after) else "./"
        if await run_in_threadpool(store.logins.valid, session_token(request.headers, settings)):
            return RedirectResponse(where, 303)  # the link of a session that already exists
        token = await run_in_threadpool(store.logins.redeem, code[:64])
        if token is None:
            if tries.too_many():
                return login_page(home, "That code is not valid, like many in the last minute. A fresh one works.", 429)
            tries.note()
            return login_page(home, "That code is not valid: each works once, for ten minutes.", 401)
        answer = RedirectResponse(where, 303)
        answer.set_cookie(
            settings.cookie, token, httponly=True, samesite="strict", max_age=7 * 24 * 3600,
        )  # fmt: skip
        return answer

    @router.get("/login")
    async def form(request: Request, code: str = "", after: Annotated[str, Query(alias="next")] = "") -> Response:
        fetched_ahead = "prefetch" in request.headers.get("sec-purpose", request.headers.get("purpose", ""))
        return await enter(request, code, after) if code and not fetched_ahead else login_page(home)

    @router.post("/login")
    async def take(request: Request, after: Annotated[str, Query(alias="next")] = "") -> Response:
        try:
            said = await request.body()
        except ClientDisconnect:
            return Response(status_code=400)  # the client has disconnected
        try:
            fields = parse_qs(said.decode("utf-8", "replace"), max_num_fields=4)
        except ValueError:  # too many fields: not our form
            return login_page(home, "That is not what this form sends. A fresh code works.", 400)
        return await enter(request, fields.get("code", [""])[0], after)

    @router.post("/logout")
    async def leave(request: Request) -> Response:
        await run_in_threadpool(store.logins.end, session_token(request.headers, settings))
        answer = RedirectResponse("login", 303)
        answer.delete_cookie(settings.cookie)
        return answer

    return router


STATIC = Path(__file__).parent / "static"


@cache
def _file(name: str) -> str:
    """Return the text of a static file."""
    return (STATIC / name).read_text(encoding="utf-8")


def shell(depth: int, home: str, script: str, style: str) -> HTMLResponse:
    """Return the dashboard's HTML frame, `depth` folders below the root; `script` fills it.

    `home` is the option for shown commands. Addresses are relative, so that any prefix works.
    """
    text = _file("page.html").replace("{{root}}", ".." if depth else ".")
    text = text.replace("{{script}}", script).replace("{{style}}", style)
    return HTMLResponse(text.replace("{{home}}", html.escape(home)))


def login_page(home: str, said: str = "", status: int = 200) -> HTMLResponse:
    """Return the form for a code; `said` is the reason why the last one was refused."""
    text = _file("login.html").replace("{{said}}", html.escape(said)).replace("{{home}}", html.escape(home))
    return HTMLResponse(text, status)


REQUEST_S = 10.0  # until a request is complete: a browser on a slow tunnel sends its 64 kB in less
MAX_HEADER_BYTES = 64 * 1024  # of one request; our cookies and addresses have less than 1 kB
MAX_STRANGERS = 64  # open connections without an accepted session; a browser opens six
KNOWN = "thinwire.known"

_numbers = itertools.count()


def mark_known(scope: Scope) -> None:
    """Mark the connection of this request as one with a session, so that newer strangers do not close it."""
    if found := scope.get("extensions", {}).get(KNOWN):
        found["mark"]()


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a time limit for each request; above `MAX_STRANGERS` the oldest stranger is closed.

    A stranger is a connection without an accepted session, whatever it does: it may be silent, stop inside a request,
    or never read its response.

    Invariant: connections with a session are never closed for a stranger, and a new connection always finds a place.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.known, self.number = False, next(_numbers)
        self._late: asyncio.TimerHandle | None = None
        self._in_header, self._header_bytes = False, 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Start the time limit, and close the oldest stranger if there are too many."""
        super().connection_made(transport)
        self._expect()
        strangers = [one for one in self.connections if isinstance(one, BoundedProtocol) and not one.known]
        if len(strangers) > MAX_STRANGERS:
            oldest = min(strangers, key=lambda one: one.number)
            self.connections.discard(oldest)  # now: the next connection may arrive before this loss is reported
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers of the connection."""
        self._whole()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn leaves it running where a connection was reset

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; close the connection if a request's head is too large."""
        if self.transport.is_closing():
            return
        if self._late is None:
            self._expect()
        super().data_received(data)
        if self._in_header:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self.transport.abort()

    def on_message_begin(self) -> None:
        """Start counting the bytes of the header, and give the request a way to mark its connection."""
        super().on_message_begin()
        self._in_header, self._header_bytes = True, 0
        self.scope["extensions"] = {KNOWN: {"mark": self._mark_known}}

    def on_headers_complete(self) -> None:
        """Stop counting the bytes of the header."""
        self._in_header = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Stop the time limit: the request is complete."""
        self._whole()
        super().on_message_complete()

    def _mark_known(self) -> None:
        """Record that a request of this connection had a session."""
        self.known = True

    def _expect(self) -> None:
        """Start the time limit of a request."""
        self._late = self.loop.call_later(REQUEST_S, self._too_late)

    def _whole(self) -> None:
        """Stop the time limit of a request."""
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        """Close the connection: its request took too long."""
        self._late = None
        if not self.transport.is_closing():
            self.transport.abort()
