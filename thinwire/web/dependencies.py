"""The dependencies of the routes: parameters by which FastAPI hands a route what it works on, and who sent the request.

`create_app` puts the parts of one dashboard, such as its store, into `app.state`. Each module with routes has one
router, which FastAPI analyses once a process. A request takes the parts of the application that serves it.
Dependencies are `async`: FastAPI would call each plain function in a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final

from fastapi import Depends, Request

from thinwire.store import Person, Store
from thinwire.web.run_queries import Reader
from thinwire.web.settings import Settings

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
