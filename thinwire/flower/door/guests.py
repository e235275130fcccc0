"""Requests that the door passes on: stock Flower nodes, to a SuperLink that is not ours (flower/stock)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from thinwire.flower.wire.refusals import Refusal

LOOPBACK = re.compile(rb"(?:localhost|127(?:\.\d{1,3}){3}|\[::1\])(?::\d{1,5})?")
MOST_BYTES = 64 * 2**20  # of one request: Flower sends objects in pieces of 5 MiB


def require_no_browser(headers: Mapping[bytes, bytes]) -> Refusal | None:
    """For an address that only programs of this machine may call, and that a browser on it reaches as well.

    A page whose name is rebound to this address sends that name as Host, and a browser says with each POST which page
    sent it (Fetch standard, section 3.2). No program of Flower says either.
    """
    if LOOPBACK.fullmatch(headers.get(b"host", b"")) and not headers.keys() & {b"origin", b"sec-fetch-site"}:
        return None
    return Refusal(403, "browser", "this address is for programs of this machine, not for pages")


class Guests(Protocol):
    """An ASGI app behind exact POST paths, and who may reach it."""

    @property
    def paths(self) -> frozenset[str]: ...
    def running(self) -> AbstractAsyncContextManager[None]: ...  # in the door's loop, for as long as it is open
    def may_pass(self, headers: Mapping[bytes, bytes]) -> Refusal | None: ...  # judged at the head, as all else
    def who(self, headers: Mapping[bytes, bytes]) -> str:  # whose key signed what may pass; "": anybody of this machine
        ...

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None: ...  # ASGI
