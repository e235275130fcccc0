"""Signed requests: Flower's headers and algorithm, over the request itself and not only over its time.

A signature covers a label, method, path, the SHA-256 of the body's head block, a timestamp and a nonce. The parts
that follow a head are bound by their own SHA-256 in it. An identity is the SHA-256 of the DER key.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key

from thinwire.flower.refusals import Refusal

PUBLIC_KEY_HEADER = "flwr-public-key"  # the three are Flower's (tests/flower/test_flwr_contract.py)
TIMESTAMP_HEADER = "flwr-timestamp"
SIGNATURE_HEADER = "flwr-signature"
NONCE_HEADER = "thinwire-nonce"
LABEL = b"thinwire lane v1"
NONCE_BYTES = 16
EARLIEST_S, LATEST_S = -5.0, 305.0  # age of a timestamp that is taken: Flower's tolerance and its allowance for drift
MAX_NONCES = 1 << 20  # of all devices within the window: some 3 400 requests a second

_ECDSA = ec.ECDSA(hashes.SHA256())


@dataclass(frozen=True)
class Identity:
    """Who signed: the key as we wrote it ourselves (one key has one spelling), and its fingerprint."""

    fingerprint: str
    der: bytes


def public_der(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def fingerprint(der: bytes) -> str:
    return hashlib.sha256(der).hexdigest()


def signed_bytes(method: str, path: str, head: bytes, timestamp: str, nonce: str) -> bytes:
    """What is signed. No field can hold a line feed, so no two requests have the same bytes."""
    digest = hashlib.sha256(head).hexdigest()
    return b"\n".join((LABEL, method.encode(), path.encode(), digest.encode(), timestamp.encode(), nonce.encode()))


class Signer:
    """A device's end: the headers of one request. Each call draws a new nonce, so a retry is signed anew."""

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        self._key = key
        self._public = base64.b64encode(public_der(key.public_key())).decode()

    def headers(self, method: str, path: str, head: bytes) -> dict[str, str]:
        timestamp = datetime.now(UTC).isoformat()
        nonce = base64.b64encode(secrets.token_bytes(NONCE_BYTES)).decode()
        signature = self._key.sign(signed_bytes(method, path, head, timestamp, nonce), _ECDSA)
        return {
            PUBLIC_KEY_HEADER: self._public,
            TIMESTAMP_HEADER: timestamp,
            NONCE_HEADER: nonce,
            SIGNATURE_HEADER: base64.b64encode(signature).decode(),
        }


def claimed_identity(headers: Mapping[bytes, bytes]) -> Identity:
    """Whose key a request shows; nothing is proved yet."""
    return _key_of(_header(headers, PUBLIC_KEY_HEADER))[1]


class Verifier:
    """The door's end. `check` proves who signed and when; `spend` lets a request in once.

    A timestamp older than this verifier is refused, so that a restart, which forgets the nonces, opens no replay.
    """

    def __init__(self, started_at: float) -> None:
        self._started_at = started_at
        self._spent: dict[bytes, float] = {}  # in the order of their expiry, which is that of insertion

    def check(self, method: str, path: str, head: bytes, headers: Mapping[bytes, bytes], now: float) -> Identity:
        """The signer's identity; refuses with 401 a bad signature and a clock outside the window."""
        key, identity = _key_of(_header(headers, PUBLIC_KEY_HEADER))
        timestamp, nonce = (
            _header(headers, name).decode("ascii", "replace") for name in (TIMESTAMP_HEADER, NONCE_HEADER)
        )
        if len(_base64(nonce.encode(), "nonce")) != NONCE_BYTES:
            raise Refusal(401, "signature", "the nonce is not 16 bytes")
        self._check_time(timestamp, now)
        try:
            signature = _base64(_header(headers, SIGNATURE_HEADER), "signature")
            key.verify(signature, signed_bytes(method, path, head, timestamp, nonce), _ECDSA)
        except InvalidSignature:
            raise Refusal(401, "signature", "the signature does not fit the request") from None
        return identity

    def spend(self, identity: Identity, headers: Mapping[bytes, bytes], now: float) -> None:
        """Note the nonce of a request that is let in; refuses one that was let in before."""
        nonce = bytes.fromhex(identity.fingerprint[:16]) + _header(headers, NONCE_HEADER)
        while self._spent and next(iter(self._spent.values())) <= now:
            del self._spent[next(iter(self._spent))]
        if nonce in self._spent:
            raise Refusal(401, "replay", "this request was made before")
        if len(self._spent) >= MAX_NONCES:
            raise Refusal(503, "busy", "too many requests in the last five minutes")
        self._spent[nonce] = now + LATEST_S - EARLIEST_S

    def _check_time(self, timestamp: str, now: float) -> None:
        try:
            signed_at = datetime.fromisoformat(timestamp)
            if signed_at.tzinfo is None:
                raise ValueError
            at = signed_at.timestamp()
        except (ValueError, OverflowError):
            raise Refusal(401, "signature", "the timestamp cannot be read") from None
        if not EARLIEST_S < now - at < LATEST_S:
            raise Refusal(401, "clock", f"the device's clock is {now - at:+.0f} s behind the aggregator's")
        if at < self._started_at:
            raise Refusal(401, "clock", "the request was signed before the aggregator started")


@lru_cache(maxsize=4096)
def _key_of(encoded: bytes) -> tuple[ec.EllipticCurvePublicKey, Identity]:
    """The key in a header, written anew by us. Only P-384 is taken."""
    try:
        key = load_der_public_key(_base64(encoded, "public key"))
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise Refusal(401, "signature", "the public key cannot be read") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise Refusal(401, "signature", "the public key is not a P-384 one")
    der = public_der(key)
    return key, Identity(fingerprint(der), der)


def _header(headers: Mapping[bytes, bytes], name: str) -> bytes:
    value = headers.get(name.encode(), b"")
    if not value or len(value) > 1024:
        raise Refusal(401, "signature", f"the request has no {name}")
    return value


def _base64(data: bytes, what: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise Refusal(401, "signature", f"the {what} is not base64") from None
