"""The paths that exist: which method, how long a body may be, and which parts of the path are names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qsl

from thinwire.core.messages import MAX_HEAD_BYTES
from thinwire.flower.wire.framing import INLINE_BYTES, LENGTH

Who = Literal["anyone", "stranger", "newcomer", "device"]
RUN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
HELLO, PULL, PUSH = "/tw/v1/hello", "/tw/v1/pull", "/tw/v1/push"
CA, JOIN, LEAVE = "/tw/v1/ca", "/tw/v1/join", "/tw/v1/leave"


@dataclass(frozen=True)
class Route:
    """`who` may call: anyone (unsigned), a stranger (any key that signed), a newcomer (one that the door may enrol), or
    only a device that has a row.
    """

    name: str
    method: str
    path: re.Pattern[str]
    who: Who
    most_bytes: int = 0

    @classmethod
    def of(cls, name: str, method: str, path: str, who: Who, most_bytes: int = 0) -> Route:
        return cls(name, method, re.compile(path), who, most_bytes)


ROUTES: tuple[Route, ...] = (
    Route.of("ca", "GET", CA, "anyone"),
    Route.of("join", "POST", JOIN, "stranger", 4 * 2**10),
    Route.of("hello", "POST", HELLO, "newcomer", 256 * 2**10),
    Route.of("pull", "POST", PULL, "device", 256 * 2**10),
    Route.of("push", "POST", PUSH, "device", LENGTH.size + MAX_HEAD_BYTES + INLINE_BYTES),
    Route.of("leave", "POST", LEAVE, "device", 4 * 2**10),
    Route.of("bundle", "GET", r"/tw/v1/asks/(?P<ask>[A-Za-z0-9._~-]{1,255})/bundle", "device"),
    Route.of("offset", "HEAD", rf"/tw/v1/parts/(?P<run>{RUN})/(?P<sequence>\d{{1,18}})/(?P<index>\d{{1,6}})", "device"),
    Route.of(
        "part", "PUT", rf"/tw/v1/parts/(?P<run>{RUN})/(?P<sequence>\d{{1,18}})/(?P<index>\d{{1,6}})", "device", 2**40
    ),
)


@dataclass(frozen=True)
class Found:
    """A route, what its path names, and what stands behind the question mark."""

    route: Route
    names: dict[str, str]
    query: dict[str, str]


def found(method: str, target: str) -> Found | None:
    """The route of a request target, compared byte for byte: nothing is unquoted or normalised."""
    path, question, query = target.partition("?")
    for route in ROUTES:
        if route.method == method and (match := route.path.fullmatch(path)) is not None:
            if question and route.name != "part":
                return None
            try:
                return Found(route, match.groupdict(), dict(parse_qsl(query, max_num_fields=4)))
            except ValueError:
                return None
    return None
