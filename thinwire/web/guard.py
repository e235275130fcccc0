"""Before any route: is it us who was called, from our own page, by somebody who has logged in?

The order of the questions: Host (against names rebound to this address), Origin and Sec-Fetch-Site (against other
pages in the same browser, those of other ports of this machine among them), then the session. Every answer, refusals
too, carries the headers of `HEADERS`.
"""

from __future__ import annotations

import hmac
import re
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from thinwire.core.errors import ThinwireError
from thinwire.store import Store
from thinwire.web.settings import Settings
from thinwire.web.waiting import mark_known

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
ANONYMOUS = ("/healthz", "/login", "/static/")
SAFE = ("GET", "HEAD")
NEXT = re.compile(r"runs/[A-Za-z0-9_-]{1,80}|devices(/[a-z0-9-]{1,63})?")  # where a login may lead
MAX_BODY = 64 * 1024
LENGTH = re.compile(r"[0-9]{1,9}")  # int() raises on thousands of digits


class Guard:
    """Middleware; what passes it may be answered."""

    def __init__(self, app: ASGIApp, settings: Settings, store: Store) -> None:
        self.app, self.settings, self.store = app, settings, store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return  # there are no web sockets
        path = scope["path"] = self._below_root(scope["path"])

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("Cache-Control", "no-cache" if path.startswith("/static/") else "no-store")
            await send(message)

        headers = Headers(scope=scope)
        refusal = self._foreign(scope["method"], headers) or self._too_large(headers)
        if refusal is None and not _anonymous(path):
            refusal = await self._stranger(scope["method"], path, headers)
            if refusal is None:
                mark_known(scope)
        await (refusal or self.app)(scope, receive, send_guarded)

    def _below_root(self, path: str) -> str:
        """Proxies differ in whether they cut their prefix off: both are served."""
        root = self.settings.root_path
        return (path.removeprefix(root) or "/") if root and (path + "/").startswith(root + "/") else path

    def _foreign(self, method: str, headers: Headers) -> Response | None:
        host = headers.get("host", "")
        if _name(host) not in self.settings.host_names or len(headers.getlist("host")) != 1:
            return _refuse(421, "this page is not called that", "its address is on the aggregator's first lines")
        origin = headers.get("origin")
        if origin is not None:
            ours = origin.lower() in (*self.settings.origins, f"http://{host}".lower(), f"https://{host}".lower())
            if not ours:
                return _refuse(403, "another page asked for this", "open the page itself")
        elif headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none") and not (
            method in SAFE and _opened_as_page(headers)
        ):
            return _refuse(403, "another page asked for this", "open the page itself")
        return None

    def _too_large(self, headers: Headers) -> Response | None:
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers or not LENGTH.fullmatch(length) or int(length) > MAX_BODY:
            return _refuse(413, "the request is too large", "")
        return None

    async def _stranger(self, method: str, path: str, headers: Headers) -> Response | None:
        given = headers.get("authorization", "")
        if self.settings.token and given.startswith("Bearer "):
            if hmac.compare_digest(given.removeprefix("Bearer ").encode(), self.settings.token.encode()):
                return None
            return _refuse(401, "the token is not this page's", "")
        token = session_token(headers, self.settings)
        try:
            known = bool(token) and await run_in_threadpool(self.store.session, token)
        except ThinwireError as error:
            return _refuse(503, error.what, error.hint)
        if not known:
            return login_first(path) if method in SAFE and not path.startswith("/api/") else _unknown(self.settings)
        if method not in SAFE and "origin" not in headers and headers.get("sec-fetch-site") != "same-origin":
            return _refuse(403, "nothing says which page sent this", "send an Origin header, or use a token")
        return None


def session_token(headers: Headers, settings: Settings) -> str:
    """The session in our cookie, or nothing."""
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(settings.cookie)
    except CookieError:
        return ""
    return found.value if found else ""


def login_first(path: str) -> Response:
    """To the login, and back to where one wanted to go; addresses stay relative, whatever stands before us."""
    depth = path.count("/") - 1
    where = f"?next={path.lstrip('/')}" if NEXT.fullmatch(path.lstrip("/")) else ""
    return RedirectResponse("../" * depth + "login" + where, 303)


def _anonymous(path: str) -> bool:
    return any(path == open_ or (open_.endswith("/") and path.startswith(open_)) for open_ in ANONYMOUS)


def _opened_as_page(headers: Headers) -> bool:
    """Whether a browser shows the answer as a page of its own, as for a link: in no image and in no frame."""
    return headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest", "document") == "document"


def _name(host: str) -> str:
    """The host's name without its port: `[::1]:80` is `::1`."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _unknown(settings: Settings) -> Response:
    return _refuse(401, "log in first", f"thinwire aggregator status --login{settings.home_option} prints a fresh code")


def _refuse(status: int, error: str, hint: str) -> Response:
    return JSONResponse({"error": error, "why": "", "try": hint}, status)
