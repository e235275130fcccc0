"""Requests that the door passes on: stock Flower nodes, to a SuperLink that is not ours (flower/stock)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from thinwire.flower.wire.refusals import Refusal

MOST_BYTES = 64 * 2**20  # of one request: Flower sends objects in pieces of 5 MiB


class Guests(Protocol):
    """An ASGI app behind exact POST paths, and who may reach it."""

    @property
    def paths(self) -> frozenset[str]: ...
    def running(self) -> AbstractAsyncContextManager[None]: ...  # in the door's loop, for as long as it is open
    def may_pass(self, headers: Mapping[bytes, bytes]) -> Refusal | None: ...  # judged at the head, as all else
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None: ...  # ASGI
