"""Requests with a wrong signature cost few verifications, and keep no known device from its work."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.callers import PATIENCE_S, Caller, TlsPlace, address_of
from tests.support.transport_doubles import Place
from tests.support.watched import heard
from tests.system.attacks.places import attacked, device_of
from thinwire.transport.protocol.http import HELLO, JOIN, PULL, pack
from thinwire.transport.protocol.signing import SIGNATURE_HEADER, SignatureHeaders
from thinwire.transport.server.auth import FAILED_JOINS
from thinwire.transport.server.connections import MAX_REFUSED_OF_CONNECTION

MANY = 16
BODY = pack(json.dumps({"secret": "0" * 32, "name": "pi-9", "versions": {}}).encode())


@pytest.fixture(params=["plain", "tls"])
def here(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with attacked(tmp_path, tls=request.param == "tls", grace_s=60.0) as made:
        yield made


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The targets for which a signature was verified."""
    made, verify = list[str](), SignatureHeaders.require_signature

    def counted(claim: SignatureHeaders, der: bytes, method: str, target: str, length: int) -> None:
        made.append(target)
        verify(claim, der, method, target, length)

    monkeypatch.setattr(SignatureHeaders, "require_signature", counted)
    return made


def path_of(here: Place) -> str:
    """Where a stranger may call: a plain device API has no join."""
    return JOIN if isinstance(here, TlsPlace) else HELLO


def forged(caller: Caller, path: str, body: bytes = BODY) -> dict[str, str]:
    """Headers whose signature is another request's, of the right length and form."""
    other = caller.signed("POST", path, b"another body")[SIGNATURE_HEADER]
    return {**caller.signed("POST", path, body), SIGNATURE_HEADER: other}


def raw(path: str, headers: dict[str, str], body: bytes = BODY) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{lines}content-length: {len(body)}\r\n\r\n".encode() + body


def line_to(here: Place) -> socket.socket:
    line = socket.create_connection(address_of(here), timeout=PATIENCE_S)
    if isinstance(here, TlsPlace):
        assert here.authority is not None
        return here.context().wrap_socket(line, server_hostname=here.authority.server_name())
    return line


def test_so_many_wrong_signatures_of_an_address_are_verified_and_no_more(here: Place, verified: list[str]) -> None:
    caller, path = Caller(here), path_of(here)
    said = [caller.call("POST", path, BODY, forged(caller, path)).status for _ in range(MANY)]
    assert said == [401] * FAILED_JOINS + [429] * (MANY - FAILED_JOINS)
    assert len(verified) == FAILED_JOINS


def test_keys_that_nobody_knows_are_verified_so_often_too(tmp_path: Path, verified: list[str]) -> None:
    """Each signs a right hello with a key of its own."""
    with attacked(tmp_path, tls=True) as here:
        said = [Caller(here, f"pi-{nth}").hello().status for nth in range(MANY)]
        assert said == [401] * FAILED_JOINS + [429] * (MANY - FAILED_JOINS)
        assert len(verified) == FAILED_JOINS


def test_a_request_that_is_made_again_and_again_is_verified_so_often(here: Place, verified: list[str]) -> None:
    caller = device_of(here)
    body = caller.wanted()
    recorded = caller.signed("POST", PULL, body)
    again = Caller(here, source="127.66.0.1")
    said = [again.call("POST", PULL, body, recorded).status for _ in range(MANY)]
    assert said == [200] + [401] * FAILED_JOINS + [429] * (MANY - FAILED_JOINS - 1)
    assert verified.count(PULL) == 1 + FAILED_JOINS


def test_a_connection_ends_after_a_few_refused_signatures(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.transport.server.http_protocol.LINGER_S", 0.05)
    caller, path = Caller(here), path_of(here)
    line = line_to(here)
    for nth in range(MAX_REFUSED_OF_CONNECTION):
        line.sendall(raw(path, forged(caller, path)))
        said = line.recv(65_536)
        assert said.startswith(b"HTTP/1.1 401")
        assert (b"connection: close" in said) == (nth == MAX_REFUSED_OF_CONNECTION - 1)
    assert heard(line) == b""


def test_of_requests_that_do_not_wait_for_the_refusal_the_first_alone_is_verified(
    here: Place, verified: list[str]
) -> None:
    caller, path = Caller(here), path_of(here)
    line = line_to(here)
    line.sendall(b"".join(raw(path, forged(caller, path), b"") for _ in range(16)))
    assert heard(line).count(b"HTTP/1.1 401") == 1
    assert len(verified) == 1


def test_a_bad_neighbour_keeps_no_known_device_from_its_work(here: Place) -> None:
    """All call from one address, as behind one NAT."""
    device, other, path = device_of(here, "pi-1"), Caller(here), path_of(here)
    for _ in range(MANY):
        other.call("POST", path, BODY, forged(other, path))
    assert device.hello().status == 200
    assert device.pull().status == 200


def test_who_forges_a_devices_signature_keeps_it_from_new_connections_and_not_from_its_work(here: Place) -> None:
    """The forger shares its address and knows its key's fingerprint; devices with other keys notice nothing."""
    device, other = device_of(here, "pi-1"), device_of(here, "pi-2")
    body, open_before = device.wanted(), device.connection()
    assert device.call("POST", PULL, body, on=open_before).status == 200
    for _ in range(MANY):
        device.call("POST", PULL, body, forged(device, PULL, body))
    assert device.call("POST", PULL, body, on=open_before).status == 200
    refused = device.call("POST", PULL, body)
    assert refused.short == (429, "signatures")
    assert 0 < int(refused.headers["retry-after"]) <= 60
    assert other.pull().status == 200
    open_before.close()


def test_a_body_that_was_not_signed_counts_as_a_refused_join(tmp_path: Path) -> None:
    with attacked(tmp_path, tls=True) as here:
        caller = Caller(here)
        for _ in range(FAILED_JOINS):
            headers = caller.signer.headers("POST", JOIN, hashlib.sha256(b"x").digest(), len(BODY), whole_key=True)
            assert caller.call("POST", JOIN, BODY, headers).status == 401
        assert caller.join("0" * 32).short == (429, "joins")
