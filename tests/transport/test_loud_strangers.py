"""Raw sockets that tell the device API too much, or nothing that it reads: each is ended by the limit that stands
for it.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.callers import joined
from tests.support.fleet_words import answer, until
from tests.support.watched import (
    ASSIGNMENT_CA,
    ASSIGNMENT_NOTHING,
    Watched,
    answered,
    heard,
    hello_of_tls,
    kept,
    plain,
    request_of,
    tls,
)
from thinwire.core.serialization import reply_to_bytes
from thinwire.transport.protocol.http import CA, HELLO, PULL, PUSH, pack
from thinwire.transport.server.connections import HEADER_BYTES, HEADER_S


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("piece", [2**20, 1000, 16_383])
def test_a_header_has_16_kib_and_not_a_byte_more(here: Watched, piece: int) -> None:
    def header(size: int) -> bytes:
        line = f"GET {CA} HTTP/1.1\r\nhost: x\r\nx: ".encode()
        return line + b"y" * (size - len(line) - 4) + b"\r\n\r\n"

    for size, met in ((HEADER_BYTES, b"HTTP/1.1 200"), (HEADER_BYTES + 1, b"")):
        line, request = tls(here), header(size)
        with contextlib.suppress(OSError):
            for at in range(0, size, piece):
                line.sendall(request[at : at + piece])
                time.sleep(0)
        if met:
            assert answered(line, b"").startswith(met)
            assert answered(line, header(HEADER_BYTES)).startswith(met), "each head again"
            line.close()
        else:
            assert heard(line) == b""


def test_a_header_without_end_is_cut_off(here: Watched) -> None:
    line = tls(here)
    with pytest.raises(OSError):
        line.sendall(f"GET {CA} HTTP/1.1\r\n".encode())
        for nth in range(64):
            line.sendall(f"h{nth}: {'b' * 2**18}\r\n".encode())
    line.close()


def test_a_large_body_behind_a_small_head_is_no_header(here: Watched) -> None:
    """However the bytes are cut on their way."""
    caller, body = joined(here), bytes(200_000)
    assert caller.hello().status == 200
    given = pack(reply_to_bytes(answer("pi-1", "assignment-1", 1, body))) + body
    for split in (0, 1, 2, 3):
        request = request_of(caller, "POST", PUSH, given, len(given), hashlib.sha256(given).digest())
        at = request.index(b"\r\n\r\n") + split
        line = tls(here)
        line.sendall(request[:at])
        assert answered(line, request[at:]).startswith(b"HTTP/1.1 200")
        line.close()


def test_who_does_not_wait_for_an_answer_is_cut_off_behind_the_first(here: Watched) -> None:
    line = tls(here)
    line.sendall(ASSIGNMENT_NOTHING * 400)
    line.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert heard(line).count(b"HTTP/1.1 404") == 1
    line = tls(here)
    with contextlib.suppress(OSError):
        line.sendall(ASSIGNMENT_CA * 400)
    assert heard(line).count(b"HTTP/1.1 200") <= 400
    assert joined(here).hello().status == 200


def test_a_body_in_chunks_is_of_unknown_length_and_not_read(here: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.transport.server.http_protocol.LINGER_S", 0.05)
    for method, path in (("POST", HELLO), ("GET", CA), ("PUT", "/tw/v1/parts/r/1/0"), ("POST", PUSH)):
        line = tls(here)
        header = f"{method} {path} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode()
        line.sendall(header + b"5\r\nhello\r\n" * 3)
        said = heard(line)
        assert said.startswith(b"HTTP/1.1 413"), (method, path)
        assert json.loads(said.partition(b"\r\n\r\n")[2])["error"] == "too-large"


def test_two_lengths_or_a_length_and_chunks_are_no_request(here: Watched) -> None:
    """Where two readers could see two different ends of a request, nothing is read (RFC 9112, 6.3)."""
    for lines in ("content-length: 5\r\ntransfer-encoding: chunked", "content-length: 5\r\ncontent-length: 6",
                  "content-length: 5\r\ncontent-length: 5", "content-length: -1", "content-length: 5, 5",
                  "content-length: 0x5", "transfer-encoding: chunked, identity"):  # fmt: skip
        line = tls(here)
        line.sendall(f"POST {HELLO} HTTP/1.1\r\nhost: x\r\n{lines}\r\n\r\nhello".encode())
        said = heard(line)
        assert said == b"" or said.startswith(b"HTTP/1.1 413"), (lines, said)
        assert said.count(b"HTTP/1.1") <= 1


def test_what_is_no_http_gets_no_answer(here: Watched) -> None:
    for said in (b"\0" * 100, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"SSH-2.0-x\r\n", b"GET\r\n\r\n", b"\r\n" * 9000):
        line = tls(here)
        with contextlib.suppress(OSError):
            line.sendall(said)
        here.later(HEADER_S + 0.1)
        assert heard(line) == b"", said


def test_a_protocol_that_it_would_change_to_is_not_changed_to(here: Watched) -> None:
    line = tls(here)
    upgrade = f"GET {CA} HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n".encode()
    assert answered(line, upgrade).startswith(b"HTTP/1.1 200")
    line.close()
    line = tls(here)
    assert answered(line, b"CONNECT agg.example:9090 HTTP/1.1\r\nhost: x\r\n\r\n").startswith(b"HTTP/1.1 404")
    line.close()


RESET = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: closed at once, by a reset


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_of_a_connection_that_ended_nothing_is_kept(here: Watched, reset: bool) -> None:
    """Whatever was said on it: strangers can make as many as they like."""
    caller = joined(here)
    caller.hello()
    body = caller.wanted()
    signed = request_of(caller, "POST", PULL, body, len(body), hashlib.sha256(body).digest())
    upgrade = b"GET / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    for said in (
        b"",
        ASSIGNMENT_CA,
        ASSIGNMENT_NOTHING,
        signed,
        signed,
        b"\0",
        ASSIGNMENT_NOTHING * 3,
        ASSIGNMENT_CA * 3,
        upgrade,
        signed[:50],
    ):
        line = tls(here)
        line.sendall(said)
        if reset:
            if said.startswith(b"GET"):
                line.recv(1)
            line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        line.close()
    raw = plain(here)
    raw.sendall(hello_of_tls())
    raw.close()
    until(lambda: here.open == 0)
    until(lambda: gc.collect() == 0 or not kept(here))
    assert not kept(here)
