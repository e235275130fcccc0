"""A device's end against a real device API: lost connections, restarts, and what an address may be."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fleet_words import PATIENCE_S, answer, envelope, hello, join, polled, pulled, until, written
from tests.support.transport_doubles import Place, place
from thinwire.core.errors import Refused, Unreachable, UsageError
from thinwire.core.fleet import ClientConnected, ClientDisconnected, Delivery
from thinwire.core.types import Failure
from thinwire.transport.device.connect import Address, reach
from thinwire.transport.device.http_client import PIECE_BYTES
from thinwire.transport.device.identity import Trust, device_key
from thinwire.transport.device.link import HttpsLink


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    with place(tmp_path) as made:
        yield made


def test_a_push_outlives_an_idle_connection_that_was_closed(here: Place, tmp_path: Path) -> None:
    link = here.link("pi-1")
    link.hello(hello("pi-1"))
    link.push(answer("pi-1", "assignment-1", 1, b"abc"), written(tmp_path, b"abc"))
    made = link._pushing._line
    assert made is not None
    made.hang_up()
    link.push(answer("pi-1", "assignment-2", 2, b"abc"), written(tmp_path, b"abc"))
    assert len(here.spool.headers()) == 2


def test_an_aggregator_that_is_not_there_is_said_at_once(here: Place) -> None:
    link = join(here, "pi-1")
    here.fleet.close()
    with pytest.raises(Unreachable, match="cannot reach the aggregator at http://127.0.0.1:") as refused:
        link.pull(20.0)
    with pytest.raises(Unreachable):
        link.push(Failure("task-error", "x", "assignment-1"))
    assert refused.value.exit_code == 4
    assert "thinwire aggregator start" in refused.value.hint


def test_a_waiting_pull_outlives_a_restart_of_the_aggregator(here: Place) -> None:
    """The client's service tries again; the link says hello by itself."""
    link, got = join(here, "pi-1"), list[Delivery]()

    def client() -> None:
        while not got:
            try:
                if (delivery := link.pull(20.0)) is not None:
                    got.append(delivery)
            except Unreachable:
                time.sleep(0.02)

    polled(here.fleet, ClientConnected)
    thread = threading.Thread(target=client)
    thread.start()
    until(lambda: here.fleet.stats()["requests"]["pull"] > 0)
    here.restart()
    polled(here.fleet, ClientConnected)
    here.fleet.send([envelope("pi-1", "assignment-1")])
    thread.join(PATIENCE_S)
    assert [delivery.assignment.assignment_id for delivery in got] == ["assignment-1"]


def test_a_closed_link_ends_a_pull_that_waits(here: Place) -> None:
    link, ended = join(here, "pi-1"), list[BaseException]()

    def wait() -> None:
        try:
            link.pull(20.0)
        except Unreachable as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: here.fleet.stats()["requests"]["pull"] > 0)
    link.close()
    thread.join(60)
    assert len(ended) == 1
    assert polled(here.fleet, ClientDisconnected).why == "its connection is closed"


def test_a_cancel_reaches_a_device_that_is_waiting(here: Place) -> None:
    link = join(here, "pi-1")
    here.fleet.send([envelope("pi-1", "assignment-1")])
    pulled(link)
    thread = threading.Thread(target=link.pull, args=(20.0,))
    thread.start()
    until(lambda: here.fleet.stats()["requests"]["pull"] > 1)
    here.fleet.cancel(["assignment-1"])
    thread.join(PATIENCE_S)
    assert link.cancelled() == {"assignment-1"}


def test_a_device_that_is_revoked_while_it_waits_gets_nothing(here: Place) -> None:
    link, ended = join(here, "pi-1"), list[str]()

    def wait() -> None:
        try:
            link.pull(20.0)
        except Refused as refused:
            ended.append(refused.why)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: here.fleet.stats()["requests"]["pull"] > 0)
    here.roster.put("pi-1", "revoked")
    here.fleet.send([envelope("pi-1", "assignment-1")])
    thread.join(PATIENCE_S)
    assert ended == ["pi-1 was revoked"]


def test_a_link_speaks_for_its_own_name_only(here: Place) -> None:
    with pytest.raises(Refused):
        here.link("pi-1").hello(hello("pi-2"))


def test_a_pull_before_a_hello_is_refused(here: Place) -> None:
    with pytest.raises(Unreachable, match="hello"):
        here.link("pi-1").pull(0.0)


@pytest.mark.parametrize(
    "url", ["https://127.0.0.1:9090", "ftp://x", "http://", "http://x:port", "http://10.0.0.1", "https://agg..example"]
)
def test_an_address_that_cannot_be_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        HttpsLink(url, device_key(tmp_path), "pi-1", tmp_path)


def test_a_proxy_that_cannot_be_is_refused_before_anything_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "https://proxy:3128")
    trust = Trust("https://agg.example:9090", (), system=True)
    with pytest.raises(UsageError, match="HTTPS_PROXY is not usable"):
        HttpsLink(trust.url, device_key(tmp_path), "pi-1", tmp_path, trust)


def test_an_address_that_is_of_no_host_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'https://agg\.\.example' is no address of an aggregator"):
        Address.parse("https://agg..example")


def test_the_first_address_says_why_none_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine prefers it; of the others it may not even have the family."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    no_family = 9999
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port)), (no_family, 1, 0, "", ("::1", port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **named: found)
    with pytest.raises(ConnectionRefusedError):
        reach(Address(False, "localhost", port))


def test_a_reply_is_sent_in_pieces_and_a_slow_uplink_is_waited_for(
    here: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, send = list[int](), http.client.HTTPConnection.send

    def noted(connection: http.client.HTTPConnection, data: bytes) -> None:
        sent.append(len(data))
        send(connection, data)

    monkeypatch.setattr(http.client.HTTPConnection, "send", noted)
    link, body = here.link("pi-1"), os.urandom(200_000)
    link.hello(hello("pi-1"))
    link.push(answer("pi-1", "assignment-1", 1, body), written(tmp_path, body))
    assert (max(sent) <= PIECE_BYTES, len(here.spool.headers())) == (True, 1)
    link._pushing._check_silence(len(body) / 2000)  # raises TimeoutError if an uplink of 2 kB/s is too slow


def test_a_device_needs_neither_flwr_nor_torch_nor_a_database() -> None:
    code = (
        "import sys; from thinwire.transport.device import identity, link\n"
        "print([m for m in ('flwr', 'torch', 'sqlalchemy', 'fastapi', 'uvicorn', 'grpc') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_aggregator_needs_no_torch() -> None:
    code = "import sys; from thinwire.flower import FlowerFleet; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
