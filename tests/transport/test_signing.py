"""What a signature covers, for how long, and how often it opens the device API."""

from __future__ import annotations

import base64
import hashlib
import itertools
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from thinwire.core.errors import DataLost
from thinwire.transport.device.identity import device_key
from thinwire.transport.protocol.http import ApiError
from thinwire.transport.protocol.signing import (
    DIGEST_HEADER,
    NONCE_HEADER,
    NOTHING,
    PUBLIC_KEY_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    SignatureHeaders,
    Signer,
    fingerprint,
    public_der,
    signed_bytes,
)
from thinwire.transport.server.auth import ReplayGuard

KEY = ec.generate_private_key(ec.SECP384R1())
PATH, HEAD = "/tw/v1/push", b'{"a": 1}'


def signed(
    path: str = PATH, header: bytes = HEAD, key: ec.EllipticCurvePrivateKey = KEY, *, whole_key: bool = True
) -> dict[bytes, bytes]:
    made = Signer(key).headers("POST", path, hashlib.sha256(header).digest(), len(header), whole_key=whole_key)
    return {name.encode(): value.encode() for name, value in made.items()}


def refusal(
    headers: Mapping[bytes, bytes], method: str = "POST", path: str = PATH, length: int = len(HEAD),
    now: float | None = None, opened_at: float = 0.0,
) -> str:  # fmt: skip
    """The kind of refusal, "" when the request is approved."""
    try:
        claim = SignatureHeaders.read(headers)
        ReplayGuard(opened_at).require_now(claim, time.time() if now is None else now)
        claim.require_signature(claim.der or public_der(KEY.public_key()), method, path, length)
    except ApiError as refused:
        assert refused.status == 401
        return refused.kind
    return ""


def test_a_signed_request_tells_its_signer() -> None:
    for whole_key in (True, False):
        claim = SignatureHeaders.read(signed(whole_key=whole_key))
        assert claim.fingerprint == fingerprint(public_der(KEY.public_key()))
        assert claim.der == (public_der(KEY.public_key()) if whole_key else None)
        assert refusal(signed(whole_key=whole_key)) == ""


@pytest.mark.parametrize("name", [PUBLIC_KEY_HEADER, TIMESTAMP_HEADER, NONCE_HEADER, SIGNATURE_HEADER])
def test_a_request_without_one_of_its_headers_is_refused(name: str) -> None:
    headers = signed()
    for value in (None, b"", b"%%%", b"AAAA", b"x" * 4096):
        changed = {k: v for k, v in headers.items() if k != name.encode()} | ({name.encode(): value} if value else {})
        assert refusal(changed) == "signature"


def test_method_target_digest_and_length_are_signed() -> None:
    headers = signed()
    assert refusal(headers) == ""
    assert refusal(headers, method="GET") == "signature"
    assert refusal(headers, path="/tw/v1/pull") == "signature"
    assert refusal(headers, path=PATH + "?offset=1") == "signature"
    assert refusal(headers, length=len(HEAD) + 1) == "signature"
    assert refusal(headers | {DIGEST_HEADER.encode(): base64.b64encode(NOTHING)}) == "signature"


@pytest.mark.parametrize("name", [TIMESTAMP_HEADER, NONCE_HEADER, PUBLIC_KEY_HEADER, SIGNATURE_HEADER])
def test_another_requests_header_does_not_fit(name: str) -> None:
    other = signed(header=b"another", key=ec.generate_private_key(ec.SECP384R1()))
    assert refusal(signed() | {name.encode(): other[name.encode()]}) == "signature"


@pytest.mark.parametrize(("age_s", "kind"), [(-0.05, ""), (-0.15, "clock"), (0.0, ""), (304.0, ""), (305.1, "clock")])
def test_a_timestamp_is_taken_a_little_ahead_and_within_flowers_window_behind(age_s: float, kind: str) -> None:
    headers = signed()
    assert refusal(headers, now=SignatureHeaders.read(headers).signed_at() + age_s) == kind


def test_what_was_signed_before_the_start_is_refused_so_a_restart_opens_no_replay() -> None:
    headers = signed()
    assert refusal(headers, opened_at=time.time() - 60) == ""
    assert refusal(headers, opened_at=time.time() + 0.001) == "clock"


def test_a_request_opens_the_device_api_once() -> None:
    window, claim, now = ReplayGuard(0.0), SignatureHeaders.read(signed()), time.time()
    window.spend(claim, now)
    with pytest.raises(ApiError, match="made before") as refused:
        window.spend(claim, now + 300)
    assert (refused.value.status, refused.value.kind) == (401, "replay")


def test_nonces_are_forgotten_when_their_time_is_over_and_bounded_until_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thinwire.transport.server.auth.MAX_OF_ONE", 3)
    window, now = ReplayGuard(0.0), time.time()
    claims = [SignatureHeaders.read(signed()) for _ in range(5)]
    for claim in claims[:3]:
        window.spend(claim, now)
    with pytest.raises(ApiError) as refused:
        window.spend(claims[3], now)
    assert (refused.value.status, refused.value.kind) == (503, "busy")
    window.spend(SignatureHeaders.read(signed(key=ec.generate_private_key(ec.SECP384R1()))), now)
    window.spend(claims[3], now + 311)
    assert len(window._spent) == 1


@pytest.mark.parametrize("curve", [ec.SECP521R1(), ec.SECP256K1()], ids=["p521", "p256k1"])
def test_a_key_on_another_curve_is_refused(curve: ec.EllipticCurve) -> None:
    assert refusal(signed(key=ec.generate_private_key(curve))) == "signature"


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1()], ids=["p256", "p384"])
def test_a_p256_and_a_p384_key_sign(curve: ec.EllipticCurve, tmp_path: Path) -> None:
    key = ec.generate_private_key(curve)
    assert not refusal(signed(key=key))
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (tmp_path / "key.pem").write_bytes(pem)
    assert device_key(tmp_path).private_numbers() == key.private_numbers()


def test_a_new_device_has_a_p256_key(tmp_path: Path) -> None:
    assert isinstance(device_key(tmp_path).curve, ec.SECP256R1)


def test_a_key_of_another_kind_is_refused() -> None:
    der = (
        ed25519.Ed25519PrivateKey.generate().public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    )
    assert refusal(signed() | {PUBLIC_KEY_HEADER.encode(): base64.b64encode(der)}) == "signature"


@given(st.dictionaries(st.sampled_from([PUBLIC_KEY_HEADER, TIMESTAMP_HEADER, NONCE_HEADER, SIGNATURE_HEADER]),
                       st.binary(max_size=200)))  # fmt: skip
def test_no_header_breaks_the_check(changed: dict[str, bytes]) -> None:
    assert refusal(signed() | {name.encode(): value for name, value in changed.items()}) in {"signature", "clock", ""}


def test_no_two_requests_sign_the_same_bytes() -> None:
    fields = ["a", "b", ""]
    every = {
        signed_bytes(m, p, h.encode(), len(n), t, n.encode()) for m, p, h, t, n in itertools.product(fields, repeat=5)
    }
    assert len(every) == 3**5


def test_a_device_makes_its_key_once_for_itself_alone(tmp_path: Path) -> None:
    made = device_key(tmp_path)
    assert public_der(device_key(tmp_path).public_key()) == public_der(made.public_key())
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o600]


def test_a_damaged_key_is_refused_and_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text("no key")
    with pytest.raises(DataLost):
        device_key(tmp_path)
    assert (tmp_path / "key.pem").read_text() == "no key"
