"""The dashboard's guard: middleware in front of every route.

The middleware checks a request in this order:

- Host, against names rebound to this address.
- The size of the body.
- Origin and Sec-Fetch-Site, against other sites in the same browser, also those on other ports of this machine.
- The session, or on the API the token of a program.
- What the route needs (web/access.py): a role, and sometimes a password that was given a moment ago.

Every response, errors included, carries the headers of `HEADERS`. web/login.py has the login, web/connections.py the
bounds on connections.
"""

from __future__ import annotations

import html
import json
import math
import re
import time
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

from fastapi import Request
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from thinwire.core.errors import ThinwireError
from thinwire.core.events import ENDED, RunStatus
from thinwire.core.net import is_same_address
from thinwire.reports.reason_text import OUTCOME_TEXTS
from thinwire.store import MACHINE, ROLES, Person, Store
from thinwire.web.access import RECENT_S, VISITOR, Access, Match, Visitor
from thinwire.web.connections import allow_time, mark_known, pieces
from thinwire.web.problems import problem
from thinwire.web.settings import Settings

API = "/api/"
SECURE = "thinwire.secure"  # in the scope of a request
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
NEXT = re.compile(r"[a-z]{1,20}(/[A-Za-z0-9_-]{1,80})?")  # paths to which a login may redirect: our pages
MAX_BODY = 64 * 1024
UPLOADS = "/api/v1/uploads"  # the one route whose body may be larger
HOST = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::[0-9]{1,5})?")
LENGTH = re.compile(r"[0-9]{1,12}")  # int() raises on thousands of digits


class Guard:
    """ASGI middleware that answers every request without the right to be answered; the app sees only the others."""

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
                return
            for piece in pieces(message):
                await send(piece)

        refusal = await self._refusal(scope, Headers(scope=scope))
        await (refusal or self.app)(scope, receive, send_guarded)

    async def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        """Return an error or a redirect to the login if the app must not answer; else note who sent it."""
        method, path = scope["method"], scope["path"]
        secure, host = forwarded(scope, headers, self.settings)
        scope[SECURE] = secure
        token = bearer_token(headers) if path.startswith(API) else None
        is_upload = (method, path) == ("POST", UPLOADS)  # its route bounds what it takes
        refusal = self._misnamed(headers, host) or self._too_large(headers, is_upload)
        if refusal is None and token is None:  # a browser adds no token by itself, so another page cannot use it
            refusal = self._foreign(method, headers, host, secure)
        found = self.access.find(method, path)
        if refusal is not None or found.is_open:
            return refusal
        look = partial(self._known, token, session_token(headers, self.settings))
        try:
            person = await run_in_threadpool(look)
        except ThinwireError as error:
            return problem(503, error.what, error.why, error.hint)
        if person is None:
            return self._stranger(method, path, token is not None)
        mark_known(scope)
        scope[VISITOR] = Visitor(person, lambda: look() is not None)
        refusal = self._unproven(method, headers, person) or self._forbidden(method, found, person)
        if refusal is None and is_upload:
            allow_time(scope)
        return refusal

    def _known(self, token: str | None, session: str) -> Person | None:
        """Return whose token, or else whose session this is; None if nobody's."""
        if token is not None:
            return self.store.tokens.person(token)
        return self.store.logins.person(session) if session else None

    def _misnamed(self, headers: Headers, host: str) -> Response | None:
        """Return an error if the request names another host; else None."""
        if _name(host) in self.settings.host_names and len(headers.getlist("host")) == 1:
            return None
        return problem(
            421, "this page is not called that", "another name may be rebound to this address",
            "its address is on the aggregator's first lines",
        )  # fmt: skip

    def _foreign(self, method: str, headers: Headers, host: str, secure: bool) -> Response | None:
        """Return an error if the request comes from another site; else None."""
        origin, schemes = headers.get("origin"), ("https",) if secure else ("http", "https")
        if origin is not None:
            if origin.lower() not in [f"{scheme}://{host}".lower() for scheme in schemes]:
                return _from_elsewhere()
        elif headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none") and not (
            method in SAFE and _opened_as_page(headers)
        ):
            return _from_elsewhere()
        return None

    def _too_large(self, headers: Headers, is_upload: bool = False) -> Response | None:
        """Return an error if the body is too large or has no length; else None."""
        length = headers.get("content-length", "0")
        most = math.inf if is_upload else MAX_BODY
        if "transfer-encoding" in headers or not LENGTH.fullmatch(length) or int(length) > most:
            why = f"a body has a length, of at most {MAX_BODY} bytes"
            return problem(413, "the request is too large", why, "a smaller body, with its Content-Length")
        return None

    def _stranger(self, method: str, path: str, has_token: bool) -> Response:
        """Return the error, or the redirect to the login, for a request of nobody."""
        if has_token:
            hint = "a new token, made on Users in the dashboard"
            why = "it is unknown, expired or revoked, or its user is disabled"
            return problem(401, "this token is not valid", why, hint, {"WWW-Authenticate": "Bearer"})
        if method in SAFE and not path.startswith(API):
            return login_first(path)
        hint = f"thinwire aggregator status --login{self.settings.home_option} prints a fresh code"
        return problem(401, "log in first", "this request has no open session", hint, {"WWW-Authenticate": "Bearer"})

    def _unproven(self, method: str, headers: Headers, person: Person) -> Response | None:
        """Return an error if a session's request that changes something does not say which page sent it; else None."""
        if person.token or method in SAFE or "origin" in headers or headers.get("sec-fetch-site") == "same-origin":
            return None
        return problem(403, "nothing says which page sent this", "another page may have", "send an Origin header")

    def _forbidden(self, method: str, found: Match, person: Person) -> Response | None:
        """Return an error if this person may not do this, or has to give the password again first; else None."""
        least = found.least
        if person.run_id and not (method in SAFE and found.run_id == person.run_id):
            return problem(403, f"this token only reads {person.run_id}", "it was made so", "another token")
        if least is None:
            return None
        if least.session and person.token:
            return problem(403, "a token may not do this", "who finds a token must not get more", "log in for it")
        if not found.allows(person.role):
            needed = f"it needs the role {least.role}, and {person.user} has the role {person.role}"
            hint = "an admin changes roles on Users in the dashboard"
            return problem(403, "your role does not allow this", needed, hint)
        if least.recent and not person.token and time.time() - person.confirmed_at >= RECENT_S:
            what = "code" if person.user == MACHINE else "password"
            option = self.settings.home_option
            hint = f"thinwire aggregator status --login{option} prints one" if what == "code" else "your password"
            why = f"this needs a {what} that was given within {RECENT_S / 60:g} minutes"
            return problem(
                403, f"give a {'fresh code' if what == 'code' else 'password again'}", why, hint, confirm=what
            )
        return None


def forwarded(scope: Scope, headers: Headers, settings: Settings) -> tuple[bool, str]:
    """Return whether the browser's connection has TLS, and the host that it named.

    Headers of a proxy count if the connection comes from its address, and from nobody else.
    """
    secure, host = settings.tls, headers.get("host", "")
    if settings.proxy and is_same_address((scope.get("client") or ("",))[0], settings.proxy):
        schemes = ",".join(headers.getlist("x-forwarded-proto")).lower().split(",")
        secure = secure or "https" in map(str.strip, schemes)  # who adds it alone gets stricter rules for it
        host = _by_proxy(headers, "x-forwarded-host", host)
    return secure, host


def client_address(request: Request, settings: Settings) -> str:
    """Return the address of the browser: behind a proxy the one that the proxy itself added to X-Forwarded-For."""
    address = request.client.host if request.client else ""
    if settings.proxy and is_same_address(address, settings.proxy):
        return _by_proxy(request.headers, "x-forwarded-for", address)[:64]
    return address


def _by_proxy(headers: Headers, name: str, otherwise: str) -> str:
    """Return the last value of a header, which the proxy added; who sent the request chose those before it."""
    return (headers.getlist(name) or [otherwise])[-1].rpartition(",")[2].strip()


def is_secure(request: Request) -> bool:
    """Return True if the browser reaches the dashboard over TLS, so that its cookie must never travel without."""
    return bool(request.scope[SECURE])


def bearer_token(headers: Headers) -> str | None:
    """Return the token of the Authorization header; None without one."""
    kind, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else None


def session_token(headers: Headers, settings: Settings) -> str:
    """Return the session from the cookie; "" without one. Cookies of other programs on this host change nothing."""
    return cookie_parser("; ".join(headers.getlist("cookie"))).get(settings.cookie, "")


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
    """Return the host's name in lower case without its port: `[::1]:80` is `::1`; "" if it is no name with a port."""
    found = HOST.fullmatch(host)
    return (found["address"] or found["name"]).lower() if found else ""


STATIC = Path(__file__).parent / "static"


@cache
def static_text(name: str) -> str:
    """Return the text of a static file."""
    return (STATIC / name).read_text(encoding="utf-8")


def shell(
    person: Person, depth: int, home: str, starts: tuple[str, str], script: str, style: str, news: Mapping[str, Any],
    first: str = "",
) -> HTMLResponse:  # fmt: skip
    """Return the dashboard's HTML frame for a person, `depth` folders below the root; `script` fills it.

    `home` is the option for shown commands, `starts` are the commands that start the aggregator again, as it was and
    where other machines reach it, or "". `news` is the first message of the live stream, `first` the address under the
    API that the script reads first. Addresses are relative, so that any prefix works.
    """
    begun = f'<link rel="preload" as="fetch" crossorigin href="{{{{root}}}}/api/v1/{html.escape(first)}">' * bool(first)
    text = static_text("page.html").replace("{{first}}", begun).replace("{{root}}", ".." if depth else ".")
    text = text.replace("{{user}}", html.escape(person.user)).replace("{{role}}", html.escape(person.role))
    text = text.replace("{{script}}", script).replace("{{style}}", style)
    for name, words in (("roles", ROLES), ("statuses", get_args(RunStatus)), ("ended", ENDED)):
        text = text.replace(f"{{{{{name}}}}}", " ".join(words))
    text = text.replace("{{drops}}", html.escape(json.dumps(OUTCOME_TEXTS)))
    for name, command in (("home", home), ("start", starts[0]), ("reachable", starts[1])):
        text = text.replace(f"{{{{{name}}}}}", html.escape(command))
    return HTMLResponse(text.replace("{{news}}", html.escape(json.dumps(news))))
