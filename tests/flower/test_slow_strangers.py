"""Raw sockets that keep the door waiting, or tell it too much: each is ended by the limit that stands for it.

The clock is the test's: nobody waits here for a time to pass.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet_laws import answer, until
from tests.flower.callers import PATIENCE_S, Caller, TlsPlace, joined
from thinwire.core.clock import VirtualClock
from thinwire.core.messages import reply_to_bytes
from thinwire.flower.door.account import Wire
from thinwire.flower.door.limits import BODY_WINDOW_S, HEAD_BYTES, HEAD_S, UNSIGNED_S
from thinwire.flower.door.protocols import HttpProtocol
from thinwire.flower.wire.framing import packed
from thinwire.flower.wire.routes import CA, HELLO, PULL, PUSH

ASK_CA = b"GET /tw/v1/ca HTTP/1.1\r\nhost: x\r\n\r\n"
ASK_NOTHING = b"GET /nothing HTTP/1.1\r\nhost: x\r\n\r\n"


class Watched(TlsPlace):
    """A door whose patience is moved on by hand."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.patience = VirtualClock()
        self.wires = self.fleet._listener.wires
        self.wires.now = self.patience.now

    def later(self, seconds: float) -> None:
        """So much time passes, and the door looks around."""
        self.fleet._listener.now(lambda: self.patience.advance(seconds))
        self.fleet._listener.now(self.wires.watch)

    @property
    def open(self) -> int:
        return len(self.wires.open)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path)
    yield made
    made.close()


def plain(here: Watched) -> socket.socket:
    """A TCP connection that the door has seen."""
    before = set(here.wires.open)
    raw = socket.create_connection(here.address, timeout=PATIENCE_S)
    until(lambda: set(here.wires.open) - before)
    return raw


def tls(here: Watched) -> ssl.SSLSocket:
    assert here.authority is not None
    return here.context().wrap_socket(plain(here), server_hostname=here.authority.server_name())


def heard(raw: socket.socket) -> bytes:
    """All that comes until the other end hangs up."""
    came = b""
    with contextlib.suppress(ConnectionError, ssl.SSLEOFError):
        while data := raw.recv(65_536):
            came += data
    raw.close()
    return came


def answered(line: socket.socket, request: bytes) -> bytes:
    """The status line of the answer to a request on a connection that stays."""
    line.sendall(request)
    came, wanted = b"", 0
    while b"\r\n\r\n" not in came or len(came.partition(b"\r\n\r\n")[2]) < wanted:
        data = line.recv(65_536)
        assert data, f"it was hung up after {came[:80]!r}"
        came += data
        head = came.partition(b"\r\n\r\n")[0].lower().split(b"\r\n")
        wanted = next((int(each.split(b":")[1]) for each in head if each.startswith(b"content-length")), 0)
    return came.partition(b"\r\n")[0]


def hello_of_tls() -> bytes:
    """The first flight of a handshake."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="x.invalid").do_handshake()
    return outgoing.read()


@pytest.mark.parametrize("said", [b"", hello_of_tls()[:100], hello_of_tls()], ids=["silent", "half", "unfinished"])
def test_who_does_not_get_through_a_handshake_has_ten_seconds(here: Watched, said: bytes) -> None:
    raw = plain(here)
    raw.sendall(said)
    here.later(HEAD_S - 0.1)
    assert here.open == 1
    here.later(0.2)
    heard(raw)
    until(lambda: here.open == 0)


def test_who_is_silent_after_the_handshake_has_ten_seconds_from_its_first_byte(here: Watched) -> None:
    line = tls(here)
    here.later(HEAD_S + 0.1)
    assert heard(line) == b""


def test_a_head_that_comes_byte_by_byte_has_ten_seconds(here: Watched) -> None:
    line = tls(here)
    for at in range(int(HEAD_S)):
        line.sendall(f"GET {CA} HTTP/1.1"[at : at + 1].encode())
        here.later(1.0)
    assert here.open == 1
    here.later(0.1)
    assert heard(line) == b""


def test_who_asks_again_and_again_without_a_signature_has_thirty_seconds(here: Watched) -> None:
    line = tls(here)
    for _ in range(3):
        assert answered(line, ASK_CA).startswith(b"HTTP/1.1 200")
        assert answered(line, ASK_NOTHING).startswith(b"HTTP/1.1 404")
        here.later(UNSIGNED_S / 3 - 0.1)
    assert here.open == 1
    here.later(0.5)
    assert heard(line) == b""


def test_a_refused_body_that_never_comes_has_no_more_time_than_a_stranger(here: Watched) -> None:
    line = tls(here)
    head = f"POST {HELLO} HTTP/1.1\r\nhost: x\r\ncontent-length: 60000\r\n\r\n".encode()
    assert answered(line, head).startswith(b"HTTP/1.1 401")
    line.sendall(bytes(30_000))
    here.later(UNSIGNED_S - 0.1)
    assert here.open == 1, "a body that was refused may still be on its way: cut off, its sender would not see why"
    here.later(0.2)
    assert heard(line) == b""


def test_a_refused_body_of_some_size_leaves_its_connection_to_the_next_request(here: Watched) -> None:
    line = tls(here)
    head = f"POST {HELLO} HTTP/1.1\r\nhost: x\r\ncontent-length: 60000\r\n\r\n".encode()
    assert answered(line, head + bytes(60_000)).startswith(b"HTTP/1.1 401")
    assert answered(line, ASK_CA).startswith(b"HTTP/1.1 200")
    line.close()


def test_a_device_that_signed_may_be_silent(here: Watched) -> None:
    caller = joined(here)
    connection = caller.connection()
    for _ in range(3):
        assert caller.call("POST", PULL, caller.wanted(), on=connection).short == (401, "hello")
        here.later(500.0)
        assert here.open == 1
    connection.close()


def request_of(caller: Caller, method: str, path: str, body: bytes, length: int, digest: bytes) -> bytes:
    signed = caller.signer.headers(method, path, digest, length)
    lines = "".join(f"{name}: {value}\r\n" for name, value in signed.items())
    return f"{method} {path} HTTP/1.1\r\nhost: x\r\n{lines}content-length: {length}\r\n\r\n".encode() + body


def body_of(here: Watched) -> Wire:
    (wire,) = [wire for wire in here.wires.open if wire.body_since is not None]
    return wire


def sending(here: Watched, caller: Caller, body: bytes) -> ssl.SSLSocket:
    """A part on its way, of which no byte was sent yet."""
    head = answer(caller.name, "ask-1", 1, body)
    assert caller.call("POST", PUSH, packed(reply_to_bytes(head))).told == {"offsets": [0]}
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


@pytest.mark.parametrize("piece", [2**20, 1000, 16_383])
def test_a_head_has_16_kib_and_not_a_byte_more(here: Watched, piece: int) -> None:
    def head(size: int) -> bytes:
        line = f"GET {CA} HTTP/1.1\r\nhost: x\r\nx: ".encode()
        return line + b"y" * (size - len(line) - 4) + b"\r\n\r\n"

    for size, met in ((HEAD_BYTES, b"HTTP/1.1 200"), (HEAD_BYTES + 1, b"")):
        line, request = tls(here), head(size)
        with contextlib.suppress(OSError):
            for at in range(0, size, piece):
                line.sendall(request[at : at + piece])
                time.sleep(0)
        if met:
            assert answered(line, b"").startswith(met)
            assert answered(line, head(HEAD_BYTES)).startswith(met), "each head anew"
            line.close()
        else:
            assert heard(line) == b""


def test_a_head_without_end_is_cut_off(here: Watched) -> None:
    line = tls(here)
    with pytest.raises(OSError):
        line.sendall(f"GET {CA} HTTP/1.1\r\n".encode())
        for nth in range(64):
            line.sendall(f"h{nth}: {'b' * 2**18}\r\n".encode())
    line.close()


def test_a_large_body_behind_a_small_head_is_no_head(here: Watched) -> None:
    """However the bytes are cut on their way."""
    caller, body = joined(here), bytes(200_000)
    assert caller.hello().status == 200
    given = packed(reply_to_bytes(answer("pi-1", "ask-1", 1, body))) + body
    for split in (0, 1, 2, 3):
        request = request_of(caller, "POST", PUSH, given, len(given), hashlib.sha256(given).digest())
        at = request.index(b"\r\n\r\n") + split
        line = tls(here)
        line.sendall(request[:at])
        assert answered(line, request[at:]).startswith(b"HTTP/1.1 200")
        line.close()


def test_who_does_not_wait_for_an_answer_is_cut_off_or_answered_in_order(here: Watched) -> None:
    line = tls(here)
    line.sendall(ASK_NOTHING * 400)
    line.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert heard(line).count(b"HTTP/1.1 404") == 401
    line = tls(here)
    with contextlib.suppress(OSError):
        line.sendall(ASK_CA * 400)
    assert heard(line).count(b"HTTP/1.1 200") <= 400
    assert joined(here).hello().status == 200


def test_a_body_in_chunks_is_of_unknown_length_and_not_read(here: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.flower.door.protocols.LINGER_S", 0.05)
    for method, path in (("POST", HELLO), ("GET", CA), ("PUT", "/tw/v1/parts/r/1/0"), ("POST", PUSH)):
        line = tls(here)
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode()
        line.sendall(head + b"5\r\nhello\r\n" * 3)
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
        here.later(HEAD_S + 0.1)
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
    for said in (b"", ASK_CA, ASK_NOTHING, signed, signed, b"\0", ASK_NOTHING * 3, ASK_CA * 3, upgrade, signed[:50]):
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


def kept(here: Watched) -> list[HttpProtocol]:
    """By type alone: some objects of other tests warn when they are asked for their class."""
    found = [each for each in gc.get_objects() if type(each) is HttpProtocol]
    return [each for each in found if each.wires is here.wires]
