"""Bytes and requests of a device are counted at the door, as they pass its socket."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.device_by_hand import Caller
from tests.support.fleet_words import answer, envelope, hello, polled, pulled, until
from tests.support.transport_doubles import Place, place
from thinwire.core.fleet import FixedLimits, NodeJoined
from thinwire.core.serialization import ReplyLimit
from thinwire.core.types import ReplyHeader
from thinwire.flower.fleet import FlowerFleet
from thinwire.transport.protocol import registration
from thinwire.transport.protocol.http import HELLO, packed
from thinwire.transport.server.connections import Ledger, TrafficCounter


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    with place(tmp_path, limits=FixedLimits(ReplyLimit(100_000))) as made:
        yield made


def test_bytes_and_requests_of_a_device_are_counted(here: Place, tmp_path: Path) -> None:
    """Two requests a round, and a few hundred bytes around what is carried."""
    link = here.link("pi-1")
    link.hello(hello("pi-1"))
    polled(here.fleet, NodeJoined)
    for round_number in (1, 2):
        model = bytes(50_000)
        here.fleet.send([envelope("pi-1", f"ask-{round_number}", tmp_path, model)])
        ask = pulled(link).ask
        body = tmp_path / "answer"
        body.write_bytes(bytes(20_000))
        link.push(answer("pi-1", ask.ask_id, round_number, bytes(20_000)), body)
        transfer = polled(here.fleet, ReplyHeader).transfer
        assert transfer is not None
        assert transfer.requests == (3 if round_number == 1 else 2)
        assert 50_000 < (transfer.sent_bytes or 0) < 52_000
        assert 20_000 < (transfer.received_bytes or 0) < 23_500
    stats = here.fleet.stats()
    assert stats["requests"] == {"hello": 1, "pull": 2, "push": 2}
    assert stats["sent_bytes"] > 100_000


def test_what_was_counted_before_a_restart_is_counted_with_the_answer_that_comes_after_it(tmp_path: Path) -> None:
    model, update = bytes(300_000), bytes(200_000)
    with place(tmp_path, limits=FixedLimits(ReplyLimit(1_000_000)), ledger=tmp_path / "wire") as here:
        link = here.link("pi-1")
        link.hello(hello("pi-1"))
        asked = envelope("pi-1", "ask-1", tmp_path, model)
        here.fleet.send([asked])
        pulled(link)
        here.restart()
        here.fleet.send([asked])
        body = tmp_path / "answer"
        for number in (1, 2):
            body.write_bytes(update)
            link.push(answer("pi-1", f"ask-{number}", number, update), body)
            head = polled(here.fleet, ReplyHeader)
            here.fleet.ack([head.update_id])
            assert (transfer := head.transfer) is not None
            assert len(update) < (transfer.received_bytes or 0) < len(update) + 20_000
            sent = len(model) if number == 1 else 0
            assert sent <= (transfer.sent_bytes or 0) < sent + 20_000, "each byte once, with the answer after it"
            here.restart()


def test_what_was_counted_is_kept_while_the_door_is_open_for_a_kill_may_come(tmp_path: Path) -> None:
    def kept(fleet: FlowerFleet) -> bool:
        now = fleet.stats()
        sent, received, requests = TrafficCounter(Ledger(tmp_path / "wire").of("pi-1")).untold()
        return requests == 1 and (sent, received) == (now["sent_bytes"], now["received_bytes"])

    with place(tmp_path, ledger=tmp_path / "wire") as here:
        here.link("pi-1").hello(hello("pi-1"))
        until(lambda: kept(here.fleet))


def test_a_disk_that_takes_no_counts_does_not_disturb_the_door(tmp_path: Path) -> None:
    with place(tmp_path, limits=FixedLimits(ReplyLimit(100_000)), ledger=tmp_path / "wire") as here:
        (tmp_path / "wire").unlink()
        (tmp_path / "wire").mkdir()
        link = here.link("pi-1")
        link.hello(hello("pi-1"))
        polled(here.fleet, NodeJoined)
        here.fleet.send([envelope("pi-1", "ask-1", tmp_path, bytes(1000))])
        ask = pulled(link).ask
        body = tmp_path / "answer"
        body.write_bytes(bytes(2000))
        link.push(answer("pi-1", ask.ask_id, 1, bytes(2000)), body)
        transfer = polled(here.fleet, ReplyHeader).transfer
        assert transfer is not None
        assert transfer.requests == 3


def test_what_passes_the_socket_is_what_is_counted(here: Place) -> None:
    caller = Caller(here)
    said = registration.to_bytes(hello("pi-1"))
    lines = "".join(f"{k}: {v}\r\n" for k, v in caller.signed(HELLO, said).items())
    body = packed(said)
    request = f"POST {HELLO} HTTP/1.1\r\nhost: x\r\n{lines}content-length: {len(body)}\r\n\r\n".encode() + body
    host, port = caller.address.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        raw.sendall(request)
        got = raw.recv(65_536)
    assert got.startswith(b"HTTP/1.1 200")
    stats = here.fleet.stats()
    assert (stats["received_bytes"], stats["sent_bytes"]) == (len(request), len(got))


def test_digests_in_heads_are_those_of_the_bytes(here: Place, tmp_path: Path) -> None:
    link = here.link("pi-1")
    link.hello(hello("pi-1"))
    body = tmp_path / "answer"
    body.write_bytes(b"abc")
    link.push(answer("pi-1", "ask-1", 1, b"abc"), body)
    head = polled(here.fleet, ReplyHeader)
    assert [part.sha256 for part in head.parts] == [hashlib.sha256(b"abc").hexdigest()]
