"""Crowds at a device API in a process of its own: its memory is bounded, and who is in goes on making rounds."""

from __future__ import annotations

import contextlib
import errno
import resource
import selectors
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.api_process import ApiProcess, answering, api_process
from tests.support.callers import Caller, address_of
from tests.support.fleet_words import PATIENCE_S
from tests.support.watched import hello_of_tls
from thinwire.transport.protocol.http import CA
from thinwire.transport.server.connections import MAX_UNSIGNED, MAX_UNSIGNED_OF_ADDRESS

MAX_MORE_BYTES = 64 * 2**20
CROWD = 5_000
ADDRESSES = 250


@contextlib.contextmanager
def crowded(folder: Path) -> Iterator[ApiProcess]:
    """A device API with a device in it that has made rounds and goes on answering."""
    (folder / "api").mkdir()
    with api_process(folder / "api") as made, answering(made.link(folder / "pi-1", "pi-1"), "pi-1", folder):
        for _ in range(3):
            made.round_s()
        made.forget_peak()
        yield made


@pytest.fixture(scope="module")
def one_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiProcess]:
    with crowded(tmp_path_factory.mktemp("crowded")) as made:
        yield made


@pytest.fixture
def api(one_api: ApiProcess) -> ApiProcess:
    """The device API after the strangers of an earlier test have gone, with the peak of its memory as it is now."""
    end = time.monotonic() + PATIENCE_S
    while one_api.say("stats")["strangers"]:
        assert time.monotonic() < end, "strangers that have gone are still counted"
        time.sleep(0.02)
    one_api.forget_peak()
    return one_api


@pytest.fixture
def many_files() -> Iterator[None]:
    """As many open files as a crowd needs, where the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(soft, min(hard, CROWD + 1000) if hard != resource.RLIM_INFINITY else CROWD + 1000)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Crowd:
    """Connections from many addresses of 127.0.0.0/8, each of which says something and then no more."""

    def __init__(self, api: ApiProcess, words: tuple[bytes, ...]) -> None:
        self.where, self.words = address_of(api), words
        self.sockets: list[socket.socket] = []
        self.selector = selectors.DefaultSelector()

    def come(self, count: int) -> None:
        for _ in range(count):
            nth = len(self.sockets)
            raw = socket.socket()
            raw.setblocking(False)
            raw.bind((f"127.77.{nth % ADDRESSES // 250}.{1 + nth % ADDRESSES}", 0))
            if (failed := raw.connect_ex(self.where)) not in (0, errno.EINPROGRESS):
                raise OSError(failed, "cannot connect")
            self.sockets.append(raw)
            self.selector.register(raw, selectors.EVENT_WRITE, self.words[nth % len(self.words)])
        while self.selector.get_map():
            for key, _ in self.selector.select():
                self.selector.unregister(key.fileobj)
                with contextlib.suppress(OSError):  # it was one too many
                    key.fileobj.send(key.data)  # type: ignore[union-attr]  # it is a socket

    def go(self) -> None:
        for raw in self.sockets:
            raw.close()
        self.selector.close()


def test_five_thousand_connections_hold_little_and_keep_no_device_from_its_rounds(
    api: ApiProcess, many_files: None
) -> None:
    """Silent ones, half a handshake, a whole first flight, and plain HTTP that never ends its header."""
    before, refused_before = api.memory(), api.say("stats")["refused_connections"]
    crowd = Crowd(api, (b"", hello_of_tls()[:50], hello_of_tls(), b"GET / HTTP/1.1\r\nx: " + b"y" * 30_000))
    rounds = []
    try:
        for _ in range(10):
            crowd.come(CROWD // 10)
            rounds.append(api.round_s())
            stats = api.say("stats")
            assert stats["strangers"] <= MAX_UNSIGNED
            assert stats["connections"] <= MAX_UNSIGNED + 2
    finally:
        crowd.go()
    assert len(rounds) == 10
    refused = api.say("stats")["refused_connections"] - refused_before
    assert refused >= CROWD // 2  # who went before the device API came to it is in no count
    assert api.memory("VmHWM") - before <= MAX_MORE_BYTES


def test_one_address_holds_thirty_two_connections_and_its_oldest_makes_room(api: ApiProcess) -> None:
    """Others are approved, and so is the next of this address."""
    here = [Caller(api, source="127.88.0.1") for _ in range(MAX_UNSIGNED_OF_ADDRESS)]
    lines = [caller.connection() for caller in here]
    one_more = Caller(api, source="127.88.0.1").connection()
    with pytest.raises(OSError):
        here[0].call("GET", CA, headers={}, on=lines[0])
    for line in (*lines[1:], one_more):
        assert here[0].call("GET", CA, headers={}, on=line).status == 200
        line.close()
    assert Caller(api, source="127.88.0.2").call("GET", CA, headers={}).status == 200
    lines[0].close()


def test_a_hundred_headers_without_end_are_cut_off_in_bounded_memory(api: ApiProcess, many_files: None) -> None:
    """Through TLS, where a header is bounded by what was decrypted."""
    before = api.memory()
    lines = [
        Caller(api, source=f"127.99.0.{1 + nth // MAX_UNSIGNED_OF_ADDRESS}").connection()
        for nth in range(4 * MAX_UNSIGNED_OF_ADDRESS)
    ]
    for line in lines:
        line.sock.sendall(f"GET {CA} HTTP/1.1\r\n".encode())
    for _ in range(16):  # twice what may be held, if nothing were cut off
        for line in lines:
            with contextlib.suppress(OSError):
                line.sock.sendall(b"x: " + b"y" * 65_536 + b"\r\n")
        api.round_s()
    for line in lines:
        line.close()
    assert api.memory("VmHWM") - before <= MAX_MORE_BYTES
