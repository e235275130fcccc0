"""Who is not approved at a TLS device API, and learns nothing by trying: on 127.0.0.0/8, over real sockets."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from tests.support.callers import PATIENCE_S, Caller, TlsPlace, assigned, joined, pending, revoked, tls_place
from tests.support.fleet_words import answer, envelope, polled
from thinwire.core.fleet import ClientConnected
from thinwire.core.serialization import reply_to_bytes
from thinwire.core.types import ReplyHeader
from thinwire.transport.protocol.http import HELLO, JOIN, LEAVE, PULL, PUSH, pack
from thinwire.transport.protocol.signing import (
    DIGEST_HEADER,
    KEY_HEADER,
    NONCE_HEADER,
    PUBLIC_KEY_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
)

DEVICES_ROUTES = (("POST", HELLO), ("POST", PULL), ("POST", PUSH), ("POST", LEAVE), ("GET",
    "/tw/v1/assignments/a/bundle"),
                  ("HEAD", "/tw/v1/parts/r/1/0"), ("PUT", "/tw/v1/parts/r/1/0?offset=0"))  # fmt: skip


@pytest.fixture
def here(tmp_path: Path) -> Iterator[TlsPlace]:
    with tls_place(tmp_path, grace_s=PATIENCE_S) as made:  # a caller between two connections has not left
        yield made


def everywhere(caller: Caller) -> list[tuple[int, str]]:
    """What a caller is told at each route of a device; a HEAD has no body that could say a kind."""
    return [caller.call(method, path, b"x" if method in ("POST", "PUT") else None).short
            for method, path in DEVICES_ROUTES]  # fmt: skip


def always(status: int, kind: str) -> list[tuple[int, str]]:
    return [(status, "" if method == "HEAD" else kind) for method, _ in DEVICES_ROUTES]


# Rows


def test_the_uninvited_is_nobody_at_every_route(here: TlsPlace) -> None:
    assert everywhere(Caller(here)) == always(401, "unknown")
    assert here.store.roster.rows() == []


def test_who_waits_for_approval_may_do_nothing_until_then(here: TlsPlace) -> None:
    caller = pending(here, "pi-1")
    assert everywhere(caller) == always(403, "pending")
    here.store.roster.approve("pi-1")
    assert caller.hello().status == 200


def test_who_was_revoked_may_do_nothing_and_no_invitation_helps(here: TlsPlace) -> None:
    caller = revoked(here, "pi-1")
    assert everywhere(caller) == always(403, "revoked")
    assert caller.join(here.invited()).short == (409, "name")
    assert everywhere(caller) == always(403, "revoked")
    here.store.roster.approve("pi-1")
    assert caller.hello().status == 200


def test_a_row_of_a_plain_device_api_waits_on_a_tls_one(here: TlsPlace) -> None:
    caller = Caller(here, "pi-1")
    here.store.roster.enrol("pi-1", caller.signer.fingerprint, bytes_of(caller), "loopback")
    assert everywhere(caller) == always(403, "pending")
    assert caller.join(here.invited()).status == 200
    assert caller.hello().status == 200


def bytes_of(caller: Caller) -> bytes:
    return base64.b64decode(caller.signed("POST", HELLO)[PUBLIC_KEY_HEADER])


@pytest.mark.parametrize("curve", [ec.SECP224R1(), ec.SECP521R1(), ec.SECP256K1()])
def test_a_key_of_another_kind_is_no_key(here: TlsPlace, curve: ec.EllipticCurve) -> None:
    caller = Caller(here, key=ec.generate_private_key(curve))
    assert caller.join(here.invited()).short == (401, "signature")
    assert [row.state for row in here.store.invitations.all()] == ["open"]


# Another's identity


def test_a_device_answers_for_nobody_else(here: TlsPlace) -> None:
    victim, liar = joined(here, "pi-1"), joined(here, "pi-2")
    for caller in (victim, liar):
        assert caller.hello().status == 200
        polled(here.fleet, ClientConnected)
    here.fleet.send([envelope("pi-1", "assignment-1")])
    assert liar.push(answer("pi-1", "assignment-1", 1, b"lie"), b"lie").short == (403, "device")
    assert liar.push(answer("pi-2", "assignment-1", 1, b"lie"), b"lie").status == 200, (
        "its own answer, to an assignment of nobody's"
    )
    assert polled(here.fleet, ReplyHeader).update_id.device == "pi-2"
    assert assigned(victim.pull())["assignment_id"] == "assignment-1", "it is still selected"


def test_a_device_cannot_read_or_write_what_another_was_given(here: TlsPlace, tmp_path: Path) -> None:
    victim, liar = joined(here, "pi-1"), joined(here, "pi-2")
    for caller in (victim, liar):
        assert caller.hello().status == 200
        polled(here.fleet, ClientConnected)
    model = bytes(400_000)
    here.fleet.send([envelope("pi-1", "assignment-1", tmp_path, model)])
    header = pack(reply_to_bytes(answer("pi-1", "assignment-1", 7, model)))
    assert victim.call("POST", PUSH, header).status == 200
    bundle, part = "/tw/v1/assignments/assignment-1/bundle", "/tw/v1/parts/digits-1/7/0"
    assert victim.call("GET", bundle).status == 200
    assert victim.call("HEAD", part).status == 200
    assert liar.call("GET", bundle).short == (404, "assignment")
    assert liar.call("HEAD", part).status == 404
    assert liar.call("PUT", part + "?offset=0", b"lie").short == (404, "offer")


@pytest.mark.parametrize("whole_key", [False, True])
def test_another_ones_key_in_the_header_is_a_wrong_signature(here: TlsPlace, whole_key: bool) -> None:
    victim, liar = joined(here, "pi-1"), joined(here, "pi-2")
    assert victim.hello().status == 200
    body = victim.wanted()
    mine, its = (caller.signed("POST", PULL, body, whole_key=whole_key) for caller in (liar, victim))
    name = PUBLIC_KEY_HEADER if whole_key else KEY_HEADER
    assert liar.call("POST", PULL, body, {**mine, name: its[name]}).short == (401, "signature")
    assert liar.call("POST", PULL, body, {**its, SIGNATURE_HEADER: mine[SIGNATURE_HEADER]}).short == (401, "signature")


def test_a_hello_in_anothers_name_is_heard_in_ones_own(here: TlsPlace) -> None:
    joined(here, "pi-1")
    liar = joined(here, "pi-2")
    liar.name = "pi-1"
    assert liar.hello().status == 200
    assert polled(here.fleet, ClientConnected).device == "pi-2"


def test_a_key_that_is_signed_for_by_nobody_cannot_be_joined(here: TlsPlace) -> None:
    """Else whoever holds an invitation could bind a name to a key that is another's."""
    mine, its = Caller(here, "pi-1"), Caller(here, "pi-2")
    body = pack(json.dumps({"secret": here.invited(), "name": "pi-1", "versions": {}}).encode())
    given = {**mine.signed("POST", JOIN, body), PUBLIC_KEY_HEADER: its.signed("POST", JOIN, body)[PUBLIC_KEY_HEADER]}
    assert mine.call("POST", JOIN, body, given).short == (401, "signature")


# Requests that were seen, or touched, on the way


def test_a_request_that_is_made_again_is_refused(here: TlsPlace) -> None:
    caller = joined(here)
    assert caller.hello().status == 200
    body = caller.wanted()
    signed = caller.signed("POST", PULL, body)
    assert caller.call("POST", PULL, body, signed).status == 200
    assert caller.call("POST", PULL, body, signed).short == (401, "replay")
    here.restart()
    assert caller.call("POST", PULL, body, signed).short == (401, "clock")


def test_a_join_that_is_made_again_is_answered_as_the_first_time(here: TlsPlace) -> None:
    caller, secret = Caller(here), here.invited()
    assert caller.join(secret).looks == caller.join(secret).looks
    assert caller.join(secret).status == 200


def altered(headers: dict[str, str], name: str) -> dict[str, str]:
    raw = headers[name]
    if name == TIMESTAMP_HEADER:
        return {**headers, name: raw.replace("T", " ")}
    data = bytearray(base64.urlsafe_b64decode(raw + "=" * (-len(raw) % 4)))
    data[-1] ^= 1
    encode = base64.urlsafe_b64encode if name == KEY_HEADER else base64.b64encode
    return {**headers, name: encode(bytes(data)).decode().rstrip("=" if name == KEY_HEADER else "\0")}


@pytest.mark.parametrize("name", [TIMESTAMP_HEADER, NONCE_HEADER, DIGEST_HEADER, SIGNATURE_HEADER, KEY_HEADER])
def test_a_header_that_was_altered_is_refused(here: TlsPlace, name: str) -> None:
    caller = joined(here)
    caller.hello()
    body = caller.wanted()
    signed = caller.signed("POST", PULL, body)
    kind = "unknown" if name == KEY_HEADER else "signature"
    assert caller.call("POST", PULL, body, altered(signed, name)).short == (401, kind)
    assert caller.call("POST", PULL, body, {**signed, name: ""}).short == (401, "signature")
    assert caller.call("POST", PULL, body, signed).status == 200, "what was refused has spent no nonce"


def test_a_path_a_method_a_body_or_a_length_that_was_altered_is_refused(here: TlsPlace) -> None:
    caller = joined(here)
    caller.hello()
    body = caller.wanted()
    signed = caller.signed("POST", PULL, body)
    assert caller.call("POST", PUSH, body, signed).short == (401, "signature")
    assert caller.call("POST", LEAVE, body, signed).short == (401, "signature")
    assert caller.call("POST", PULL, body + b"x", signed).short == (401, "signature")
    assert caller.call("POST", PULL, body[:-1], signed).short == (401, "signature")
    assert caller.call("POST", PULL, body[:-1] + b"x", signed).short == (401, "signature")
    part = caller.signed("HEAD", "/tw/v1/parts/r/1/0")
    assert caller.call("PUT", "/tw/v1/parts/r/1/0", b"", part).short == (401, "signature")
    assert caller.call("HEAD", "/tw/v1/parts/r/1/1", None, part).short == (401, "")
    put = caller.signed("PUT", "/tw/v1/parts/r/1/0?offset=0")
    assert caller.call("PUT", "/tw/v1/parts/r/1/0?offset=1", b"", put).short == (401, "signature")


def test_a_header_that_is_said_twice_is_not_said(here: TlsPlace) -> None:
    caller = joined(here)
    caller.hello()
    body = caller.wanted()
    signed = caller.signed("POST", PULL, body)
    connection = caller.connection()
    connection.putrequest("POST", PULL)
    for name, value in [*signed.items(), (NONCE_HEADER, signed[NONCE_HEADER]), ("content-length", str(len(body)))]:
        connection.putheader(name, value)
    connection.endheaders(body)
    assert connection.getresponse().status == 401
    connection.close()


# Time


@pytest.mark.parametrize("off_s", [-time.time(), 24 * 3600.0, -400.0, 60.0], ids=["1970", "tomorrow", "late", "early"])
def test_a_wrong_clock_is_told_the_time_and_then_approved(here: TlsPlace, off_s: float) -> None:
    offset = off_s
    caller = Caller(here, now=lambda: max(0.0, time.time() + offset))
    secret = here.invited()
    refused = caller.join(secret)
    assert refused.short == (401, "clock")
    assert refused.told["now"] == pytest.approx(time.time(), abs=PATIENCE_S)
    offset = refused.told["now"] - time.time()
    assert caller.join(secret).status == 200
    assert caller.hello().status == 200
