"""What any page in the operator's browser, and any user of the machine, may try on the dashboard's real process."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.serving import Served, serving
from thinwire.core.log_file import MAX_LOG_BYTES
from thinwire.store import Store
from thinwire.web.connections import MAX_HEADER_BYTES

PATIENCE_S = 60.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store.sqlite3") as opened:
        yield opened


@pytest.fixture
def served(store: Store) -> Iterator[Served]:
    with serving(store.url) as found:
        yield found


def visitor(served: Served, **more: str) -> httpx.Client:
    return httpx.Client(base_url=served.url, timeout=PATIENCE_S, trust_env=False, headers=more)


def opened(served: Served, said: bytes = b"") -> socket.socket:
    host, port = served.address.split(":")
    connection = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
    if said:
        connection.sendall(said)
    return connection


def header(served: Served, line: str, *more: str) -> bytes:
    return "\r\n".join([line, f"Host: {served.address}", *more, "", ""]).encode()


def test_wrong_codes_of_a_foreign_page_do_not_burn_the_right_one(served: Served, store: Store):
    code = store.logins.new_code()
    image = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}
    with visitor(served, **image) as foreign:
        assert [foreign.get(f"/login?code=AAAA-{n}").status_code for n in range(12)] == [403] * 12
        assert foreign.get(f"/login?code={code}").status_code == 403  # nor does one that guessed right use it up
    with visitor(served) as plain:  # a browser that says nothing of where it comes from
        said = [plain.get(f"/login?code=AAAA-{n}").status_code for n in range(12)]
        assert said == [401] * 12
        assert plain.get(f"/login?code={code}").status_code == 303
        assert plain.get("/").status_code == 200


def test_half_requests_keep_nobody_out(served: Served, store: Store):
    halves: list[Callable[[], bytes]] = [
        lambda: b"",
        lambda: header(served, "GET /login HTTP/1.1")[:-2],
        lambda: header(served, "POST /login HTTP/1.1", "Content-Length: 4000") + b"code=",
        lambda: header(served, "GET /healthz HTTP/1.1") + b"\r\n",  # one whole request, and then idle
        lambda: header(served, "GET /static/vendor/preact.js HTTP/1.1") * 200,  # answers that nobody reads
    ]
    with visitor(served) as early, contextlib.ExitStack() as held:
        assert early.post("/login", data={"code": store.logins.new_code()}).status_code == 303
        with early.stream("GET", "/api/v1/live") as news:
            lines = news.iter_lines()
            assert "id: 0" in [next(lines) for _ in range(3)]
            for number in range(300):
                with contextlib.suppress(OSError):
                    held.enter_context(opened(served, halves[number % len(halves)]()))
            with visitor(served) as late:
                assert late.post("/login", data={"code": store.logins.new_code()}).status_code == 303
                assert late.get("/").status_code == 200
            assert early.get("/api/v1/runs").status_code == 200
            store.commands.add("revoke", args={"device": "pi-01"})
            assert any(line.startswith("data:") for line in lines)  # the stream from before goes on


def test_who_does_not_finish_a_request_is_cut_off(served: Served):
    whole = header(served, "GET /healthz HTTP/1.1")
    with contextlib.ExitStack() as held:
        started = [held.enter_context(opened(served, said)) for said in (b"", whole[:-2], whole)]
        assert started[2].recv(4096).startswith(b"HTTP/1.1 200")
        started[2].sendall(b"\r\n")
        for connection in started:
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(4096):  # a TimeoutError fails the test
                    pass


def test_a_header_without_an_end_is_cut_off(served: Served):
    with opened(served, header(served, "GET /login HTTP/1.1")[:-2]) as connection, pytest.raises(ConnectionError):
        for _ in range(2 + 40 * MAX_HEADER_BYTES // 8000):  # more than any buffer on the way holds
            connection.sendall(b"X-More: " + b"x" * 7990 + b"\r\n")
        connection.recv(1)


def test_broken_requests_leave_nothing_in_the_log(store: Store, tmp_path: Path):
    log = tmp_path / "said"
    with serving(store.url, said=log) as served:
        for said in (b"no http\r\n\r\n", header(served, "POST /login HTTP/1.1", "Content-Length: 9") + b"c"):
            for _ in range(20):
                opened(served, said).close()
        with visitor(served) as client:
            assert client.get("/healthz").status_code == 200
    assert log.read_text() == ""


def test_what_the_dashboard_prints_fills_no_disk(store: Store, tmp_path: Path):
    log = tmp_path / "dashboard.log"
    log.write_bytes(b"error\n" * (MAX_LOG_BYTES // 6 + 1))  # of a process that has printed as much
    with serving(store.url, "127.0.0.1:0", "--log", str(log), said=log, adds=True):
        end = time.monotonic() + PATIENCE_S
        while not (tmp_path / "dashboard.log.1").exists() or not log.exists():
            assert time.monotonic() < end
            time.sleep(0.02)
    kept = {path.name: path.stat().st_size for path in tmp_path.glob("dashboard.log*")}
    assert kept == {"dashboard.log": 0, "dashboard.log.1": 6 * (MAX_LOG_BYTES // 6 + 1)}
