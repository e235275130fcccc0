"""What an expert would try as a stranger: in the middle of a join, and at the device API."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.callers import PATIENCE_S, Caller, TlsPlace, bomb, tls_place
from tests.support.certificates import Authority
from tests.support.transport_doubles import Place, drawn_invitation, place
from tests.transport.test_joining import listening
from thinwire.core.errors import Refused
from thinwire.transport.device.enroll import join
from thinwire.transport.device.identity import Trust, device_key
from thinwire.transport.protocol.certificates import server_name
from thinwire.transport.protocol.http import JOIN
from thinwire.transport.server.auth import FAILED_JOINS

# In the middle, at join


@pytest.mark.parametrize("before", [False, True])
def test_a_pinned_certificate_brings_no_other_one_along(tmp_path: Path, before: bool) -> None:
    """One PEM text may hold several certificates: whoever stands in between adds his own CA to the device API's."""
    api, his = Authority(), Authority()
    secret = drawn_invitation(api.pin)
    both = his.pem + api.pem if before else api.pem + his.pem
    shows: dict[str, object] = {"cas": [both], "server_name": server_name(api.pin)}
    forged, refused = his.chain(tmp_path, name=server_name(api.pin)), "not the aggregator of this invitation"
    with listening(forged, shows) as (url, heard), pytest.raises(Refused, match=refused):
        join(url, secret, device_key(tmp_path), "pi-1", {})
    assert len(heard) == 1, "he was requested the CA, and for nothing else"


def test_a_file_of_trust_holds_each_certificate_once_and_nothing_beside_it(tmp_path: Path) -> None:
    api, his = Authority(), Authority()
    trust = Trust("https://agg.example", ("as an operator has it:\n" + api.pem + his.pem,), server_name(api.pin))
    assert [int(str(ca["serialNumber"]), 16) for ca in trust.context().get_ca_certs()] == [
        api.certificate.serial_number
    ]


# A stranger at the device API


@pytest.fixture
def here(tmp_path: Path) -> Iterator[TlsPlace]:
    with tls_place(tmp_path, grace_s=PATIENCE_S) as made:  # a caller between two connections has not left
        yield made


def test_a_strangers_join_is_not_blown_up_and_counts_as_failed(here: TlsPlace) -> None:
    stranger = Caller(here)
    got = [stranger.call("POST", JOIN, bomb(1_390_000)).short for _ in range(FAILED_JOINS + 1)]
    assert got == [(409, "protocol")] * FAILED_JOINS + [(429, "joins")]


def test_paths_that_strangers_make_up_are_not_remembered(here: TlsPlace) -> None:
    stranger = Caller(here)
    connection = stranger.connection()
    for nth in range(100):
        path = f"/tw/v1/assignments/{nth}/bundle" if nth % 2 else f"/tw/v1/parts/run-{nth}/1/0"
        assert stranger.call("GET" if nth % 2 else "HEAD", path, headers={}, on=connection).status == 401
    connection.close()
    assert len(here.fleet.stats()["refused"]) == 2


def test_a_query_that_is_not_readable_is_no_path_and_no_defect(
    here: TlsPlace, caplog: pytest.LogCaptureFixture
) -> None:
    path = "/tw/v1/parts/digits-1/1/0?" + "&".join("abcdef")
    assert Caller(here).call("PUT", path, b"x", headers={}).status == 404
    assert not caplog.records


@contextlib.contextmanager
def stranger_at(here: Place) -> Iterator[socket.socket]:
    """A connection that nobody signs on, and that holds little of what it does not read."""
    host, port = here.fleet.address.rsplit(":", 1)
    with socket.socket() as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.settimeout(PATIENCE_S)
        plain.connect((host, int(port)))
        if here.authority is None:
            yield plain
            return
        with Trust("", here.authority.cas()).context().wrap_socket(plain, server_hostname="localhost") as secured:
            yield secured


@pytest.mark.parametrize("tls", [False, True])
def test_refusals_that_a_stranger_does_not_read_are_not_kept_for_him(tmp_path: Path, tls: bool) -> None:
    """Many requests at once, each refused: what he does not read would lie here, and not there."""
    request = b"GET /tw/v1/assignments/a/bundle HTTP/1.1\r\n\r\n" * 2000
    with place(tmp_path, tls=tls) as here, stranger_at(here) as stranger, pytest.raises(OSError):
        for _ in range(8 * 2**20 // len(request)):  # 30 MB of answers
            stranger.sendall(request)


def test_what_follows_a_refused_body_is_not_read(here: TlsPlace) -> None:
    """Trailers of a chunked body are headers without a limit."""
    with stranger_at(here) as stranger:
        stranger.sendall(b"POST /tw/v1/join HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n")
        assert stranger.recv(65_536).startswith(b"HTTP/1.1 413 ")
        (http,) = here.fleet._listener.wires.state.connections
        for nth in range(16):
            stranger.sendall(b"x-%d: %s\r\n" % (nth, b"a" * 10_000))
        with contextlib.suppress(OSError, ssl.SSLError):
            assert stranger.recv(1) == b""
        assert len(getattr(http, "headers", ())) == 1
