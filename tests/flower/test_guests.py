"""Another app behind the device API is reached at its own paths alone, and its keys open none of ours."""

from __future__ import annotations

import http.client
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.device_by_hand import Caller
from tests.support.transport_doubles import Place, place
from thinwire.core.fleet import FixedLimits
from thinwire.core.serialization import ReplyLimit
from thinwire.transport.protocol.http import ApiError


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    with place(tmp_path, limits=FixedLimits(ReplyLimit(100_000))) as made:
        yield made


class Passing:
    """A guest app that answers with its path."""

    paths = frozenset({"/v1/fleet/pull-messages"})

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield

    def may_pass(self, headers: Mapping[bytes, bytes]) -> ApiError | None:
        return None if b"flwr-signature" in headers else ApiError(412, "unknown", "not approved here")

    def who(self, headers: Mapping[bytes, bytes]) -> str:
        return headers[b"flwr-signature"].decode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": body})


def test_guests_pass_at_their_paths_alone(tmp_path: Path) -> None:
    with place(tmp_path, guests=Passing()) as here:
        caller = http.client.HTTPConnection(here.fleet.address, timeout=60)
        for path, headers, status in (
            ("/v1/fleet/pull-messages", {"flwr-signature": "x"}, 200),
            ("/v1/fleet/pull-messages", {}, 412),
            ("/v1/fleet/pull-messages?x", {"flwr-signature": "x"}, 404),
            ("/v1/fleet/../fleet/pull-messages", {"flwr-signature": "x"}, 404),
            ("/v1/fleet/push-messages", {"flwr-signature": "x"}, 404),
        ):
            caller.request("POST", path, b"body", headers)
            got = caller.getresponse()
            assert (path, got.status) == (path, status)
            got.read()
        caller.close()


def test_a_stock_nodes_key_opens_no_path_of_ours(here: Place) -> None:
    caller = Caller(here)
    caller.hello()
    here.roster.devices["pi-1"] = replace(here.roster.devices["pi-1"], how="stock")
    assert caller.hello() == (403, "pending")
    assert caller.pull() == (403, "pending")
