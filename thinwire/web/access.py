"""This module gives a route its user and its store, and holds the least role of each route.

The guard enforces the table of roles, and a route without a row is refused at the start. A person with a role may do
all that the roles before it may: viewers read, operators direct runs and devices, admins revoke, delete and decide who
else may do what. A row is a role, or a `Least` that wants more. A token that was made for one run reads the routes of
that run alone (`security.py`).

`create_app` puts the parts of one dashboard, such as its store, into `app.state`. Each module with routes has one
router, which FastAPI analyses once a process. A request takes the parts of the application that serves it, by
dependencies such as `StoreDep`. They are `async`: FastAPI would call each plain function in a thread of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from fastapi import Depends, Path, Request
from starlette.routing import Mount, Route, compile_path

from thinwire.store import ROLES, Person, Store
from thinwire.web.run_queries import Reader
from thinwire.web.settings import Settings

ANYONE: Final = "anyone"  # also without a session
RECENT_S: Final = 600.0  # for which the password, once given, counts


@dataclass(frozen=True)
class Least:
    """Holds what a request needs.

    `role` is the least role. `recent` wants the password, given within `RECENT_S`; the token of a program is exempt.
    `session` refuses tokens: a program that leaked its token must not make others.
    """

    role: str
    recent: bool = False
    session: bool = False


LEAST: Final[Mapping[str, str | Least]] = {
    "GET /healthz": ANYONE,
    "GET /login": ANYONE,
    "POST /login": ANYONE,
    "POST /logout": Least("viewer", session=True),
    "GET /static/{path:path}": ANYONE,
    "GET /": "viewer",
    "GET /alerts": "viewer",
    "GET /new": "viewer",
    "GET /compare": "viewer",
    "GET /devices": "viewer",
    "GET /devices/{name}": "viewer",
    "GET /runs/{run_id}": "viewer",
    "GET /users": "viewer",
    "GET /audit": "viewer",
    "GET /api/v1/openapi.json": "viewer",
    "GET /api/v1/service": "viewer",
    "GET /api/v1/live": "viewer",
    "GET /api/v1/runs": "viewer",
    "POST /api/v1/runs": "operator",
    "POST /api/v1/uploads": "operator",
    "GET /api/v1/run-list": "viewer",
    "GET /api/v1/run-list.csv": "viewer",
    "GET /api/v1/compare": "viewer",
    "GET /api/v1/compare.csv": "viewer",
    "GET /api/v1/plans/schema": "viewer",
    "GET /api/v1/plans/tasks": "viewer",
    "POST /api/v1/plans/check": "viewer",
    "GET /api/v1/groups": "viewer",
    "GET /api/v1/runs/{run_id}": "viewer",
    "GET /api/v1/runs/{run_id}/view": "viewer",
    "GET /api/v1/runs/{run_id}/events": "viewer",
    "GET /api/v1/runs/{run_id}/events/stream": "viewer",
    "GET /api/v1/runs/{run_id}/rounds": "viewer",
    "GET /api/v1/runs/{run_id}/rounds.csv": "viewer",
    "GET /api/v1/runs/{run_id}/rounds/{number}": "viewer",
    "GET /api/v1/runs/{run_id}/round-summaries": "viewer",
    "GET /api/v1/runs/{run_id}/heat": "viewer",
    "GET /api/v1/runs/{run_id}/updates": "viewer",
    "GET /api/v1/runs/{run_id}/updates.csv": "viewer",
    "GET /api/v1/runs/{run_id}/clients": "viewer",
    "GET /api/v1/runs/{run_id}/clients.csv": "viewer",
    "GET /api/v1/runs/{run_id}/models": "viewer",
    "GET /api/v1/runs/{run_id}/models/{version}": "operator",  # what the clients' data made, as a file to take away
    "POST /api/v1/runs/{run_id}/{verb}": "operator",
    "POST /api/v1/runs/{run_id}/tags": "operator",
    "POST /api/v1/runs/{run_id}/archive": "operator",
    "POST /api/v1/runs/{run_id}/unarchive": "operator",
    "POST /api/v1/runs/{run_id}/extend": "operator",
    "POST /api/v1/runs/{run_id}/delete": Least("admin", recent=True),
    "GET /api/v1/commands/{number}": "viewer",
    "GET /api/v1/alerts": "viewer",
    "GET /api/v1/alerts.csv": "viewer",
    "POST /api/v1/alerts/{number}/acknowledge": "operator",
    "GET /api/v1/devices": "viewer",
    "GET /api/v1/devices.csv": "viewer",
    "GET /api/v1/devices/{name}": "viewer",
    "GET /api/v1/devices/{name}/health": "viewer",
    "GET /api/v1/devices/{name}/health.csv": "viewer",
    "POST /api/v1/devices/{name}/rename": "operator",
    "POST /api/v1/devices/{name}/tags": "operator",
    "POST /api/v1/devices/{name}/approve": Least("operator", session=True),  # a device stays approved
    "POST /api/v1/devices/{name}/revoke": Least("admin", recent=True),
    "GET /api/v1/devices/{name}/revocations/{number}": "viewer",
    "GET /api/v1/invitations": "viewer",
    "POST /api/v1/invitations": Least("operator", session=True),  # a device that joined stays enrolled
    "POST /api/v1/invitations/{number}/withdraw": "operator",
    "GET /api/v1/refusals": "viewer",
    "GET /api/v1/audit": "viewer",
    "GET /api/v1/audit.csv": "viewer",
    "GET /api/v1/session": "viewer",
    "POST /api/v1/session/confirm": Least("viewer", session=True),
    "POST /api/v1/session/password": Least("viewer", session=True),
    "GET /api/v1/users": "admin",
    "POST /api/v1/users": Least("admin", recent=True, session=True),
    "POST /api/v1/users/{user}/{change}": Least("admin", recent=True, session=True),
    "GET /api/v1/tokens": "viewer",
    "POST /api/v1/tokens": Least("viewer", recent=True, session=True),
    "POST /api/v1/tokens/{number}/revoke": Least("viewer", recent=True, session=True),
}


class RouteWithoutRole(Exception):
    """Reports that the table and the routes of the application differ: the message names the rows."""


@dataclass(frozen=True)
class Match:
    """Holds what a request needs, and the run in its path; `least` is None if there is no route."""

    least: Least | None
    run_id: str = ""

    @property
    def is_open(self) -> bool:
        """Return True if the request needs no session."""
        return self.least is not None and self.least.role == ANYONE

    def allows(self, role: str) -> bool:
        """Return True if a person with this role may send the request."""
        return self.least is None or _RANKS[role] >= _RANKS[self.least.role]


@dataclass(frozen=True)
class Access:
    """Holds the table, compiled: method, pattern of the path and needs of each route.

    Invariant: the patterns are those by which Starlette finds a route, so that a path has a row if it has a route.
    """

    rows: tuple[tuple[str, re.Pattern[str], Least], ...]

    @classmethod
    def of(cls, app: object, table: Mapping[str, str | Least] = LEAST) -> Access:
        """Compile the table of an application; raise `RouteWithoutRole` if it is not that of its routes."""
        found = set(declared(app))
        if found != table.keys():
            without, unused = sorted(found - table.keys()), sorted(table.keys() - found)
            raise RouteWithoutRole(f"routes without a row in LEAST: {without}; rows without a route: {unused}")
        rows = []
        for row, need in table.items():
            method, path = row.split(" ", 1)
            rows.append((method, compile_path(path)[0], need if isinstance(need, Least) else Least(need)))
        return cls(tuple(rows))

    def find(self, method: str, path: str) -> Match:
        """Return what a request needs: all that the rows which match it want."""
        wanted = "GET" if method == "HEAD" else method
        each = ((need, pattern.match(path)) for row, pattern, need in self.rows if row == wanted)
        found = [(need, match) for need, match in each if match]
        if not found:
            return Match(None)
        role = max((need.role for need, _ in found), key=_RANKS.__getitem__)
        recent, session = any(need.recent for need, _ in found), any(need.session for need, _ in found)
        return Match(Least(role, recent, session), found[0][1].groupdict().get("run_id", ""))


_RANKS = {role: rank for rank, role in enumerate((ANYONE, *ROLES))}


def declared(app: object) -> Iterator[str]:
    """Yield each route of an application as its row in the table: `GET /runs/{run_id}`."""
    for route in getattr(app, "routes", ()):
        if isinstance(route, Mount):
            yield f"GET {route.path}/{{path:path}}"
        elif isinstance(route, Route):
            yield from (f"{method} {route.path}" for method in route.methods or () if method != "HEAD")
        else:
            yield from declared(route.original_router)


API: Final = "/api/v1"  # before the path of every route that has no HTML
VISITOR: Final = "thinwire.visitor"  # in the scope of a request


@dataclass(frozen=True)
class Visitor:
    """Holds who sent a request; `still_known` looks again, for a response that lasts."""

    person: Person
    still_known: Callable[[], bool]


def visitor(request: Request) -> Visitor:
    """Return who sent a request that the guard let pass."""
    found = request.scope[VISITOR]
    assert isinstance(found, Visitor)
    return found


async def who(request: Request) -> str:
    """Return the actor of a request for the audit log and for commands."""
    return visitor(request).person.who


def from_state(name: str) -> Any:
    """Return the dependency on what `create_app` put into `app.state` under this name.

    A route takes it as the type of a parameter, for example `store: StoreDep`. A module names the dependencies that its
    own routes alone take.
    """

    async def part(request: Request) -> object:
        return getattr(request.app.state, name)

    return Depends(part)


Who = Annotated[str, Depends(who)]
StoreDep = Annotated[Store, from_state("store")]
SettingsDep = Annotated[Settings, from_state("settings")]
ReaderDep = Annotated[Reader, from_state("reader")]
# One pattern for each kind of name in an address serves HTML pages and API alike.
RunId = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,80}$", description="an id, its unique beginning, or latest")]
Number = Annotated[int, Path(ge=1, le=2**31 - 1)]
