"""Login and logout: by name and password, or by a one-time code.

Each login opens a session with a new id and ends the one that the browser brought, so that nobody can choose the id of
another person's session. Wrong passwords are limited for each name, known or not, and for each neighbourhood of
addresses, so that a stranger elsewhere keeps nobody out. A session that gives its password again has a limit of its
own. One-time codes are not limited, because nobody guesses 78 bits: a code works whatever others do.
"""

from __future__ import annotations

import html
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, TypeAlias, TypeVar
from urllib.parse import parse_qs

import anyio
from anyio.to_thread import run_sync
from fastapi import APIRouter, Query, Request
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, RedirectResponse, Response

from thinwire.core.errors import ThinwireError
from thinwire.core.formatting import with_home
from thinwire.core.net import neighbourhood
from thinwire.store import MACHINE, Store
from thinwire.store.sessions import SESSION_S, hashed
from thinwire.store.users import AT_ONCE
from thinwire.web.access import SettingsDep, StoreDep, from_state
from thinwire.web.security import NEXT, client_address, is_secure, session_token, static_text
from thinwire.web.settings import Settings

WRONG_OF_ONE = 5  # passwords of one name from one neighbourhood, or of one session, in NAME_WINDOW_S
NAME_WINDOW_S = 300.0
WRONG_OF_NAME = 200  # passwords of one name from everywhere in NAME_WINDOW_S
WRONG_FROM_ONE = 60  # passwords of all names from one neighbourhood in NAME_WINDOW_S
WAITING = 16  # checks that wait for their turn; a check takes 0.1 s
Found = TypeVar("Found")
Bucket: TypeAlias = tuple[str, str]


class TooMany(ThinwireError):
    """Reports too many wrong passwords, or too many checks that wait."""


class PasswordChecks:
    """Checks passwords: `AT_ONCE` at a time, and for each bucket a number of wrong ones within `NAME_WINDOW_S`.

    A check counts as wrong from its beginning until it turns out right, so that many at once gain nothing.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._turns, self._open = clock, anyio.CapacityLimiter(AT_ONCE), 0
        self._tried: dict[Bucket, deque[float]] = {}

    async def of_login(self, name: str, address: str, work: Callable[[], Found | None]) -> Found | None:
        """Check the password of a login: by name and neighbourhood, and each of the two with a higher limit."""
        if self._open >= AT_ONCE + WAITING:
            raise TooMany(
                "too many logins at this moment", f"{AT_ONCE} are checked at a time", "again in a few seconds"
            )
        prefix = neighbourhood(address)
        limits = {(name, prefix): WRONG_OF_ONE, (name, ""): WRONG_OF_NAME, ("", prefix): WRONG_FROM_ONE}
        return await self._check(limits, work)

    async def of_session(self, token: str, work: Callable[[], Found | None]) -> Found | None:
        """Check the password that the user of a session gives again; no login counts here, and this at no login."""
        return await self._check({("session", hashed(token)): WRONG_OF_ONE}, work)

    async def _check(self, limits: Mapping[Bucket, int], work: Callable[[], Found | None]) -> Found | None:
        """Return what `work` returns in a thread, None for a wrong password; raise `TooMany`."""
        now = self._clock()
        self._forget(now)
        if any(len(self._tried.get(bucket, ())) >= limit for bucket, limit in limits.items()):
            raise TooMany(
                "too many wrong passwords", "each name and each address has a limit, against guessing",
                "wait five minutes, or log in with a code: thinwire aggregator status --login",
            )  # fmt: skip
        counted = [self._tried.setdefault(bucket, deque()) for bucket in limits]
        for tried in counted:
            tried.append(now)
        self._open += 1
        try:
            found = await run_sync(work, limiter=self._turns)
        finally:
            self._open -= 1
        if found:
            for tried in counted:
                if now in tried:
                    tried.remove(now)
        return found

    def _forget(self, now: float) -> None:
        """Drop what is older than the window; the checks of one window bound what is kept."""
        for bucket, tried in list(self._tried.items()):
            while tried and now - tried[0] >= NAME_WINDOW_S:
                tried.popleft()
            if not tried:
                del self._tried[bucket]


class LoginFlow:
    """Opens sessions: each way in ends the session that the browser brought, and returns the form again if it fails."""

    def __init__(self, settings: Settings, store: Store, checks: PasswordChecks) -> None:
        self._settings, self._store, self._checks = settings, store, checks

    def form(self, said: str = "", status: int = 200, name: str = "") -> Response:
        """Return the form; `said` is the reason why the last try was refused."""
        return login_page(self._settings.home_option, said, status, name)

    async def by_link(self, request: Request, code: str, after: str) -> Response:
        """Log in with the code of a link, which uses it up; a link that is opened again goes on with its session."""
        token = await run_in_threadpool(self._store.logins.redeem, code[:64])
        if token is not None:
            return await self._enter(request, token, after)
        before = session_token(request.headers, self._settings)
        person = await run_in_threadpool(self._store.logins.person, before)
        if person is not None and person.user == MACHINE:
            return _go_on(after)
        return self._no_code()

    async def by_code(self, request: Request, code: str, after: str) -> Response:
        """Log in with a one-time code."""
        token = await run_in_threadpool(self._store.logins.redeem, code[:64])
        if token is not None:
            return await self._enter(request, token, after)
        return self._no_code()

    async def by_password(self, request: Request, name: str, password: str, after: str) -> Response:
        """Log in with name and password; what was typed as the name stays in the form."""
        try:
            work = partial(self._store.users.log_in, name, password)
            token = await self._checks.of_login(name, client_address(request, self._settings), work)
        except TooMany as error:
            hint = with_home(error.hint, self._settings.home_option)
            return self.form(f"{error.what.capitalize()}. Try: {hint}.", 429, name)
        if token is None:
            return self._failed(self.form("Name or password is wrong.", 401, name), name)
        return await self._enter(request, token, after)

    def _no_code(self) -> Response:
        return self._failed(self.form("That code is not valid: each works once, for ten minutes.", 401), MACHINE)

    def _failed(self, answer: Response, name: str) -> Response:
        """Have the failure recorded after the answer is sent, so that its time does not tell who exists."""
        answer.background = BackgroundTask(self._store.users.note_refused, name)
        return answer

    async def _enter(self, request: Request, token: str, after: str) -> Response:
        await run_in_threadpool(self._store.logins.end, session_token(request.headers, self._settings))
        answer = _go_on(after)
        set_session(request, answer, self._settings, token)
        return answer


LoginFlowDep = Annotated[LoginFlow, from_state("login_flow")]
router = APIRouter(include_in_schema=False)


@router.get("/login")
async def form(
    request: Request, flow: LoginFlowDep, code: str = "", after: Annotated[str, Query(alias="next")] = ""
) -> Response:  # fmt: skip
    """Show the form, or log in with the code of a link; a valid one starts a session of seven days in a cookie."""
    fetched_ahead = "prefetch" in request.headers.get("sec-purpose", request.headers.get("purpose", ""))
    return await flow.by_link(request, code, after) if code and not fetched_ahead else flow.form()


@router.post("/login")
async def submit(
    request: Request, flow: LoginFlowDep, after: Annotated[str, Query(alias="next")] = ""
) -> Response:  # fmt: skip
    """Log in with the form's name and password, or its code."""
    try:
        said = await request.body()
    except ClientDisconnect:
        return Response(status_code=400)  # the client has disconnected
    try:
        fields = parse_qs(said.decode("utf-8", "replace"), max_num_fields=4)
    except ValueError:  # too many fields: not our form
        return flow.form("That is not what this form sends. A fresh code works.", 400)
    name, password, code = (fields.get(field, [""])[0] for field in ("name", "password", "code"))
    if name or password:
        return await flow.by_password(request, name.strip().lower()[:64], password, after)
    return await flow.by_code(request, code, after)


@router.post("/logout")
async def leave(request: Request, store: StoreDep, settings: SettingsDep) -> Response:
    """End the session of this browser."""
    await run_in_threadpool(store.logins.end, session_token(request.headers, settings))
    answer = RedirectResponse("login", 303)
    answer.delete_cookie(settings.cookie, secure=is_secure(request), httponly=True, samesite="strict")
    return answer


def _go_on(after: str) -> Response:
    """Redirect to where a person came from before the login, else to the runs."""
    return RedirectResponse(after if NEXT.fullmatch(after) else "./", 303)


def set_session(request: Request, answer: Response, settings: Settings, token: str) -> None:
    """Put a session into the cookie of a response."""
    answer.set_cookie(
        settings.cookie, token, httponly=True, samesite="strict", secure=is_secure(request), max_age=SESSION_S,
    )  # fmt: skip


def login_page(home: str, said: str = "", status: int = 200, name: str = "") -> HTMLResponse:
    """Return the form; `said` is the reason why the last try was refused, and `name` what was typed as a name."""
    text = static_text("login.html").replace("{{said}}", html.escape(said)).replace("{{home}}", html.escape(home))
    return HTMLResponse(text.replace("{{name}}", html.escape(name)), status)
