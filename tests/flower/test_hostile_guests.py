"""What an expert would try through stock nodes, and from a browser on the aggregator's machine."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tests.support.callers import PATIENCE_S, Caller, TlsPlace, tls_place
from tests.support.transport_doubles import MemoryRoster
from thinwire.core.clock import RealClock
from thinwire.core.errors import UsageError
from thinwire.core.serialization import assignment_to_bytes
from thinwire.core.signals import until
from thinwire.core.types import Assignment
from thinwire.flower.stock_apps import Carried, described, trained
from thinwire.flower.stock_gateway import StockPass, StockSuperLink, SuperExec
from thinwire.transport.protocol.signing import PUBLIC_KEY_HEADER, fingerprint, public_der
from thinwire.transport.server.connections import CONNECTIONS_OF_A_GUEST


@pytest.fixture
def here(tmp_path: Path) -> Iterator[TlsPlace]:
    with tls_place(tmp_path) as made:
        yield made


# A browser on the aggregator's machine


@pytest.mark.parametrize(
    "browser",
    [{"host": "evil.example"}, {"origin": "http://evil.example"}, {"origin": "null"}, {"sec-fetch-site": "none"}],
)
def test_no_page_in_a_browser_controls_the_second_superlink(browser: dict[str, str]) -> None:
    """Whoever may call it runs code. A page whose name is rebound to 127.0.0.1 calls it as its own."""
    link = StockSuperLink(authenticated=False)

    def assign(headers: dict[str, str]) -> int:
        connection = http.client.HTTPConnection(link.control_address, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            kind = {"content-type": "application/protobuf", "accept": "application/protobuf"}
            connection.request("POST", "/v1/control/list-runs", b"", {**kind, **headers})
            return connection.getresponse().status

    async def both() -> list[int]:
        async with link.running():
            return [await asyncio.to_thread(assign, headers) for headers in ({}, browser)]

    assert asyncio.run(both()) == [200, 403]


@pytest.mark.parametrize("host", ["evil.example:9090", "127.0.0.1.evil.example", "", "localhost.evil:9090"])
def test_no_page_in_a_browser_passes_a_plain_device_api_as_a_stock_node(host: str) -> None:
    guests = StockPass(MemoryRoster(), RealClock(), SuperExec(Path("said")), private=True)
    for good in ("127.0.0.1:9090", "localhost:9090", "[::1]:9090", "127.1.2.3"):
        assert guests.may_pass({b"host": good.encode()}) is None
    assert (refusal := guests.may_pass({b"host": host.encode()})) is not None
    assert (refusal.status, refusal.kind) == (403, "browser")
    assert guests.may_pass({b"host": b"127.0.0.1:9090", b"origin": b"http://127.0.0.1:9090"}) is not None


@pytest.mark.parametrize("kind", ["query", "train"])
def test_a_run_of_stock_nodes_names_no_module(tmp_path: Path, kind: str) -> None:
    """What is trained is named on the node's own command line; the run's name for it went before that."""
    (tmp_path / "his.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    context = cast(Any, SimpleNamespace(node_config={"task": "json", "home": str(tmp_path)}, node_id=1))
    name = f"digits={tmp_path}/his.py:x"
    with pytest.raises(UsageError, match="is no task's name"):
        if kind == "query":
            described(Carried(json.dumps({"task": name, "seed": 1}).encode()), context)
        else:
            trained(Carried(assignment_to_bytes(Assignment("digits-1.1.pi-1", "digits-1", name, "train", {}))), context)
    assert not (tmp_path / "ran").exists()


class AllPass:
    """Guests of whom everybody may pass, by the key that they name."""

    paths = frozenset({"/v1/fleet/pull-messages"})

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield

    def may_pass(self, headers: Mapping[bytes, bytes]) -> None:
        return None

    def who(self, headers: Mapping[bytes, bytes]) -> str:
        return headers[b"key"].decode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


def test_a_stock_node_holds_so_many_connections_too(tmp_path: Path) -> None:
    with tls_place(tmp_path, guests=AllPass()) as here:
        caller = Caller(here)
        held = [(caller.connection(), {"key": "a" if nth < 24 else "b"}) for nth in range(26)]
        for connection, headers in held:
            assert caller.call("POST", "/v1/fleet/pull-messages", b"", headers, connection).status == 200
        until(lambda: here.fleet.stats()["connections"] == CONNECTIONS_OF_A_GUEST + 2, PATIENCE_S)
        assert here.fleet.stats()["connections"] == CONNECTIONS_OF_A_GUEST + 2
        for connection, _ in held:
            connection.close()


def test_one_key_of_a_stock_node_is_one_however_it_is_spelled() -> None:
    guests = StockPass(MemoryRoster(), RealClock(), SuperExec(Path("said")), private=False)
    public = ec.generate_private_key(ec.SECP384R1()).public_key()
    pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    said = {
        guests.who({PUBLIC_KEY_HEADER.encode(): base64.b64encode(spelled)})
        for spelled in (pem, pem + b"\n", b"x\n" + pem)
    }
    assert said == {fingerprint(public_der(public))}
