"""A second implementation of unmasking gives the sum of the recorded round.

It was written from the section "Bytes that remove a mask" of docs/explain/secure-aggregation.md by an author who had
not read the code that it is compared with. Only AES on single blocks comes from a library.
"""

from __future__ import annotations

import ast
import hmac
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

GOLDEN = Path(__file__).parent.parent / "golden" / "privacy" / "round.json"
ROUND: dict[str, Any] = json.loads(GOLDEN.read_text())
WIDTH: int = ROUND["width"]
THRESHOLD: int = ROUND["threshold"]
CONTEXT2 = bytes.fromhex(ROUND["context2"])
PUBLIC_KEYS = {int(index): bytes.fromhex(client["mask_x25519"]) for index, client in ROUND["clients"].items()}
SURVIVORS: list[int] = ROUND["survivors"]
LOST = sorted(set(ROUND["delivered"]) - set(SURVIVORS))

SHAMIR_PRIME = 2**256 + 297
CURVE_PRIME = 2**255 - 19
BASE_POINT = (9).to_bytes(32, "little")

Shares = dict[int, int]  # the index of a holder, the value of the polynomial there
Mask = tuple[int, bytes]  # the sign with which the sum contains it, the secret of its key


def hkdf_sha256(secret: bytes, salt: bytes, info: bytes, length: int) -> bytes:
    extracted = hmac.digest(salt or bytes(32), secret, "sha256")
    block, output = b"", b""
    for number in range(1, -(-length // 32) + 1):
        block = hmac.digest(extracted, block + info + bytes([number]), "sha256")
        output += block
    return output[:length]


def derive_key(secret: bytes, label: str, context: bytes) -> bytes:
    fields = (label.encode(), context)
    return hkdf_sha256(secret, b"", b"".join(len(field).to_bytes(4, "little") + field for field in fields), 32)


def x25519(private: bytes, public: bytes) -> bytes:
    """Multiply a point of Curve25519 by a clamped scalar with the Montgomery ladder of RFC 7748, section 5."""
    scalar = int.from_bytes(private, "little") & ~7 & (2**255 - 1) | 2**254
    x1 = int.from_bytes(public, "little") % 2**255
    x2, z2, x3, z3 = 1, 0, x1, 1
    for bit in range(254, -1, -1):
        swap = scalar >> bit & 1
        if swap:
            x2, z2, x3, z3 = x3, z3, x2, z2
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        aa, bb, da, cb = a * a, b * b, d * a, c * b
        e = aa - bb
        x3, z3 = (da + cb) ** 2 % CURVE_PRIME, x1 * (da - cb) ** 2 % CURVE_PRIME
        x2, z2 = aa * bb % CURVE_PRIME, e * (aa + 121665 * e) % CURVE_PRIME
        if swap:
            x2, z2, x3, z3 = x3, z3, x2, z2
    return (x2 * pow(z2, -1, CURVE_PRIME) % CURVE_PRIME).to_bytes(32, "little")


def interpolate(shares: Shares, at: int) -> int:
    """Return the value at `at` of the polynomial of least degree through the shares (Lagrange)."""
    total = 0
    for holder, value in shares.items():
        numerator, denominator = value, 1
        for other in shares.keys() - {holder}:
            numerator = numerator * (at - other) % SHAMIR_PRIME
            denominator = denominator * (holder - other) % SHAMIR_PRIME
        total += numerator * pow(denominator, -1, SHAMIR_PRIME)
    return total % SHAMIR_PRIME


def disclosed_shares() -> dict[int, Shares]:
    """Return for each dealer the shares of its one secret that the survivors disclosed."""
    shares: dict[int, Shares] = {}
    for each in ROUND["disclosed"]:
        assert each["of"] == ("root" if each["dealer"] in LOST else "self mask")
        shares.setdefault(each["dealer"], {})[each["holder"]] = int(each["share"], 16)
    return shares


def rebuild(shares: dict[int, Shares]) -> dict[int, bytes]:
    return {dealer: interpolate(values, 0).to_bytes(32, "big") for dealer, values in shares.items()}


def pairwise_secret(private: bytes, public: bytes) -> bytes:
    keys = sorted([x25519(private, BASE_POINT), public])
    return derive_key(x25519(private, public), "x25519", b"".join(keys))


def masks_in_the_sum(secrets: dict[int, bytes]) -> list[Mask]:
    """List the masks that do not vanish: each survivor's own, and those between a survivor and a lost client."""
    masks = [(1, secrets[survivor]) for survivor in SURVIVORS]
    for lost in LOST:
        private = derive_key(secrets[lost], "mask/x25519", b"")
        for survivor in SURVIVORS:
            masks.append((1 if lost > survivor else -1, pairwise_secret(private, PUBLIC_KEYS[survivor])))
    return masks


def key_stream(secret: bytes, vector: str, length: int) -> bytes:
    cipher = Cipher(algorithms.AES(derive_key(secret, f"mask/{vector}", CONTEXT2)), modes.ECB()).encryptor()
    return b"".join(cipher.update(block.to_bytes(16, "big")) for block in range(-(-length // 16)))[:length]


def read_lanes(data: bytes, bits: int, count: int) -> list[int]:
    """Return `count` unsigned integers of `bits` bits; the first is in the lowest bits of the first byte."""
    number = int.from_bytes(data, "little")
    return [number >> bits * lane & 2**bits - 1 for lane in range(count)]


def unmask_vector(vector: str, masks: list[Mask], bits: int, mask_bits: int, count: int) -> list[int]:
    assert list(ROUND["masked"]) == [str(survivor) for survivor in SURVIVORS]
    packed = [bytes.fromhex(message[vector]) for message in ROUND["masked"].values()]
    assert {len(data) for data in packed} == {-(-count * bits // 8)}
    total = [sum(lanes) for lanes in zip(*(read_lanes(data, bits, count) for data in packed), strict=True)]
    for sign, secret in masks:
        stream = read_lanes(key_stream(secret, vector, count * mask_bits // 8), mask_bits, count)
        total = [value - sign * mask for value, mask in zip(total, stream, strict=True)]
    half = 2 ** (bits - 1)
    return [(value + half) % 2**bits - half for value in total]


def unmask_update(masks: list[Mask]) -> list[int]:
    return unmask_vector("update", masks, WIDTH, 16 if WIDTH <= 16 else 32, ROUND["lanes"])


def unmask_scalars(masks: list[Mask]) -> list[int]:
    return unmask_vector("scalars", masks, 64, 64, 1 + len(ROUND["scalars"]))


def expected_scalars() -> list[int]:
    return [len(SURVIVORS), *(ROUND["sum"]["scalars"][name] for name in ROUND["scalars"])]


def test_the_recorded_round_has_what_unmasking_is_about() -> None:
    assert LOST, "a client dropped out after `share`, so a root is disclosed"
    assert any(lost < survivor for lost in LOST for survivor in SURVIVORS), "a mask that a survivor subtracted"
    assert any(lost > survivor for lost in LOST for survivor in SURVIVORS), "a mask that a survivor added"
    assert sorted(disclosed_shares()) == sorted(SURVIVORS + LOST)
    assert all(len(shares) >= THRESHOLD for shares in disclosed_shares().values())
    assert ROUND["lanes"] * 2 > 16, "the key stream has a second block, so the byte order of its counter matters"


def test_the_disclosed_shares_give_the_recorded_sum() -> None:
    masks = masks_in_the_sum(rebuild(disclosed_shares()))
    assert unmask_update(masks) == ROUND["sum"]["update"]
    assert unmask_scalars(masks) == expected_scalars()


def test_a_rebuilt_root_gives_the_mask_key_that_its_client_advertised() -> None:
    secrets = rebuild(disclosed_shares())
    for lost in LOST:
        assert x25519(derive_key(secrets[lost], "mask/x25519", b""), BASE_POINT) == PUBLIC_KEYS[lost]


@pytest.mark.parametrize("holders", [*itertools.combinations(sorted(PUBLIC_KEYS), THRESHOLD)], ids=str)
def test_any_threshold_of_the_shares_give_the_recorded_sum(holders: tuple[int, ...]) -> None:
    """Take all subsets of the holders; a share that was not disclosed is computed from those that were.

    Where only THRESHOLD shares of a secret were disclosed, this tests the interpolation and not the dealer.
    """
    subset = {
        dealer: {holder: shares.get(holder, interpolate(shares, holder)) for holder in holders}
        for dealer, shares in disclosed_shares().items()
    }
    masks = masks_in_the_sum(rebuild(subset))
    assert unmask_update(masks) == ROUND["sum"]["update"]
    assert unmask_scalars(masks) == expected_scalars()


@pytest.mark.parametrize("dealer", sorted(PUBLIC_KEYS))
def test_one_share_too_few_of_one_secret_gives_another_sum(dealer: int) -> None:
    for holders in itertools.combinations(sorted(disclosed_shares()[dealer]), THRESHOLD - 1):
        shares = disclosed_shares()
        shares[dealer] = {holder: shares[dealer][holder] for holder in holders}
        masks = masks_in_the_sum(rebuild(shares))
        assert unmask_update(masks) != ROUND["sum"]["update"]
        assert unmask_scalars(masks)[0] != len(SURVIVORS)


@pytest.mark.parametrize("left", range(len(SURVIVORS) * (1 + len(LOST))))
def test_a_mask_that_stays_in_the_sum_gives_another_sum(left: int) -> None:
    masks = masks_in_the_sum(rebuild(disclosed_shares()))
    del masks[left]
    assert unmask_update(masks) != ROUND["sum"]["update"]
    assert unmask_scalars(masks)[0] != len(SURVIVORS)


def test_a_mask_with_the_other_sign_gives_another_sum() -> None:
    masks = masks_in_the_sum(rebuild(disclosed_shares()))
    for place, (sign, secret) in enumerate(masks):
        wrong = [*masks[:place], (-sign, secret), *masks[place + 1 :]]
        assert unmask_update(wrong) != ROUND["sum"]["update"]


def test_this_file_imports_nothing_that_it_is_compared_with() -> None:
    modules, names = set[str](), set[str]()
    for node in ast.walk(ast.parse(Path(__file__).read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module
            modules.add(node.module.partition(".")[0])
        if isinstance(node, ast.Name):
            names.add(node.id)
    standard = {"__future__", "ast", "hmac", "itertools", "json", "pathlib", "typing"}
    assert modules <= standard | {"cryptography", "pytest"}
    assert not names & {"__import__", "eval", "exec"}


@pytest.mark.parametrize(
    ("scalar", "point", "product"),
    [
        (
            "a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4",
            "e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c",
            "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552",
        ),
        (
            "4b66e9d4d1b4673c5ad22691957d6af5c11b6421e0ea01d42ca4169e7918ba0d",
            "e5210f12786811d3f4b7959d0538ae2c31dbe7106fc03c3efc4cd549c715a493",
            "95cbde9476e8907d7aade45cb4b873f88b595a68799fa152e6f8f7647aac7957",
        ),
        (
            "0900000000000000000000000000000000000000000000000000000000000000",
            "0900000000000000000000000000000000000000000000000000000000000000",
            "422c8e7a6227d7bca1350b3e2bb7279f7897b87bb6854b783c60e80311ae3079",
        ),
    ],
)
def test_x25519_has_the_values_of_rfc_7748_section_5_2(scalar: str, point: str, product: str) -> None:
    assert x25519(bytes.fromhex(scalar), bytes.fromhex(point)).hex() == product


@pytest.mark.parametrize(
    ("salt", "info", "output"),
    [
        (
            bytes(range(13)),
            bytes(range(0xF0, 0xFA)),
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
        ),
        (b"", b"", "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"),
    ],
    ids=["case 1", "case 3"],
)
def test_hkdf_has_the_values_of_rfc_5869_appendix_a(salt: bytes, info: bytes, output: str) -> None:
    assert hkdf_sha256(b"\x0b" * 22, salt, info, 42).hex() == output
