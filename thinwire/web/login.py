"""From a printed one-time code to a session's cookie."""

from __future__ import annotations

import time
from collections import deque
from typing import Annotated
from urllib.parse import parse_qs

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.responses import RedirectResponse, Response

from thinwire.store import Store
from thinwire.web.guard import NEXT, session_token
from thinwire.web.pages import login_page
from thinwire.web.settings import Settings

WRONG_CODES = 10  # in WINDOW_S, from all together
WINDOW_S = 60.0


class Tries:
    """Counts the wrong codes of the last minute. It says so and refuses no right one: nobody guesses 78 bits."""

    def __init__(self) -> None:
        self.wrong: deque[float] = deque(maxlen=WRONG_CODES)

    def too_many(self) -> bool:
        return len(self.wrong) == WRONG_CODES and time.monotonic() - self.wrong[0] < WINDOW_S

    def note(self) -> None:
        self.wrong.append(time.monotonic())


def login_routes(settings: Settings, store: Store) -> APIRouter:
    """GET shows the form, or takes the code of a link; POST takes the form's code."""
    router, tries, home = APIRouter(include_in_schema=False), Tries(), settings.home_option

    async def enter(request: Request, code: str, after: str) -> Response:
        where = after if NEXT.fullmatch(after) else "./"
        if await run_in_threadpool(store.session, session_token(request.headers, settings)):
            return RedirectResponse(where, 303)  # the same link once more
        token = await run_in_threadpool(store.redeem, code[:64])
        if token is None:
            if tries.too_many():
                return login_page(home, "That code is not valid, like many in the last minute. A fresh one works.", 429)
            tries.note()
            return login_page(home, "That code is not valid: each works once, for ten minutes.", 401)
        answer = RedirectResponse(where, 303)
        answer.set_cookie(
            settings.cookie, token, httponly=True, samesite="strict", secure=settings.secure,
            path=settings.root_path or "/", max_age=7 * 24 * 3600,
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
            return Response(status_code=400)  # nobody reads it
        try:
            fields = parse_qs(said.decode("utf-8", "replace"), max_num_fields=4)
        except ValueError:  # more fields than that: no form of ours
            return login_page(home, "That is not what this form sends. A fresh code works.", 400)
        return await enter(request, fields.get("code", [""])[0], after)

    @router.post("/logout")
    async def leave(request: Request) -> Response:
        await run_in_threadpool(store.end_session, session_token(request.headers, settings))
        answer = RedirectResponse("login", 303)
        answer.delete_cookie(settings.cookie, path=settings.root_path or "/")
        return answer

    return router
