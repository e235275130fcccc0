"""Whom a device believes, and by which clock it looks at a certificate's dates."""

from __future__ import annotations

import datetime as dt
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.certificates import NOW, Authority
from thinwire.core.errors import DataLost, Unreachable
from thinwire.transport.device.identity import ServerClock, Trust
from thinwire.transport.protocol.certificates import server_name
from thinwire.transport.server.tls import InternalCA

URL = "https://agg.example:9090"


def held(*authorities: Authority) -> Trust:
    return Trust(URL, tuple(a.pem for a in authorities), server_name(authorities[0].pin), name="pi-1")


@contextmanager
def shaking_hands(server: ssl.SSLContext) -> Iterator[socket.socket]:
    """The client's socket to a server that makes one handshake."""
    mine, its = socket.socketpair()

    def serve() -> None:
        try:
            with server.wrap_socket(its, server_side=True) as tls:
                tls.recv(1)
        except OSError:
            its.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        mine.settimeout(10)
        yield mine
    finally:
        mine.close()
        thread.join()


def verified(trust: Trust, server: ssl.SSLContext) -> str:
    """The kind of refusal, "" when the server is believed."""
    with shaking_hands(server) as mine:
        try:
            with trust.context().wrap_socket(mine, server_hostname=trust.names("agg.example")[0]):
                return ""
        except ssl.SSLCertVerificationError as error:
            return error.verify_message


def test_the_pinned_ca_is_believed_under_its_derived_name(tmp_path: Path) -> None:
    ca = Authority()
    assert verified(held(ca), ca.chain(tmp_path)) == ""


def test_a_leaf_outside_its_dates_passes_the_handshake_since_the_device_may_have_no_clock(tmp_path: Path) -> None:
    ca = Authority()
    assert verified(held(ca), ca.chain(tmp_path, begins=NOW - dt.timedelta(days=400))) == ""
    assert verified(held(ca), ca.chain(tmp_path, begins=NOW + dt.timedelta(days=400))) == ""


def test_another_ca_is_not_believed_whatever_name_its_leaf_has(tmp_path: Path) -> None:
    mine, other = Authority(), Authority()
    assert verified(held(mine), other.chain(tmp_path, name=server_name(mine.pin))) != ""


def test_a_ca_of_the_same_name_and_another_key_is_not_believed(tmp_path: Path) -> None:
    mine = Authority()
    other = Authority(name=mine.name)
    assert verified(held(mine), other.chain(tmp_path, name=server_name(mine.pin))) != ""


def test_a_leaf_for_another_name_is_not_believed(tmp_path: Path) -> None:
    ca = Authority()
    assert "Hostname mismatch" in verified(held(ca), ca.chain(tmp_path, name="agg.other"))


def test_with_the_systems_store_a_private_ca_is_not_believed(tmp_path: Path) -> None:
    assert verified(Trust(URL, system=True), Authority().chain(tmp_path, name="agg.example")) != ""


def test_ones_own_certificate_is_checked_under_the_urls_host(tmp_path: Path) -> None:
    ca = Authority()
    assert verified(Trust(URL, (ca.pem,)), ca.chain(tmp_path, name="agg.example")) == ""


def test_two_cas_are_held_while_they_are_rotated(tmp_path: Path) -> None:
    old, new = Authority(), Authority()
    both = held(old).renewed((old.pem, new.pem))
    assert both.pins == (old.pin, new.pin)
    assert both.names("x") == (server_name(old.pin), server_name(new.pin))
    assert verified(both, old.chain(tmp_path)) == ""
    assert verified(both.renewed((new.pem,)), new.chain(tmp_path)) == ""
    assert verified(both.renewed((new.pem,)), old.chain(tmp_path)) != ""


@pytest.mark.parametrize("cas", [(), ("no certificate",), ("x" * 20_000,), ("x",) * 9])
def test_what_is_no_certificate_replaces_none(cas: tuple[str, ...]) -> None:
    trust = held(Authority())
    assert trust.renewed(cas) == trust


def test_trust_is_kept_in_a_file_for_this_user_alone(tmp_path: Path) -> None:
    trust = held(Authority(), Authority())
    assert Trust.load(tmp_path) is None
    trust.save(tmp_path)
    assert Trust.load(tmp_path) == trust
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o600]


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"url":"u","cas":["x"],"server_name":"","system":0,"name":""}'])
def test_a_damaged_file_is_refused_and_not_replaced(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "aggregator.json").write_bytes(data)
    with pytest.raises(DataLost, match="aggregator.json"):
        Trust.load(tmp_path)
    assert (tmp_path / "aggregator.json").read_bytes() == data


def test_a_pin_names_the_key_and_not_the_certificate() -> None:
    ca = Authority()
    again = Authority(key=ca.key)
    assert ca.pem != again.pem
    assert ca.pin == again.pin
    assert len(ca.pin) == 64


def test_the_learned_time_goes_on_when_this_machines_clock_is_stepped() -> None:
    wall, boot = [0.0], [30.0]
    clock = ServerClock(lambda: wall[0], lambda: boot[0])
    assert clock.now().year == 1970
    assert clock.skew_s == 0.0
    clock.learn(1_800_000_000.0)
    wall[0] += 86_400 * 365 * 60
    boot[0] += 10.0
    assert clock.wall() == 1_800_000_010.0
    assert clock.skew_s == 1_800_000_010.0 - wall[0]


def test_a_certificates_dates_are_looked_at_once_the_time_is_known() -> None:
    clock = ServerClock(lambda: 0.0, lambda: 30.0)
    clock.require_valid(1000.0, 2000.0, URL)
    clock.learn(1500.0)
    clock.require_valid(1000.0, 2000.0, URL)
    with pytest.raises(Unreachable, match="it ended on 1970-01-01 00:20 UTC"):
        clock.require_valid(1000.0, 1200.0, URL)
    assert clock.doubted
    assert not clock.known, "the learned time may be the wrong one: the next hello requests it again"
    clock.learn(1500.0)
    with pytest.raises(Unreachable, match="it begins on"):
        clock.require_valid(1600.0, 2000.0, URL)


def test_an_address_that_is_written_another_way_does_not_make_a_new_certificate_each_time(tmp_path: Path) -> None:
    authority = InternalCA(tmp_path, ["2001:DB8::0001", "agg.example"])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert not authority.renew()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
