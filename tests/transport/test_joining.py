"""A device joins by an invitation, and its secret goes to nobody but who holds the pinned CA."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.certificates import Authority
from tests.support.proxy import proxy
from tests.support.transport_doubles import Place, drawn_invitation, place
from thinwire.core.errors import Refused, Unreachable, UsageError
from thinwire.core.invitation import Invitation
from thinwire.transport.device.enroll import EnrollmentResult, join
from thinwire.transport.device.identity import ServerClock, Trust, device_key
from thinwire.transport.device.link import HttpsLink
from thinwire.transport.protocol.certificates import server_name


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    with place(tmp_path, tls=True) as made:
        yield made


def joined(here: Place, name: str, invitation: Invitation | None = None, url: str = "") -> EnrollmentResult:
    folder = here.folder / "clients" / name
    folder.mkdir(parents=True, exist_ok=True)
    return join(url or here.url, invitation or here.invite(), device_key(folder), name, {"thinwire": "test"})


def test_a_device_joins_and_says_hello(here: Place) -> None:
    got = joined(here, "pi-1")
    assert (got.name, got.state) == ("pi-1", "approved")
    assert got.fingerprint == here.roster.devices["pi-1"].fingerprint
    assert here.authority is not None
    assert got.trust.pins == (here.authority.pin,)
    assert got.trust.server_name == server_name(here.authority.pin)


def test_a_lost_reply_burns_nothing_and_the_invitation_is_not_for_two(here: Place) -> None:
    invitation = here.invite()
    assert joined(here, "pi-1", invitation) == joined(here, "pi-1", invitation)
    with pytest.raises(Refused) as refused:
        joined(here, "pi-2", invitation)
    assert refused.value.exit_code == 5


def test_a_reply_that_is_lost_on_the_way_is_requested_again(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.transport.device.enroll.RETRY_S", 0.0)
    assert here.authority is not None
    with proxy(here.fleet.address) as clear:
        joined(here, "pi-0", url=f"https://{clear.address}")
        received_bytes, sent_bytes = clear.down.given, clear.up.given
    invitation = here.invite()
    with proxy(here.fleet.address, cuts_down=[received_bytes - 20]) as bad:
        assert joined(here, "pi-1", invitation, f"https://{bad.address}").name == "pi-1"
        assert bad.cut_count == 1
        assert bad.up.given > sent_bytes
    assert here.roster.invitations[invitation.secret] == here.roster.devices["pi-1"].fingerprint


@pytest.mark.parametrize("which", ["unknown", "used"])
def test_from_outside_all_useless_invitations_look_alike(here: Place, which: str) -> None:
    invitation = here.invite()
    if which == "used":
        joined(here, "pi-0", invitation)
    else:
        invitation = drawn_invitation(invitation.pin)
    with pytest.raises(Refused, match="no invitation that can be used"):
        joined(here, "pi-1", invitation)


def test_a_taken_name_is_refused_in_words(here: Place) -> None:
    joined(here, "pi-1")
    other = here.folder / "other"
    other.mkdir()
    with pytest.raises(Refused, match="name") as refused:
        join(here.url, here.invite(), device_key(other), "pi-1", {})
    assert "--name" in refused.value.hint


def test_too_many_failed_joins_are_to_be_tried_later(here: Place) -> None:
    bad = drawn_invitation(here.invite().pin)
    for _ in range(10):
        with pytest.raises(Refused):
            joined(here, "pi-1", bad)
    with pytest.raises(Unreachable) as refused:
        joined(here, "pi-1")
    assert 0 < refused.value.after_s <= 60


def test_a_machine_without_a_clock_can_join(here: Place) -> None:
    folder = here.folder / "pi-1"
    folder.mkdir()
    clock = ServerClock(lambda: 20.0, lambda: 20.0)
    assert join(here.url, here.invite(), device_key(folder), "pi-1", {}, clock).state == "approved"
    assert clock.skew_s > 1e9


def test_nobody_there_is_unreachable_and_a_plain_device_api_needs_no_invitation(here: Place) -> None:
    with pytest.raises(UsageError):
        joined(here, "pi-1", url=f"http://{here.fleet.address}")
    address = here.fleet.address
    here.fleet.close()
    with pytest.raises(Unreachable):
        joined(here, "pi-1", url=f"https://{address}")


@contextmanager
def listening(context: ssl.SSLContext, said: dict[str, object]) -> Iterator[tuple[str, list[bytes]]]:
    """Somebody else's TLS server that answers the first request of each connection with `said`; what it read."""
    server, heard = socket.create_server(("127.0.0.1", 0)), list[bytes]()
    body = json.dumps(said).encode()

    def serve() -> None:
        while True:
            try:
                accepted, _ = server.accept()
            except OSError:
                return
            try:
                accepted.settimeout(10)
                with context.wrap_socket(accepted, server_side=True) as tls:
                    while data := tls.recv(65_536):
                        heard.append(data)
                        tls.sendall(b"HTTP/1.1 200 -\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            except OSError:
                accepted.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"https://127.0.0.1:{server.getsockname()[1]}", heard
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


def test_another_aggregator_gets_nothing(here: Place, tmp_path: Path) -> None:
    other, invitation = Authority(), here.invite()
    said: dict[str, object] = {"cas": [other.pem], "server_name": server_name(other.pin)}
    with listening(other.chain(tmp_path), said) as (url, heard), pytest.raises(Refused, match="not the aggregator"):
        joined(here, "pi-1", invitation, url)
    assert invitation.secret.encode() not in b"".join(heard)


def test_a_man_in_the_middle_who_shows_the_right_ca_gets_no_secret(here: Place, tmp_path: Path) -> None:
    """He passes on what is public, and cannot complete the verified handshake."""
    assert here.authority is not None
    invitation = here.invite()
    said: dict[str, object] = {"cas": list(here.authority.cas()), "server_name": here.authority.server_name()}
    own = Authority().chain(tmp_path, name=server_name(invitation.pin))
    with listening(own, said) as (url, heard), pytest.raises(Refused, match="cannot prove"):
        joined(here, "pi-1", invitation, url)
    assert b"GET /tw/v1/ca" in b"".join(heard)
    assert invitation.secret.encode() not in b"".join(heard)


@pytest.mark.parametrize("said", [{}, {"cas": []}, {"cas": ["x"], "server_name": ""}, {"cas": 7, "server_name": ""}])
def test_what_is_no_aggregator_is_refused(here: Place, tmp_path: Path, said: dict[str, object]) -> None:
    with listening(Authority().chain(tmp_path), said) as (url, _), pytest.raises(Refused, match="not the aggregator"):
        joined(here, "pi-1", url=url)


def test_a_proxy_that_is_configured_carries_join_and_link(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is the proxy's to resolve: this machine knows no agg.example."""
    with proxy(here.fleet.address, tunnel=True) as tunnel:
        monkeypatch.setenv("HTTPS_PROXY", f"http://me:pass%20word@{tunnel.address}")
        url = "https://agg.example:9090"
        got = joined(here, "pi-1", url=url)
        folder = here.folder / "clients" / "pi-1"
        link = HttpsLink(url, device_key(folder), "pi-1", folder, got.trust)
        here.links.append(link)
        from tests.support.fleet_words import hello

        assert link.hello(hello("pi-1")).name == "pi-1"
        assert all(request.startswith("CONNECT agg.example:9090 HTTP/1.1\r\n") for request in tunnel.selected)
        assert "Proxy-Authorization: Basic bWU6cGFzcyB3b3Jk\r\n" in tunnel.selected[0]
        monkeypatch.setenv("NO_PROXY", "agg.example")
        count = tunnel.connections
        with pytest.raises(Unreachable):
            joined(here, "pi-2", url=url)
        assert tunnel.connections == count


def test_with_the_systems_store_nothing_is_requested_unverified(here: Place, tmp_path: Path) -> None:
    ca = Authority()
    with listening(ca.chain(tmp_path), {}) as (url, heard), pytest.raises(Refused, match="cannot prove"):
        joined(here, "pi-1", Invitation("system", "0" * 32), url)
    assert heard == []


def test_a_device_that_has_not_joined_is_told_to(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        HttpsLink("https://agg.example", device_key(tmp_path), "pi-1", tmp_path)
    assert "client join" in refused.value.hint
    with pytest.raises(UsageError):
        HttpsLink("http://127.0.0.1:1", device_key(tmp_path), "pi-1", tmp_path, Trust("https://agg.example"))
