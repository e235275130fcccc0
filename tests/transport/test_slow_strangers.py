"""Raw sockets that keep the device API waiting, or tell it too much: each is ended by the limit that stands for it.

The clock is the test's: nobody waits here for a time to pass.
"""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.callers import Caller, joined
from tests.support.fleet_words import answer, until
from tests.support.watched import (
    ASSIGNMENT_CA,
    ASSIGNMENT_NOTHING,
    Watched,
    answered,
    heard,
    hello_of_tls,
    plain,
    request_of,
    tls,
)
from thinwire.core.serialization import reply_to_bytes
from thinwire.transport.protocol.http import CA, HELLO, PULL, PUSH, pack
from thinwire.transport.server.connections import BODY_WINDOW_S, HEADER_S, UNSIGNED_S, Connection


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("said", [b"", hello_of_tls()[:100], hello_of_tls()], ids=["silent", "half", "unfinished"])
def test_who_does_not_get_through_a_handshake_has_ten_seconds(here: Watched, said: bytes) -> None:
    raw = plain(here)
    raw.sendall(said)
    here.later(HEADER_S - 0.1)
    assert here.open == 1
    here.later(0.2)
    heard(raw)
    until(lambda: here.open == 0)


def test_who_is_silent_after_the_handshake_has_ten_seconds_from_its_first_byte(here: Watched) -> None:
    line = tls(here)
    here.later(HEADER_S + 0.1)
    assert heard(line) == b""


def test_a_header_that_comes_byte_by_byte_has_ten_seconds(here: Watched) -> None:
    line = tls(here)
    for at in range(int(HEADER_S)):
        line.sendall(f"GET {CA} HTTP/1.1"[at : at + 1].encode())
        here.later(1.0)
    assert here.open == 1
    here.later(0.1)
    assert heard(line) == b""


def test_who_selects_again_and_again_without_a_signature_has_thirty_seconds(here: Watched) -> None:
    line = tls(here)
    for _ in range(3):
        assert answered(line, ASSIGNMENT_CA).startswith(b"HTTP/1.1 200")
        assert answered(line, ASSIGNMENT_NOTHING).startswith(b"HTTP/1.1 404")
        here.later(UNSIGNED_S / 3 - 0.1)
    assert here.open == 1
    here.later(0.5)
    assert heard(line) == b""


def test_a_refused_body_that_never_comes_has_no_more_time_than_a_stranger(here: Watched) -> None:
    line = tls(here)
    header = f"POST {HELLO} HTTP/1.1\r\nhost: x\r\ncontent-length: 60000\r\n\r\n".encode()
    assert answered(line, header).startswith(b"HTTP/1.1 401")
    line.sendall(bytes(30_000))
    here.later(UNSIGNED_S - 0.1)
    assert here.open == 1, "a body that was refused may still be on its way: cut off, its sender would not see why"
    here.later(0.2)
    assert heard(line) == b""


def test_a_refused_body_of_some_size_leaves_its_connection_to_the_next_request(here: Watched) -> None:
    line = tls(here)
    header = f"POST {HELLO} HTTP/1.1\r\nhost: x\r\ncontent-length: 60000\r\n\r\n".encode()
    assert answered(line, header + bytes(60_000)).startswith(b"HTTP/1.1 401")
    assert answered(line, ASSIGNMENT_CA).startswith(b"HTTP/1.1 200")
    line.close()


def test_a_device_that_signed_may_be_silent(here: Watched) -> None:
    caller = joined(here)
    connection = caller.connection()
    for _ in range(3):
        assert caller.call("POST", PULL, caller.wanted(), on=connection).short == (401, "hello")
        here.later(500.0)
        assert here.open == 1
    connection.close()


def body_of(here: Watched) -> Connection:
    (wire,) = [wire for wire in here.wires.open if wire.body_since is not None]
    return wire


def sending(here: Watched, caller: Caller, body: bytes) -> ssl.SSLSocket:
    """A part on its way, of which no byte was sent yet."""
    header = answer(caller.name, "assignment-1", 1, body)
    assert caller.call("POST", PUSH, pack(reply_to_bytes(header))).told == {"offsets": [0]}
    line, path = tls(here), "/tw/v1/parts/digits-1/1/0?offset=0"
    line.sendall(request_of(caller, "PUT", path, b"", len(body), hashlib.sha256(body).digest()))
    until(lambda: any(wire.body_since is not None for wire in here.wires.open))
    return line


def test_a_body_has_a_speed_and_no_total_time(here: Watched) -> None:
    caller, body = joined(here), bytes(500_000)
    assert caller.hello().status == 200
    line, wire, sent = sending(here, caller, body), body_of(here), 0
    for _ in range(12):
        line.sendall(body[sent : sent + 31 * 1024])
        sent += 31 * 1024
        until(lambda: wire.body_bytes == 31 * 1024)
        here.later(BODY_WINDOW_S)
        assert wire.open
    line.sendall(body[sent : sent + 29 * 1024])
    sent += 29 * 1024
    until(lambda: wire.body_bytes == 29 * 1024)
    here.later(BODY_WINDOW_S)
    heard(line)
    until(lambda: not wire.open)
    kept = caller.call("HEAD", "/tw/v1/parts/digits-1/1/0")
    assert int(kept.headers["upload-offset"]) == sent, "what came is not sent again"
    rest = f"/tw/v1/parts/digits-1/1/0?offset={sent}"
    line = tls(here)
    whole = hashlib.sha256(body).digest()
    assert answered(line, request_of(caller, "PUT", rest, body[sent:], len(body) - sent, whole)).startswith(
        b"HTTP/1.1 200"
    )
    line.close()
