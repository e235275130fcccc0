"""Signed requests: Flower's headers and algorithm, but over the whole request instead of its time alone.

A signature covers a label, the method, the target, the body's digest and length, a timestamp and a nonce. All of these
are in the request's line and headers, so a request is judged before a byte of its body is read. The body is checked
against its digest as it arrives.

Keys are P-256 or P-384. Devices make P-256 keys, whose check costs the aggregator an eighth of a P-384 one. Stock
Flower nodes have P-384 keys. A key is identified by the SHA-256 of its DER form. Once the aggregator knows a key,
requests name it by that fingerprint.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_der_public_key

from thinwire.transport.protocol.http import ApiError

PUBLIC_KEY_HEADER = "flwr-public-key"  # the three are Flower's (tests/flower/test_flwr_contract.py)
TIMESTAMP_HEADER = "flwr-timestamp"
SIGNATURE_HEADER = "flwr-signature"
KEY_HEADER, NONCE_HEADER, DIGEST_HEADER = "thinwire-key", "thinwire-nonce", "thinwire-digest"
LABEL = b"thinwire lane v1"
NONCE_BYTES, DIGEST_BYTES = 16, 32
MAX_HEADER_BYTES = 512  # of one header's value; a key needs 160
EARLIEST_S, LATEST_S = -5.0, 305.0  # age of a stock node's timestamp: Flower's tolerance and its allowance for drift
MAX_AHEAD_S = 0.1  # a timestamp ahead by less waits for its time; one further ahead must be signed again
NOTHING = hashlib.sha256().digest()

CURVES = (ec.SECP256R1, ec.SECP384R1)  # of keys that may sign

_ECDSA = ec.ECDSA(hashes.SHA256())
Headers = Mapping[bytes, bytes]


@dataclass(frozen=True)
class Identity:
    """The key that signed, in canonical DER form (one key has one spelling), and its fingerprint."""

    fingerprint: str
    der: bytes


@dataclass(frozen=True)
class SignatureHeaders:
    """The content of a request's signature headers, each field readable and of its right size. Nothing is verified yet.

    `der` is None if the request names the key by its fingerprint alone.
    """

    fingerprint: str
    der: bytes | None
    digest: bytes
    timestamp: str
    nonce: bytes
    signature: bytes

    @classmethod
    def read(cls, headers: Headers) -> SignatureHeaders:
        """Read the headers; raise `ApiError` 401 for a request that is not signed, or by a key of another kind."""
        fingerprint, der = _key(headers)
        digest = _base64(_header(headers, DIGEST_HEADER), "digest")
        nonce = _base64(_header(headers, NONCE_HEADER), "nonce")
        if len(nonce) != NONCE_BYTES or len(digest) != DIGEST_BYTES:
            raise ApiError(401, "signature", "a nonce has 16 bytes, a digest 32")
        timestamp = _header(headers, TIMESTAMP_HEADER).decode("ascii", "replace")
        signature = _base64(_header(headers, SIGNATURE_HEADER), "signature")
        return cls(fingerprint, der, digest, timestamp, nonce, signature)

    def signed_at(self) -> float:
        """Return the wall-clock seconds of the timestamp, by the device's clock."""
        try:
            at = datetime.fromisoformat(self.timestamp)
            if at.tzinfo is None:
                raise ValueError
            return at.timestamp()
        except (ValueError, OverflowError):
            raise ApiError(401, "signature", "the timestamp is not readable") from None

    def require_signature(self, der: bytes, method: str, target: str, length: int) -> None:
        """Raise `ApiError` 401 unless the holder of this key signed exactly this request."""
        said = signed_bytes(method, target, self.digest, length, self.timestamp, self.nonce)
        try:
            _loaded(der).verify(self.signature, said, _ECDSA)
        except InvalidSignature:
            raise ApiError(401, "signature", "the signature does not fit the request") from None


def signed_bytes(method: str, target: str, digest: bytes, length: int, timestamp: str, nonce: bytes) -> bytes:
    """Return the bytes that are signed. No field can contain a line feed, so no two requests have the same bytes."""
    fields = (method, target, digest.hex(), str(length), timestamp, nonce.hex())
    return b"\n".join((LABEL, *(field.encode() for field in fields)))


class Signer:
    """Signs requests on a device.

    Each call draws a new nonce, so a repeated request is signed again. `now` gives the time of the timestamp; a device
    without a clock corrects its own (`device/identity.py`).
    """

    def __init__(
        self, key: ec.EllipticCurvePrivateKey, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._key, self._now = key, now
        der = public_der(key.public_key())
        self.fingerprint = fingerprint(der)
        self._whole = base64.b64encode(der).decode()
        self._named = base64.urlsafe_b64encode(bytes.fromhex(self.fingerprint)).rstrip(b"=").decode()

    def headers(
        self, method: str, target: str, digest: bytes = NOTHING, length: int = 0, *, whole_key: bool = False
    ) -> dict[str, str]:
        """Return the signature headers of one request.

        `digest` is the SHA-256 of the body, or of the whole part for a PUT. `whole_key` sends the key itself, for an
        aggregator that may not know it.
        """
        timestamp, nonce = self._now().isoformat(), secrets.token_bytes(NONCE_BYTES)
        signature = self._key.sign(signed_bytes(method, target, digest, length, timestamp, nonce), _ECDSA)
        return {
            **({PUBLIC_KEY_HEADER: self._whole} if whole_key else {KEY_HEADER: self._named}),
            TIMESTAMP_HEADER: timestamp,
            NONCE_HEADER: base64.b64encode(nonce).decode(),
            DIGEST_HEADER: base64.b64encode(digest).decode(),
            SIGNATURE_HEADER: base64.b64encode(signature).decode(),
        }


def public_der(key: ec.EllipticCurvePublicKey) -> bytes:
    """Return a public key as DER."""
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def fingerprint(der: bytes) -> str:
    """Return the SHA-256 of a DER key as 64 hex digits."""
    return hashlib.sha256(der).hexdigest()


def identity_of(encoded: bytes) -> Identity:
    """Return the identity of the key in a header, encoded again in canonical form; P-256 and P-384 are accepted."""
    der = _canonical(encoded)
    return Identity(fingerprint(der), der)


@lru_cache(maxsize=1024)
def _canonical(encoded: bytes) -> bytes:
    try:
        key = load_der_public_key(_base64(encoded, "public key"))
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ApiError(401, "signature", "the public key is not readable") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, CURVES):
        raise ApiError(401, "signature", "the public key is not a P-256 or P-384 one")
    return public_der(key)


@lru_cache(maxsize=16_384)
def _loaded(der: bytes) -> ec.EllipticCurvePublicKey:
    key = load_der_public_key(der)
    assert isinstance(key, ec.EllipticCurvePublicKey)
    return key


def _key(headers: Headers) -> tuple[str, bytes | None]:
    """Return (fingerprint, DER key or None) of a request's key header."""
    if PUBLIC_KEY_HEADER.encode() in headers:
        identity = identity_of(_header(headers, PUBLIC_KEY_HEADER))
        return identity.fingerprint, identity.der
    named = _header(headers, KEY_HEADER)
    found = _base64(named.translate(_STANDARD) + b"=" * (-len(named) % 4), "key's name")
    if len(found) != DIGEST_BYTES:
        raise ApiError(401, "signature", "a key is named by its SHA-256")
    return found.hex(), None


_STANDARD = bytes.maketrans(b"-_", b"+/")


def _header(headers: Headers, name: str) -> bytes:
    value = headers.get(name.encode(), b"")
    if not value or len(value) > MAX_HEADER_BYTES:
        raise ApiError(401, "signature", f"the request has no {name}")
    return value


def _base64(data: bytes, what: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise ApiError(401, "signature", f"the {what} is not base64") from None
