"""The routes about users, tokens, one's own session, and the audit log."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request
from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from thinwire.core.errors import Refused, UsageError
from thinwire.core.formatting import with_home
from thinwire.store import MACHINE
from thinwire.store.sessions import Role
from thinwire.store.users import require_password
from thinwire.web.access import API, RECENT_S, Number, SettingsDep, StoreDep, Who, from_state, visitor
from thinwire.web.login import PasswordChecks, TooMany, set_session
from thinwire.web.problems import PROBLEMS, problem
from thinwire.web.rows import First, as_csv
from thinwire.web.schemas import Answer, Body
from thinwire.web.security import session_token

Password = Annotated[str, Field(min_length=1, max_length=256)]
UserName = Annotated[str, Path(pattern=r"^[a-z0-9][a-z0-9._-]{0,31}$")]
Count = Annotated[int, Query(ge=1, le=1000)]
DAY_S = 24 * 3600.0
MACHINE_DAYS = 30  # of a token that is made in a session by code
AUDIT_ROWS = 100_000  # of a CSV file at most: it is made in memory
ChecksDep = Annotated[PasswordChecks, from_state("checks")]
router = APIRouter(prefix=API, responses=PROBLEMS)


class Session(Answer):
    """Holds who is logged in; before some actions this person gives `confirm` again, from `confirmed_until` on."""

    user: str
    role: Role
    confirm: Literal["password", "code"] | None
    confirmed_until: float
    run_id: str = ""


class Confirmed(Body):
    """Holds the password, or for a session by code a fresh code."""

    password: str = Field("", max_length=256)
    code: str = Field("", max_length=64)


class NewPassword(Body):
    """Holds one's own new password, with the present one."""

    old: Password
    new: Password


class User(Answer):
    """Holds a user. `who` added the user."""

    name: str
    role: Role
    created_at: float
    who: str
    password_at: float
    login_at: float | None
    disabled_at: float | None


class NewUser(Body):
    """Holds a user to add."""

    name: str = Field(max_length=64)
    role: Role
    password: Password


class Change(Body):
    """Holds what a change of a user needs: `role` for role, `password` for reset."""

    role: Role | None = None
    password: str = Field("", max_length=256)


class Token(Answer):
    """Holds a token without its secret; `run_id` is "" or the one run that it reads."""

    id: int
    name: str
    user: str
    role: Role
    run_id: str
    created_at: float
    expires_at: float
    used_at: float | None


class NewToken(Body):
    """Holds a token to make."""

    name: str = Field(max_length=63)
    role: Role = "viewer"
    run_id: str = Field("", max_length=80)
    days: float = Field(30, gt=0, le=366)


class MadeToken(Answer):
    """Holds a new token; `secret` is shown now and never again."""

    token: Token
    secret: str


class Done(Answer):
    """Holds what was done, as a sentence."""

    sentence: str


class AuditLine(Answer):
    """Holds an action, or a command about a run: its actor, time and object."""

    at: float
    who: str
    what: str
    about: str
    detail: str


class AuditPage(Answer):
    """Holds a part of the audit log, latest first; `total` counts all of it."""

    total: int
    first: int
    rows: list[AuditLine]


def _session(request: Request, confirmed_at: float | None = None) -> Session:
    person = visitor(request).person
    again: Literal["password", "code"] = "code" if person.user == MACHINE else "password"
    return Session(
        user=person.user, role=person.role, confirm=None if person.token else again, run_id=person.run_id,
        confirmed_until=(person.confirmed_at if confirmed_at is None else confirmed_at) + RECENT_S,
    )  # fmt: skip


@router.get("/session")
def session(request: Request) -> Session:
    """Return who is logged in."""
    return _session(request)


@router.post("/session/confirm", response_model=Session)
async def confirm(
    request: Request, store: StoreDep, settings: SettingsDep, checks: ChecksDep, given: Confirmed
) -> Session | Response:  # fmt: skip
    """Give the password again, or a fresh code; a wrong one is in the audit log as a refused login."""
    person, token = visitor(request).person, session_token(request.headers, settings)
    if person.user == MACHINE:
        done: bool | None = await run_in_threadpool(store.logins.confirm, token, given.code)
    else:
        try:
            work = partial(store.users.confirm, token, person.user, given.password)
            done = await checks.of_session(token, work)
        except TooMany as error:
            return problem(429, error.what, error.why, with_home(error.hint, settings.home_option))
    if not done:
        await run_in_threadpool(store.users.note_refused, person.user)
        what = "code is not valid" if person.user == MACHINE else "password is wrong"
        return problem(403, f"this {what}", hint="once more")
    return _session(request, time.time())


@router.post("/session/password", response_model=Done)
async def change_password(
    request: Request, store: StoreDep, settings: SettingsDep, checks: ChecksDep, given: NewPassword
) -> Response:  # fmt: skip
    """Change one's own password; all other sessions of this user end, and this one gets a new id."""
    name, own = visitor(request).person.user, session_token(request.headers, settings)
    if name == MACHINE:
        raise Refused("this session has no password", "it began with a code", "log in as a user")
    require_password(given.new, name)  # before the check, in which it would count as a wrong password
    try:
        work = partial(store.users.change_password, name, given.old, given.new)
        token = await checks.of_session(own, work)
    except TooMany as error:
        return problem(429, error.what, error.why, with_home(error.hint, settings.home_option))
    if token is None:
        await run_in_threadpool(store.users.note_refused, name)
        return problem(403, "this is not your present password", hint="once more")
    answer = JSONResponse({"sentence": "Your password is changed. Your other sessions have ended."})
    set_session(request, answer, settings, token)
    return answer


@router.get("/users")
def list_users(store: StoreDep) -> list[User]:
    """Return all users."""
    return [User.model_validate(row) for row in store.users.all()]


@router.post("/users", status_code=201)
def add_user(store: StoreDep, given: NewUser, who: Who) -> Done:
    """Add a user, who may log in from now on."""
    store.users.add(given.name, given.role, given.password, who)
    return Done(sentence=f"{given.name} may log in, with the role {given.role}.")


@router.post("/users/{user}/{change}")
def change_user(
    store: StoreDep, user: UserName, change: Literal["role", "reset", "disable", "enable", "logout"], given: Change,
    who: Who,
) -> Done:  # fmt: skip
    """Change another user: `role`, `reset` (the password), `disable` or `enable`. The user's sessions end.

    `logout` ends them alone, also one's own, and those by code of `machine`.
    """
    if change == "logout":
        store.users.log_out(user, who)
        return Done(sentence=f"All sessions of {user} have ended.")
    if user == who:
        raise Refused("nobody changes this for oneself", "an admin could lock the others out", "another admin")
    if change == "role":
        if given.role is None:
            raise UsageError("no role is given", "to change a role", '{"role": "viewer"}')
        store.users.set_role(user, given.role, who)
        return Done(sentence=f"{user} has the role {given.role}, from the next login on.")
    if change == "reset":
        store.users.set_password(user, given.password, who)
        return Done(sentence=f"{user} has a new password, and no session and no token from before works any more.")
    if change == "disable":
        store.users.disable(user, who)
        return Done(sentence=f"{user} is disabled: no login, no session and no token works any more.")
    store.users.enable(user, who)
    return Done(sentence=f"{user} may log in again. The tokens from before stay revoked.")


@router.get("/tokens")
def list_tokens(request: Request, store: StoreDep) -> list[Token]:
    """Return one's own tokens; for an admin those of all users."""
    person = visitor(request).person
    found = store.tokens.all(None if person.role == "admin" else person.user)
    return [Token.model_validate(row) for row in found]


@router.post("/tokens", status_code=201)
def make_token(request: Request, store: StoreDep, given: NewToken) -> MadeToken:
    """Make a token for a program; its secret is in this answer only."""
    person = visitor(request).person
    if person.user == MACHINE and given.days > MACHINE_DAYS:
        why = f"nobody disables the user {MACHINE}, so a token of it lives at most {MACHINE_DAYS} days"
        raise UsageError(f"a token of {MACHINE} does not live {given.days:g} days", why, "a token of a user")
    run_id = store.run(given.run_id).run_id if given.run_id else ""
    made = store.tokens.make(given.name, person.user, given.role, run_id, given.days * DAY_S, person.who)
    return MadeToken(token=Token.model_validate(made.row), secret=made.secret)


@router.post("/tokens/{number}/revoke")
def revoke_token(request: Request, store: StoreDep, number: Number) -> Done:
    """Revoke a token: one's own, or as an admin that of any user."""
    person = visitor(request).person
    store.tokens.revoke(number, person.who, None if person.role == "admin" else person.user)
    return Done(sentence=f"Token {number} is revoked.")


@router.get("/audit")
def audit(store: StoreDep, first: First = 0, count: Count = 50) -> AuditPage:
    """Return actions on devices, users and tokens, and commands about runs, latest first."""
    total, rows = store.audit.rows(first, count)
    return AuditPage(total=total, first=first, rows=[AuditLine.model_validate(row) for row in rows])


@router.get("/audit.csv", response_class=Response, include_in_schema=False)
def audit_csv(store: StoreDep) -> Response:
    """Return the audit log."""
    rows = store.audit.rows(0, AUDIT_ROWS)[1]
    return as_csv([AuditLine.model_validate(row) for row in rows], AuditLine, "audit")
