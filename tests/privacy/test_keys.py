"""Keys: the published vectors of every primitive, and what a peer's key and message must be."""

from __future__ import annotations

import hashlib
import hmac
import json
import pickle
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.scripted_rng import ScriptedRng
from thinwire.core.errors import ThinwireError
from thinwire.privacy import keys
from thinwire.privacy.keys import BadKey, BadSeal, PairKeys, PublicKeys, encapsulate, hkdf, seal, unseal
from thinwire.privacy.secret_rng import SystemRng

ML_KEM = json.loads((Path(__file__).parents[1] / "golden/privacy/ml-kem-768.json").read_text())["vectors"]
FIELD = 2**255 - 19
h = bytes.fromhex


def by_hand(secret: bytes, salt: bytes, info: bytes, length: int) -> bytes:
    """RFC 5869 in its own words."""
    extracted, out, block = hmac.digest(salt or bytes(32), secret, "sha256"), b"", b""
    while len(out) < length:
        block = hmac.digest(extracted, block + info + bytes([len(out) // 32 + 1]), "sha256")
        out += block
    return out[:length]


RFC_5869 = [
    (
        b"\x0b" * 22, bytes(range(13)), bytes(range(0xF0, 0xFA)),
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
    ),
    (
        bytes(range(0x50)), bytes(range(0x60, 0xB0)), bytes(range(0xB0, 0x100)),
        ("b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c"
         "59045a99cac7827271cb41c65e590e09da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87"),
    ),
    (b"\x0b" * 22, b"", b"", "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"),
]  # fmt: skip


@pytest.mark.parametrize(("secret", "salt", "info", "expected"), RFC_5869)
def test_hkdf_is_that_of_rfc_5869(secret: bytes, salt: bytes, info: bytes, expected: str) -> None:
    length = len(expected) // 2
    assert by_hand(secret, salt, info, length) == h(expected)
    assert HKDF(hashes.SHA256(), length, salt or None, info).derive(secret) == h(expected)


@given(secret=st.binary(max_size=99), label=st.text(max_size=9), context=st.binary(max_size=40))
def test_hkdf_has_an_empty_salt_and_length_prefixed_fields(secret: bytes, label: str, context: bytes) -> None:
    raw = label.encode()
    info = len(raw).to_bytes(4, "little") + raw + len(context).to_bytes(4, "little") + context
    for length in (32, 64):
        assert hkdf(secret, label, context, length) == by_hand(secret, b"", info, length)


RFC_7748 = [
    ("a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4",
     "e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c",
     "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552"),
    ("4b66e9d4d1b4673c5ad22691957d6af5c11b6421e0ea01d42ca4169e7918ba0d",
     "e5210f12786811d3f4b7959d0538ae2c31dbe7106fc03c3efc4cd549c715a493",
     "95cbde9476e8907d7aade45cb4b873f88b595a68799fa152e6f8f7647aac7957"),
]  # fmt: skip


def x25519(scalar: bytes, point: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(scalar).exchange(X25519PublicKey.from_public_bytes(point))


@pytest.mark.parametrize(("scalar", "point", "expected"), RFC_7748)
def test_x25519_is_that_of_rfc_7748(scalar: str, point: str, expected: str) -> None:
    assert x25519(h(scalar), h(point)) == h(expected)


def test_x25519_iterated_is_that_of_rfc_7748() -> None:
    scalar = point = (9).to_bytes(32, "little")
    expected = {
        1: "422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079",
        1000: "684cf59ba83309552800ef566f2f4d3c1c3887c49360e3875f2eb94d99532c51",
    }
    for turn in range(1, 1001):
        scalar, point = x25519(scalar, point), scalar
        if turn in expected:
            assert scalar == h(expected[turn])


def test_ecdsa_on_p256_with_sha256_is_that_of_rfc_6979() -> None:
    x = 0x60FED4BA255A9D31C961EB74C6356D68C049B8923B61FA6CE669622E60F29FB6
    y = 0x7903FE1008B8BC99A41AE9E95628BC64F2F1B20C2D7E9F5177A3C294D4462299
    r = 0xEFD48B2AACB6A8FD1140DD9CD45E81D69D2C877B56AAF991C34D0EA84EAF3716
    s = 0xF7CB1C942D657C41D436C7A1B6E29F65F3E900DBB9AFF4064DC4AB2F843ACDA8
    public, sha256 = ec.EllipticCurvePublicNumbers(x, y, ec.SECP256R1()).public_key(), ec.ECDSA(hashes.SHA256())
    public.verify(encode_dss_signature(r, s), b"sample", sha256)
    for signature, message in [((r, s + 1), b"sample"), ((r, s), b"simple"), ((s, r), b"sample")]:
        with pytest.raises(InvalidSignature):
            public.verify(encode_dss_signature(*signature), message, sha256)


@pytest.mark.parametrize(
    ("private", "public", "message", "signature"),
    [
        ("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
         "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a", "",
         ("e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
          "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b")),
        ("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
         "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c", "72",
         ("92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
          "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00")),
        ("c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
         "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025", "af82",
         ("6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
          "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a")),
    ],
)  # fmt: skip
def test_ed25519_is_that_of_rfc_8032(private: str, public: str, message: str, signature: str) -> None:
    key = Ed25519PrivateKey.from_private_bytes(h(private))
    assert key.public_key().public_bytes_raw() == h(public)
    assert key.sign(h(message)) == h(signature)
    key.public_key().verify(h(signature), h(message))
    with pytest.raises(InvalidSignature):
        key.public_key().verify(h(signature), h(message) + b"\x00")


def test_aes_256_gcm_is_that_of_nist() -> None:
    """McGrew and Viega (2005), test cases 13 and 14: key and nonce are 0, as in `seal`."""
    assert seal(bytes(32), b"", b"") == h("530f8afbc74536b9a963b4f1c4cb738b")
    assert seal(bytes(32), bytes(16), b"") == h("cea7403d4d606b6e074ec5d3baf39d18d0d1c8a799996bf0265b98b5d48ab919")
    # CAVS 14.0, gcmEncryptExtIV256, the first with a plaintext of 128 and associated data of 160 bits
    key, nonce = h("83688deb4af8007f9b713b47cfa6c73e35ea7a3aa4ecdb414dded03bf7a0fd3a"), h("0b459724904e010a46901cf3")
    plaintext, associated = h("33d893a2114ce06fc15d55e454cf90c3"), h("794a14ccd178c8ebfd1379dc704c5e208f9d8424")
    assert AESGCM(key).encrypt(nonce, plaintext, associated) == h(
        "cc66bee423e3fcd4c0865715e95866960fb291bd3dba94a1dfd8b286cfb97ac5"
    )


def test_what_is_sealed_opens_with_its_key_and_its_associated_data_only() -> None:
    sealed = seal(b"k" * 32, b"a share", b"from 1 to 2")
    assert unseal(b"k" * 32, sealed, b"from 1 to 2") == b"a share"
    for key, message, associated in [
        (b"j" * 32, sealed, b"from 1 to 2"),
        (b"k" * 32, sealed, b"from 2 to 1"),
        (b"k" * 32, sealed[:-1], b"from 1 to 2"),
        (b"k" * 32, b"", b"from 1 to 2"),
        *((b"k" * 32, sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :], b"from 1 to 2") for at in range(23)),
    ]:
        with pytest.raises(BadSeal):
            unseal(key, message, associated)


@pytest.mark.parametrize("length", [0, 16, 24, 31, 33])
def test_a_key_of_another_size_than_256_bits_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="AES-256"):
        seal(bytes(length), b"", b"")
    with pytest.raises(ValueError, match="AES-256"):
        unseal(bytes(length), bytes(16), b"")


def pairs(seed: int, post_quantum: bool = False) -> tuple[PairKeys, PairKeys]:
    rng = ScriptedRng(seed)
    return PairKeys.generate(rng, post_quantum), PairKeys.generate(rng, post_quantum)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=20, deadline=None)
def test_both_ends_of_an_exchange_have_the_same_secret_and_a_third_has_another(seed: int) -> None:
    (one, other), third = pairs(seed), pairs(seed + 1)[0]
    secret = one.exchange(other.public)
    assert secret == other.exchange(one.public)
    assert len({secret, third.exchange(one.public), third.exchange(other.public)}) == 3


def test_an_exchange_is_x25519_bound_to_both_public_keys() -> None:
    one, other = pairs(1)
    raw = x25519(ScriptedRng(1).random_bytes(32), other.public.x25519)
    both = b"".join(sorted([one.public.x25519, other.public.x25519]))
    assert one.exchange(other.public) == hkdf(raw, "x25519", both)


def test_a_copy_of_a_key_on_another_point_shares_another_secret() -> None:
    """u and 1 / u differ by the point of order 2: raw X25519 gives the same secret for both."""
    one, other = pairs(2)
    mirrored = pow(int.from_bytes(one.public.x25519, "little"), -1, FIELD).to_bytes(32, "little")
    scalar = X25519PrivateKey.generate().private_bytes_raw()
    assert x25519(scalar, mirrored) == x25519(scalar, one.public.x25519)
    assert other.exchange(PublicKeys(mirrored)) != other.exchange(one.public)


# Of order 1, 2, 4 and 8, on the curve and on its twist: all u for which X25519 gives 0 (Bernstein, "Curve25519").
LOW = [
    0,
    1,
    int.from_bytes(h("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"), "little"),
    int.from_bytes(h("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"), "little"),
    FIELD - 1,
]


def encodings(u: int) -> list[bytes]:
    """A u below 19 has two encodings of 255 bits, and each has one with the highest bit set, which RFC 7748 masks."""
    return [
        (low | top).to_bytes(32, "little") for low in (u, u + FIELD) if low < 2**255 for top in (0, 1 << 255)
    ]  # fmt: skip


@pytest.mark.parametrize("point", [raw for u in LOW for raw in encodings(u)], ids=lambda raw: raw.hex())
def test_a_point_of_low_order_is_refused_in_every_encoding(point: bytes) -> None:
    one, _ = pairs(3)
    with pytest.raises(BadKey):
        one.exchange(PublicKeys(point))
    with pytest.raises(BadKey):
        PublicKeys(point).check(post_quantum=False)
    with pytest.raises(ValueError, match="."):  # the library's own refusal, also of encodings that we refuse before
        x25519(bytes(32), point)


def roots(b: int, c: int) -> set[int]:
    """The u with u^2 + b u + c = 0 modulo 2^255 - 19."""
    square = (b * b - 4 * c) % FIELD
    root = pow(square, (FIELD + 3) // 8, FIELD)
    if root * root % FIELD != square:
        root = root * pow(2, (FIELD - 1) // 4, FIELD) % FIELD
    found = {(s * root - b) * pow(2, -1, FIELD) % FIELD for s in (1, -1)}
    return found if root * root % FIELD == square else set()


def test_the_list_of_points_of_low_order_is_complete() -> None:
    """u doubles to (u^2 - 1)^2 / 4 u (u^2 + A u + 1). Order 2: this is infinite; 4: it is 0; 8: it is 1 or -1, which is
    a quadratic equation in w = u + 1 / u."""
    a = 486662
    two, four = {0} | roots(a, 1), {1, FIELD - 1}
    eight = {u for s in (1, -1) for w in roots(-4 * s, -4 * (s * a + 1)) for u in roots(-w, 1)}
    assert two | four | eight == set(LOW)


@pytest.mark.parametrize("key", [b"", bytes(31), b"\x09" + bytes(32)])
def test_an_x25519_key_of_another_length_is_refused(key: bytes) -> None:
    with pytest.raises(BadKey, match="32 bytes"):
        PublicKeys(key).check(post_quantum=False)
    with pytest.raises(BadKey, match="32 bytes"):
        pairs(4)[0].exchange(PublicKeys(key))


@pytest.mark.parametrize("other", [1 << 255, FIELD])
def test_a_second_encoding_of_an_honest_key_is_refused(other: int) -> None:
    honest = (9).to_bytes(32, "little")
    PublicKeys(honest).check(post_quantum=False)
    with pytest.raises(BadKey, match="2\\^255 - 19"):
        PublicKeys((9 + other).to_bytes(32, "little")).check(post_quantum=False)


@pytest.mark.parametrize("post_quantum", [False, True])
def test_a_root_determines_its_pair_and_another_label_gives_another(post_quantum: bool) -> None:
    root = bytes(range(32))
    made = PairKeys.from_root(root, "mask", post_quantum)
    assert made == PairKeys.from_root(root, "mask", post_quantum)
    found = {made.public, PairKeys.from_root(root, "enc", post_quantum).public}
    assert len(found | {PairKeys.from_root(bytes(32), "mask", post_quantum).public}) == 3
    expected = X25519PrivateKey.from_private_bytes(hkdf(root, "mask/x25519", b"")).public_key().public_bytes_raw()
    assert made.public.x25519 == expected


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_root_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        PairKeys.from_root(bytes(length), "mask", post_quantum=False)


def test_a_pair_neither_prints_nor_pickles_its_secret() -> None:
    made = PairKeys.generate(SystemRng(), post_quantum=True)
    assert "rivate" not in repr(made)
    assert "ml_kem" not in repr(made)
    with pytest.raises(TypeError):
        pickle.dumps(made)


@pytest.mark.parametrize("vector", ML_KEM)
def test_ml_kem_768_is_that_of_fips_203(vector: dict[str, str]) -> None:
    pair = PairKeys._of(bytes(range(32)), h(vector["d"] + vector["z"]))
    assert hashlib.sha256(pair.public.ml_kem).hexdigest() == vector["public_sha256"]
    assert pair.decapsulate(h(vector["ciphertext"])) == h(vector["secret"])
    assert pair.decapsulate(h(vector["changed_ciphertext"])) == h(vector["secret_of_changed"])


def test_only_the_pair_gets_what_is_encapsulated_for_it() -> None:
    one, other = pairs(5, post_quantum=True)
    ciphertext, secret = encapsulate(one.public)
    assert one.decapsulate(ciphertext) == secret != other.decapsulate(ciphertext)
    assert encapsulate(one.public)[0] != ciphertext
    with pytest.raises(BadKey, match="1087 bytes"):
        one.decapsulate(ciphertext[:-1])
    with pytest.raises(BadKey, match="0 bytes"):
        one.decapsulate(b"")


def test_a_classical_suite_encapsulates_nothing() -> None:
    one, _ = pairs(6)
    assert encapsulate(one.public) == (b"", b"")
    assert one.decapsulate(b"") == b""
    with pytest.raises(BadKey, match="1088 bytes"):
        one.decapsulate(bytes(1088))


def test_an_ml_kem_key_that_does_not_fit_is_refused() -> None:
    public = pairs(7, post_quantum=True)[0].public
    public.check(post_quantum=True)
    with pytest.raises(BadKey, match="without"):
        public.check(post_quantum=False)
    with pytest.raises(BadKey, match="0 bytes in a suite with"):
        PublicKeys(public.x25519).check(post_quantum=True)
    for ml_kem in (public.ml_kem[:-1], public.ml_kem + b"\x00", b"\xff" * 1184):  # the last is not reduced modulo q
        with pytest.raises(BadKey, match="ML-KEM"):
            PublicKeys(public.x25519, ml_kem).check(post_quantum=True)
        with pytest.raises(BadKey, match="ML-KEM"):
            encapsulate(PublicKeys(public.x25519, ml_kem))


def test_a_device_without_ml_kem_is_told_what_to_install(monkeypatch) -> None:
    public = pairs(8, post_quantum=True)[0].public

    def missing(seed: bytes):
        raise ImportError("mlkem")

    monkeypatch.setattr(keys, "_ml_kem_private", missing)
    keys.has_ml_kem.cache_clear()
    try:
        assert not keys.has_ml_kem()
        for use in (
            lambda: PairKeys.from_root(bytes(32), "mask", post_quantum=True),
            lambda: PairKeys.generate(SystemRng(), post_quantum=True),
            lambda: public.check(post_quantum=True),
            lambda: encapsulate(public),
        ):
            with pytest.raises(ThinwireError, match="ML-KEM-768") as caught:
                use()
            assert "thinwire[privacy]" in caught.value.hint
        assert PairKeys.generate(SystemRng(), post_quantum=False).public.ml_kem == b""
    finally:
        monkeypatch.undo()
        keys.has_ml_kem.cache_clear()
    assert keys.has_ml_kem()
