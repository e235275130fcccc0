"""Bytes and requests of a device are counted at the device API, as they pass its socket."""

from __future__ import annotations

import base64
import hashlib
import socket
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.support.device_by_hand import Caller
from tests.support.fleet_words import answer, envelope, hello, polled, pulled
from tests.support.transport_doubles import Place, place
from thinwire.core.errors import NotWritten
from thinwire.core.fleet import ClientConnected, FixedLimits
from thinwire.core.serialization import ReplyLimit
from thinwire.core.types import PhaseReply, ReplyHeader, phase_id
from thinwire.transport.protocol import registration
from thinwire.transport.protocol.http import HELLO, pack
from thinwire.transport.server.connections import Connection, TrafficCounter


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    limits = FixedLimits(ReplyLimit(100_000))
    with place(tmp_path, limits=limits, grace_s=60.0) as made:  # a caller between two connections has not left
        yield made


def test_bytes_and_requests_of_a_device_are_counted(here: Place, tmp_path: Path) -> None:
    """Two requests a round, and a few hundred bytes around what is carried."""
    link = here.link("pi-1")
    link.hello(hello("pi-1"))
    polled(here.fleet, ClientConnected)
    for round_number in (1, 2):
        model = bytes(50_000)
        here.fleet.send([envelope("pi-1", f"assignment-{round_number}", tmp_path, model)])
        assignment = pulled(link).assignment
        body = tmp_path / "answer"
        body.write_bytes(bytes(20_000))
        link.push(answer("pi-1", assignment.assignment_id, round_number, bytes(20_000)), body)
        transfer = polled(here.fleet, ReplyHeader).transfer
        assert transfer is not None
        assert transfer.requests == (3 if round_number == 1 else 2)
        assert 50_000 < (transfer.sent_bytes or 0) < 52_000
        assert 20_000 < (transfer.received_bytes or 0) < 23_500
    stats = here.fleet.stats()
    assert stats["requests"] == {"hello": 1, "pull": 2, "push": 2}
    assert stats["sent_bytes"] > 100_000


def test_the_bytes_of_a_reply_that_the_disk_refused_are_counted_with_the_next_try(
    here: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, body = Caller(here), bytes(20_000)
    device.hello()
    given = answer("pi-1", "assignment-1", 1, body)
    with monkeypatch.context() as full:
        full.setattr(here.spool, "commit", Mock(side_effect=NotWritten("cannot write", why="No space left on device")))
        assert device.push(given, body) == (503, "disk")
    assert device.push(given, body) == (200, "")
    transfer = polled(here.fleet, ReplyHeader).transfer
    assert transfer is not None
    assert transfer.requests == 3
    assert 40_000 < (transfer.received_bytes or 0) < 45_000


def message(letters: int) -> str:
    """A message of a phase, which no compression makes smaller than three quarters."""
    return base64.b64encode(hashlib.shake_128(b"share").digest(letters * 3 // 4)).decode()


def test_the_bytes_of_a_secure_round_are_counted_with_its_masked_update(here: Place, tmp_path: Path) -> None:
    """The model comes before the advertisement, and no phase of the round has an update of its own."""
    link, training = here.link("pi-1"), "digits-1.3.pi-1"
    link.hello(hello("pi-1"))
    polled(here.fleet, ClientConnected)
    here.fleet.send([envelope("pi-1", training, tmp_path, bytes(50_000))])
    pulled(link)
    link.push(PhaseReply(training, message(4_000)))
    polled(here.fleet, PhaseReply)
    here.fleet.send([envelope("pi-1", phase_id(training, "share"), tmp_path, bytes(6_000))])
    pulled(link)
    link.push(PhaseReply(phase_id(training, "share"), message(8_000)))
    polled(here.fleet, PhaseReply)
    body = tmp_path / "answer"
    body.write_bytes(bytes(20_000))
    link.push(answer("pi-1", training, 3, bytes(20_000)), body)
    transfer = polled(here.fleet, ReplyHeader).transfer
    assert transfer is not None
    assert transfer.requests == 6
    assert 56_000 < (transfer.sent_bytes or 0) < 60_000
    assert 29_000 < (transfer.received_bytes or 0) < 36_000


def test_each_byte_is_counted_once_with_the_reply_after_it() -> None:
    counter = TrafficCounter()
    counter.sent_bytes += 10
    assert counter.take_unreported() == (10, 0, 0)
    counter.sent_bytes += 20
    counter.requests += 1
    assert [counter.take_unreported(), counter.take_unreported()] == [(20, 0, 1), (0, 0, 0)]


def test_what_passes_the_socket_is_what_is_counted(here: Place) -> None:
    caller = Caller(here)
    said = registration.to_bytes(hello("pi-1"))
    lines = "".join(f"{k}: {v}\r\n" for k, v in caller.signed(HELLO, said).items())
    body = pack(said)
    request = f"POST {HELLO} HTTP/1.1\r\nhost: localhost\r\n{lines}content-length: {len(body)}\r\n\r\n".encode() + body
    host, port = caller.address.split(":")
    with socket.create_connection((host, int(port)), timeout=60) as raw:
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
    link.push(answer("pi-1", "assignment-1", 1, b"abc"), body)
    header = polled(here.fleet, ReplyHeader)
    assert [part.sha256 for part in header.parts] == [hashlib.sha256(b"abc").hexdigest()]


def test_a_device_that_is_renamed_is_charged_for_what_comes_after() -> None:
    before, after = TrafficCounter(), TrafficCounter()
    pulling, pushing = Connection(), Connection()
    for connection in (pulling, pushing):
        connection.account.sent_bytes += 10  # before the device was known
        connection.belongs_to(before)
    before.sent_bytes += 500
    assert before.take_unreported()[0] == 520
    for connection in (pulling, pushing):
        connection.belongs_to(after)
    assert after.take_unreported() == (0, 0, 0)
    assert (before.wires, list(after.wires)) == ({}, [pulling, pushing])
