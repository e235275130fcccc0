"""The least role of each route. The guard enforces this table, and a route without a row is refused at the start.

A person with a role may do all that the roles before it may: viewers read, operators direct runs and devices, admins
revoke, delete and decide who else may do what.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from starlette.routing import Mount, Route, compile_path

ROLES: Final = ("viewer", "operator", "admin")
ANYONE: Final = "anyone"  # also without a session

LEAST: Final[Mapping[str, str]] = {
    "GET /healthz": ANYONE,
    "GET /login": ANYONE,
    "POST /login": ANYONE,
    "POST /logout": "viewer",
    "GET /static/{path:path}": ANYONE,
    "GET /": "viewer",
    "GET /alerts": "viewer",
    "GET /devices": "viewer",
    "GET /devices/{name}": "viewer",
    "GET /runs/{run_id}": "viewer",
    "GET /api/v1/openapi.json": "viewer",
    "GET /api/v1/service": "viewer",
    "GET /api/v1/live": "viewer",
    "GET /api/v1/runs": "viewer",
    "GET /api/v1/groups": "viewer",
    "GET /api/v1/runs/{run_id}": "viewer",
    "GET /api/v1/runs/{run_id}/view": "viewer",
    "GET /api/v1/runs/{run_id}/events": "viewer",
    "GET /api/v1/runs/{run_id}/events/stream": "viewer",
    "GET /api/v1/runs/{run_id}/rounds": "viewer",
    "GET /api/v1/runs/{run_id}/rounds.csv": "viewer",
    "GET /api/v1/runs/{run_id}/rounds/{number}": "viewer",
    "GET /api/v1/runs/{run_id}/lines": "viewer",
    "GET /api/v1/runs/{run_id}/updates": "viewer",
    "GET /api/v1/runs/{run_id}/updates.csv": "viewer",
    "GET /api/v1/runs/{run_id}/clients": "viewer",
    "GET /api/v1/runs/{run_id}/clients.csv": "viewer",
    "POST /api/v1/runs/{run_id}/{verb}": "operator",
    "GET /api/v1/alerts": "viewer",
    "GET /api/v1/alerts.csv": "viewer",
    "POST /api/v1/alerts/{number}/acknowledge": "operator",
    "GET /api/v1/devices": "viewer",
    "GET /api/v1/devices.csv": "viewer",
    "GET /api/v1/devices/{name}": "viewer",
    "POST /api/v1/devices/{name}/approve": "operator",
    "POST /api/v1/devices/{name}/revoke": "admin",
    "GET /api/v1/devices/{name}/revocations/{number}": "viewer",
    "GET /api/v1/invitations": "viewer",
    "POST /api/v1/invitations/{number}/withdraw": "operator",
    "GET /api/v1/refusals": "viewer",
}


class RouteWithoutRole(Exception):
    """The table and the routes of the application differ: the message names the rows."""


@dataclass(frozen=True)
class Access:
    """The table, compiled: method, pattern of the path and least role of each route.

    Invariant: the patterns are those by which Starlette finds a route, so that a path has a row if it has a route.
    """

    rows: tuple[tuple[str, re.Pattern[str], str], ...]

    @classmethod
    def of(cls, app: object, least: Mapping[str, str] = LEAST) -> Access:
        """Compile the table of an application; raise `RouteWithoutRole` if it is not that of its routes."""
        found = set(declared(app))
        if found != least.keys():
            without, unused = sorted(found - least.keys()), sorted(least.keys() - found)
            raise RouteWithoutRole(f"routes without a row in LEAST: {without}; rows without a route: {unused}")
        split = ((*row.split(" ", 1), role) for row, role in least.items())
        return cls(tuple((method, compile_path(path)[0], role) for method, path, role in split))

    def least(self, method: str, path: str) -> str | None:
        """Return the least role for a request, the highest one if several rows match; None if there is no route."""
        wanted = "GET" if method == "HEAD" else method
        found = [role for row, pattern, role in self.rows if row == wanted and pattern.match(path)]
        return max(found, key=_RANKS.__getitem__, default=None)


_RANKS = {role: rank for rank, role in enumerate((ANYONE, *ROLES))}


def may(role: str, least: str | None) -> bool:
    """Return True if a person with `role` may use a route with this least role."""
    return least is None or _RANKS[role] >= _RANKS[least]


def declared(app: object) -> Iterator[str]:
    """Yield each route of an application as its row in the table: `GET /runs/{run_id}`."""
    for route in getattr(app, "routes", ()):
        if isinstance(route, Mount):
            yield f"GET {route.path}/{{path:path}}"
        elif isinstance(route, Route):
            yield from (f"{method} {route.path}" for method in route.methods or () if method != "HEAD")
        else:
            yield from declared(route.original_router)
