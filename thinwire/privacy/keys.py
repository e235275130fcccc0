"""Keys of secure aggregation: key pairs, exchange, key derivation, and seals of messages between two clients.

Every primitive is the `cryptography` library's: X25519 (RFC 7748), HKDF-SHA256 (RFC 5869), AES-256-GCM (NIST SP
800-38D) and ML-KEM-768 (FIPS 203). A pair of keys lives for one round. Nothing here is written to a disk.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cryptography.exceptions import InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from thinwire.core.errors import ThinwireError
from thinwire.core.prng import SecretRng

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey

SUITE = "tw-secagg-1/x25519-aes256gcm-sha256"
SUITE_PQ = "tw-secagg-1/x25519-mlkem768-aes256gcm-sha256"

KEY_BYTES = 32  # of X25519, of a shared secret, of an AES key, of a root
ML_KEM_SEED_BYTES = 64  # d and z of FIPS 203
ML_KEM_PUBLIC_BYTES = 1184
ML_KEM_CIPHERTEXT_BYTES = 1088
FIELD = 2**255 - 19  # the prime of X25519
NONCE = bytes(12)


class BadKey(ValueError):
    """A public key or a ciphertext of a peer is not one that an honest peer sends."""


class BadSeal(ValueError):
    """A sealed message does not open: another key, other associated data, or a changed message."""


@functools.cache
def has_ml_kem() -> bool:
    """Return True if this device's `cryptography` has ML-KEM: its wheels have it from 48 on."""
    try:
        _ml_kem_private(bytes(ML_KEM_SEED_BYTES))
    except (ImportError, UnsupportedAlgorithm):
        return False
    return True


def require_ml_kem() -> None:
    """Raise ThinwireError if a plan with `post_quantum = true` cannot run on this machine."""
    if not has_ml_kem():
        raise ThinwireError(
            "[secure] post_quantum = true needs ML-KEM-768, which this machine does not have",
            why="its package cryptography is older than 48, or was built with an OpenSSL older than 3.5",
            hint="pip install 'thinwire[privacy]'",
        )


def hkdf(secret: bytes, label: str, context: bytes, length: int = KEY_BYTES) -> bytes:
    """Return `length` bytes of HKDF-SHA256 over a secret, for the purpose that label and context name.

    The salt is empty. The info is the label and the context, each behind its length in four bytes, little-endian.

    Invariant: another secret, label or context gives independent bytes.

    >>> hkdf(bytes(32), "ab", b"c") == hkdf(bytes(32), "a", b"bc")
    False
    """
    fields = (label.encode(), context)
    info = b"".join(struct.pack("<I", len(one)) + one for one in fields)
    return HKDF(algorithm=SHA256(), length=length, salt=None, info=info).derive(secret)


@dataclass(frozen=True)
class PublicKeys:
    """Holds the public half of a pair: 32 bytes of X25519, and 1184 bytes of ML-KEM-768 or none.

    `check` refuses what no honest client sends. Two clients may not have equal keys, so each key has one encoding.
    """

    x25519: bytes
    ml_kem: bytes = field(default=b"", repr=False)

    def check(self, post_quantum: bool) -> None:
        """Raise BadKey for a wrong length, a second encoding of a number, a point of low order, or a bad ML-KEM key.

        A point of low order gives the all-zero secret with every private key, so any private key finds it.
        """
        self.check_encoding()
        _x25519(_PROBE, self.x25519)
        if bool(self.ml_kem) is not post_quantum:
            raise BadKey(
                f"an ML-KEM key of {len(self.ml_kem)} bytes in a suite {'with' if post_quantum else 'without'}"
            )
        if post_quantum:
            _ml_kem_public(self.ml_kem)

    def check_encoding(self) -> None:
        """Raise BadKey for an X25519 key of a wrong length, or in a second encoding of its number."""
        if len(self.x25519) != KEY_BYTES or int.from_bytes(self.x25519, "little") >= FIELD:
            raise BadKey("an X25519 key is 32 bytes, and less than 2^255 - 19")


@dataclass(frozen=True)
class PairKeys:
    """Holds a key pair of one round: X25519, and ML-KEM-768 where the suite is post-quantum.

    A client has two pairs, `enc` and `mask`. They are independent: the root of `mask` is shared among the clients, and
    whoever rebuilds it must not be able to open a seal.
    """

    public: PublicKeys
    _private: X25519PrivateKey = field(repr=False, compare=False)
    _ml_kem: MLKEM768PrivateKey | None = field(repr=False, compare=False)

    @classmethod
    def generate(cls, rng: SecretRng, post_quantum: bool) -> PairKeys:
        """Return a new pair of random bytes."""
        return cls._of(rng.random_bytes(KEY_BYTES), rng.random_bytes(ML_KEM_SEED_BYTES) if post_quantum else b"")

    @classmethod
    def from_root(cls, root: bytes, label: str, post_quantum: bool) -> PairKeys:
        """Return the pair that a root of 32 bytes determines: whoever rebuilds the root has the same pair.

        The X25519 key is HKDF(root, label + "/x25519"), the ML-KEM seed HKDF(root, label + "/ml-kem-768").
        """
        if len(root) != KEY_BYTES:
            raise ValueError(f"a root has {KEY_BYTES} bytes, not {len(root)}")
        seed = hkdf(root, f"{label}/ml-kem-768", b"", ML_KEM_SEED_BYTES) if post_quantum else b""
        return cls._of(hkdf(root, f"{label}/x25519", b""), seed)

    @classmethod
    def _of(cls, x25519: bytes, seed: bytes) -> PairKeys:
        private = X25519PrivateKey.from_private_bytes(x25519)
        if seed:
            require_ml_kem()
        ml_kem = _ml_kem_private(seed) if seed else None
        public = ml_kem.public_key().public_bytes_raw() if ml_kem else b""
        return cls(PublicKeys(private.public_key().public_bytes_raw(), public), private, ml_kem)

    def exchange(self, peer: PublicKeys) -> bytes:
        """Return the 32 bytes that this pair and its peer share by X25519; raise BadKey as `PublicKeys.check` does.

        It is HKDF(X25519, "x25519", both public keys in order), as RFC 7748 (section 6.1) advises. Without the keys, a
        corrupt client could advertise an honest client's point plus one of low order: another key, the same secret, and
        so masks that cancel between the two.
        """
        peer.check_encoding()  # `_x25519` finds a point of low order itself
        both = sorted((self.public.x25519, peer.x25519))
        return hkdf(_x25519(self._private, peer.x25519), "x25519", b"".join(both))

    def decapsulate(self, ciphertext: bytes) -> bytes:
        """Return the secret that a peer encapsulated for this pair, b"" where the suite is classical.

        Raises BadKey for a wrong length. A ciphertext that was changed gives another secret, not an error (FIPS 203).
        """
        if len(ciphertext) != (ML_KEM_CIPHERTEXT_BYTES if self._ml_kem else 0):
            raise BadKey(f"a ciphertext of {len(ciphertext)} bytes is not one of this suite")
        return self._ml_kem.decapsulate(ciphertext) if self._ml_kem else b""


def encapsulate(peer: PublicKeys) -> tuple[bytes, bytes]:
    """Return (ciphertext, secret) for a peer: only its pair gets the secret. Both are b"" where the suite is classical.

    The library draws from the operating system. Raises BadKey for a key that is not one of ML-KEM-768.
    """
    if not peer.ml_kem:
        return b"", b""
    secret, ciphertext = _ml_kem_public(peer.ml_kem).encapsulate()
    return ciphertext, secret


def seal(key: bytes, plaintext: bytes, associated: bytes) -> bytes:
    """Return the plaintext encrypted and authenticated, with the associated data, by AES-256-GCM; 16 bytes longer.

    The nonce is fixed at zero, because a key seals one message: derive it by `hkdf` from a context that names the
    round, the sender, the receiver and the purpose. A second message under one key would show the difference of both.
    """
    return AESGCM(_of_256_bits(key)).encrypt(NONCE, plaintext, associated)


def unseal(key: bytes, sealed: bytes, associated: bytes) -> bytes:
    """Return the plaintext of `seal`; raise BadSeal unless key, message and associated data are those of `seal`."""
    try:
        return AESGCM(_of_256_bits(key)).decrypt(NONCE, sealed, associated)
    except InvalidTag:
        raise BadSeal("a sealed message does not open with this key and these associated data") from None


def _of_256_bits(key: bytes) -> bytes:
    if len(key) != KEY_BYTES:  # AESGCM would take 16 and 24 bytes too
        raise ValueError(f"a key of AES-256 has {KEY_BYTES} bytes, not {len(key)}")
    return key


def _x25519(private: X25519PrivateKey, public: bytes) -> bytes:
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:  # the secret is all zeros
        raise BadKey("an X25519 key is a point of low order") from None


_PROBE = X25519PrivateKey.from_private_bytes(bytes(KEY_BYTES))  # secret from nobody: it only looks at public keys


def _ml_kem_private(seed: bytes) -> MLKEM768PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey

    return MLKEM768PrivateKey.from_seed_bytes(seed)


def _ml_kem_public(key: bytes) -> MLKEM768PublicKey:
    require_ml_kem()
    from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PublicKey

    try:
        return MLKEM768PublicKey.from_public_bytes(key)
    except ValueError:  # its length, or a coefficient that is not reduced
        raise BadKey(f"{len(key)} bytes are no key of ML-KEM-768: one has {ML_KEM_PUBLIC_BYTES}, reduced") from None
