"""TLS at the device API: who is not spoken to at all, whom a device does not speak to, and names that are requested."""

from __future__ import annotations

import http.client
import socket
import ssl
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.callers import PATIENCE_S, TlsPlace, joined, tls_place
from tests.support.certificates import Authority
from tests.support.fleet_words import hello, polled
from tests.transport.test_joining import listening
from thinwire.core.errors import Refused, Unreachable
from thinwire.core.fleet import ClientConnected
from thinwire.transport.device.enroll import join
from thinwire.transport.device.identity import Trust, device_key
from thinwire.transport.device.link import HttpsLink
from thinwire.transport.protocol.http import CA
from thinwire.transport.server.tls import InternalCA


@pytest.fixture
def here(tmp_path: Path) -> Iterator[TlsPlace]:
    with tls_place(tmp_path) as made:
        yield made


@pytest.fixture
def authority(here: TlsPlace) -> InternalCA:
    assert here.authority is not None
    return here.authority


def shaken(here: TlsPlace, context: ssl.SSLContext, name: str | None) -> ssl.SSLSocket:
    plain = socket.create_connection(here.address, timeout=PATIENCE_S)
    try:
        return context.wrap_socket(plain, server_hostname=name)
    except BaseException:
        plain.close()
        raise


def unverifying() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def test_a_device_that_holds_another_ca_does_not_speak_to_this_device_api(
    here: TlsPlace, authority: InternalCA, tmp_path: Path
) -> None:
    other = Authority()
    for name in (authority.server_name(), "127.0.0.1", "localhost"):
        with pytest.raises(ssl.SSLCertVerificationError):
            shaken(here, Trust("", (other.pem,)).context(), name)
    link = HttpsLink(here.url, device_key(tmp_path), "pi-1", tmp_path, Trust(here.url, (other.pem,), "x.invalid"))
    with pytest.raises(Unreachable, match="does not trust"):
        link.hello(hello("pi-1"))
    link.close()
    assert here.fleet.stats()["requests"]["hello"] == 0


def test_a_man_in_the_middle_with_every_right_name_hears_no_secret_and_no_signature(
    here: TlsPlace, authority: InternalCA, tmp_path: Path
) -> None:
    """His CA is his own; when he is requested the CA, he shows the device API's."""
    his, invitation = Authority(), here.invite()
    forged = his.chain(tmp_path, name=authority.server_name())
    shows: dict[str, object] = {"cas": list(authority.cas()), "server_name": authority.server_name()}
    with listening(forged, shows) as (url, heard):
        with pytest.raises(Refused, match="is not the aggregator of this invitation") as refused:
            join(url, invitation, device_key(tmp_path), "pi-1", {})
        trust = Trust(url, authority.cas(), authority.server_name())
        link = HttpsLink(url, device_key(tmp_path), "pi-1", tmp_path, trust)
        with pytest.raises(Unreachable, match="does not trust"):
            link.hello(hello("pi-1"))
        link.close()
    assert refused.value.exit_code == 5
    requests = b"".join(heard)
    assert requests.count(b"HTTP/1.1") == requests.count(b"GET /tw/v1/ca HTTP/1.1") == 1
    assert b"signature" not in requests
    assert [row.state for row in here.store.invitations.all()] == ["open"]


def test_a_man_in_the_middle_who_shows_his_own_ca_is_known_by_its_pin(here: TlsPlace, tmp_path: Path) -> None:
    his, refused = Authority(), pytest.raises(Refused, match="is not the aggregator of this invitation")
    with listening(his.chain(tmp_path), {"cas": [his.pem], "server_name": "x.invalid"}) as (url, heard), refused:
        join(url, here.invite(), device_key(tmp_path), "pi-1", {})
    assert b"".join(heard).count(b"HTTP/1.1") == 1


def test_plain_http_spoken_to_the_tls_port_gets_no_http(here: TlsPlace) -> None:
    connection = http.client.HTTPConnection(*here.address, timeout=PATIENCE_S)
    connection.request("GET", CA)
    with pytest.raises((http.client.BadStatusLine, ConnectionError)):
        connection.getresponse()
    connection.close()
    assert here.fleet.stats()["requests"].get("ca", 0) == 0


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1])
def test_old_versions_of_tls_are_not_spoken(here: TlsPlace, version: ssl.TLSVersion) -> None:
    context = unverifying()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = context.maximum_version = version
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        shaken(here, context, None)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_newer_ones_are(here: TlsPlace, authority: InternalCA, version: ssl.TLSVersion) -> None:
    context = Trust("", authority.cas()).context()
    context.minimum_version = context.maximum_version = version
    with shaken(here, context, authority.server_name()) as line:
        assert line.version() == {ssl.TLSVersion.TLSv1_2: "TLSv1.2", ssl.TLSVersion.TLSv1_3: "TLSv1.3"}[version]


@pytest.mark.parametrize("name", [None, "bank.example", "tw-00000000000000000000000000000000.invalid", "x" * 63])
def test_a_name_that_is_nobodys_is_shown_the_device_apis_own_certificate(
    here: TlsPlace, authority: InternalCA, name: str | None
) -> None:
    """So that a device sees whom it reached; one that verifies goes no further."""
    line = shaken(here, unverifying(), name)
    shown = ssl.DER_cert_to_PEM_cert(line.getpeercert(binary_form=True) or b"")
    line.close()
    assert shown.strip() == (authority.folder / f"{authority.pin[:16]}.pem").read_text().strip()
    if name is not None:
        with pytest.raises(ssl.SSLCertVerificationError):
            shaken(here, Trust("", authority.cas()).context(), name)


@pytest.mark.parametrize("said", [b"", b"\x16", b"\x16\x03\x01\xff\xff", b"\x15\x03\x01\x00\x02\x02\x28", b"\0" * 5000])
def test_half_a_handshake_or_none_harms_nobody(here: TlsPlace, said: bytes) -> None:
    with socket.create_connection(here.address, timeout=PATIENCE_S) as raw:
        raw.settimeout(PATIENCE_S)
        try:
            raw.sendall(said)
            raw.shutdown(socket.SHUT_WR)
            while raw.recv(65_536):
                pass
        except TimeoutError:
            raise
        except OSError:  # the device API may be done with it before anything more is said
            pass
    assert joined(here).hello().status == 200
    assert polled(here.fleet, ClientConnected).device == "pi-1"
