"""The tests' own bad line is as bad as it says."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Iterator

import pytest

from tests.support.proxy import RETRANSMIT_S, proxy


class Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(OSError):
            while data := self.request.recv(65_536):
                self.request.sendall(data)


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 64


@pytest.fixture
def echo() -> Iterator[str]:
    with Server(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield "{}:{}".format(*server.server_address)
        server.shutdown()
        thread.join()


def dialled(address: str) -> socket.socket:
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def echoed(line: socket.socket, data: bytes) -> bytes:
    """What came back before the line was cut, or all."""
    got = b""
    with contextlib.suppress(ConnectionError):
        line.sendall(data)
    with contextlib.suppress(ConnectionError):
        while len(got) < len(data) and (more := line.recv(65_536)):
            got += more
    return got


def test_it_carries_bytes_unchanged_and_counts_them(echo: str) -> None:
    data = bytes(range(256)) * 1000
    with proxy(echo) as carried, dialled(carried.address) as line:
        assert echoed(line, data[:200_000]) == data[:200_000]
        assert (carried.up.given, carried.connections) == (200_000, 1)


def test_a_far_line_takes_its_time_and_a_slow_one_too(echo: str) -> None:
    with proxy(echo, latency_s=0.05) as far, dialled(far.address) as line:
        began = time.monotonic()
        assert echoed(line, b"x") == b"x"
        assert time.monotonic() - began >= 0.1
    with proxy(echo, bytes_per_s=100_000) as slow, dialled(slow.address) as line:
        began = time.monotonic()
        assert len(echoed(line, bytes(20_000))) == 20_000
        assert time.monotonic() - began >= 0.15


def test_what_a_lossy_line_loses_holds_up_what_comes_after_it_and_all_of_it_arrives(echo: str) -> None:
    data = bytes(range(256)) * 200
    with proxy(echo, loss=0.3) as lossy, dialled(lossy.address) as line:
        began = time.monotonic()
        assert echoed(line, data) == data
        assert lossy.up.lost + lossy.down.lost >= 1
        assert time.monotonic() - began >= RETRANSMIT_S


def test_it_cuts_where_it_was_told_to(echo: str) -> None:
    with proxy(echo, cuts_up=[10_000], cuts_down=[15_000]) as bad:
        with dialled(bad.address) as first:
            echoed(first, bytes(50_000))
        assert bad.up.given == 10_000
        with dialled(bad.address) as second:
            echoed(second, bytes(50_000))
        assert bad.down.given == 15_000
        with dialled(bad.address) as third:
            assert len(echoed(third, bytes(50_000))) == 50_000
        assert bad.cut_count == 2


def test_a_silent_line_carries_nothing_until_it_speaks_again(echo: str) -> None:
    with proxy(echo) as line_of, dialled(line_of.address) as line:
        assert echoed(line, b"a") == b"a"
        line_of.silence(True)
        line.settimeout(0.1)
        line.sendall(b"b")
        with pytest.raises(TimeoutError):
            line.recv(1)
        line_of.silence(False)
        line.settimeout(20)
        assert line.recv(1) == b"b"
        line_of.cut()
        with contextlib.suppress(ConnectionError):
            assert line.recv(1) == b""


def test_a_tunnel_is_requested_first(echo: str) -> None:
    with proxy(echo, tunnel=True) as tunnel, dialled(tunnel.address) as line:
        line.sendall(b"CONNECT agg.example:9090 HTTP/1.1\r\n\r\n")
        assert line.recv(100).startswith(b"HTTP/1.1 200")
        assert echoed(line, b"hello") == b"hello"
        assert tunnel.selected == ["CONNECT agg.example:9090 HTTP/1.1\r\n\r\n"]
