"""Shamir's secret sharing of 32-byte secrets: any `threshold` shares give the secret, fewer say nothing about it.

Shamir (1979), "How to Share a Secret". The field is the integers modulo the smallest prime above 2^256. A share is one
value of a random polynomial of degree threshold - 1 whose value at 0 is the secret.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from thinwire.core.prng import SecretRng

PRIME = 2**256 + 297
SECRET_BYTES = 32
SHARE_BYTES = 33
DRAWN_BYTES = 64  # of a coefficient: 512 bits modulo PRIME are uniform but for 2^-256


def split(secret: bytes, threshold: int, holders: Sequence[int], rng: SecretRng) -> dict[int, bytes]:
    """Return a share of 33 bytes, big-endian, for each holder: the polynomial's value at the holder's number.

    Holders are distinct numbers from 1 on. Raises ValueError unless the secret has 32 bytes, and the threshold is at
    least 1 and at most the number of holders.

    Invariant: any `threshold` shares give the secret by `combine`; for fewer, each secret is as likely as every other.
    No branch depends on a secret. Python's integers are not constant in time: see the threat model.

    >>> from thinwire.privacy.secret_rng import SystemRng
    >>> shares = split(b"s" * 32, 2, [1, 2, 3], SystemRng())
    >>> combine({1: shares[1], 3: shares[3]}, 2) == b"s" * 32
    True
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes, not {len(secret)}")
    if not 1 <= threshold <= len(holders):
        raise ValueError(f"a threshold of {threshold} is not between 1 and the {len(holders)} holders")
    _require_holders(holders)
    if len(set(holders)) != len(holders):
        raise ValueError("two holders have one number: they would have one share")
    drawn = rng.random_bytes(DRAWN_BYTES * (threshold - 1))
    coefficients = [
        int.from_bytes(drawn[at : at + DRAWN_BYTES], "big") % PRIME for at in range(0, len(drawn), DRAWN_BYTES)
    ]
    coefficients.append(int.from_bytes(secret, "big"))  # of degree 0, the last one in Horner's order
    return {x: _value(coefficients, x).to_bytes(SHARE_BYTES, "big") for x in holders}


def combine(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Return the secret of 32 bytes that the shares of the `threshold` lowest holders determine.

    Raises ValueError for fewer shares than the threshold, a holder's number below 1, a share that is not 33 bytes or
    not less than `PRIME`, and shares whose value at 0 has more than 32 bytes. Other wrong shares give another secret:
    the caller compares each share with its commitment before, and the secret with what is derived from it after.
    """
    if not 1 <= threshold <= len(shares):
        raise ValueError(f"{len(shares)} shares are fewer than the {threshold} that give a secret")
    _require_holders(list(shares))
    for share in shares.values():
        if len(share) != SHARE_BYTES or int.from_bytes(share, "big") >= PRIME:
            raise ValueError(f"a share is {SHARE_BYTES} bytes, and less than 2^256 + 297")
    holders = tuple(sorted(shares)[:threshold])
    weights = zip(holders, _at_zero(holders), strict=True)
    secret = sum(int.from_bytes(shares[x], "big") * weight for x, weight in weights)
    try:
        return (secret % PRIME).to_bytes(SECRET_BYTES, "big")
    except OverflowError:
        raise ValueError("these shares are not those of one secret of 32 bytes") from None


@lru_cache(maxsize=16)
def _at_zero(holders: tuple[int, ...]) -> tuple[int, ...]:
    """Return Lagrange's polynomials at 0, one a holder; in a complete graph all secrets of a round have the same."""
    found = list[int]()
    for x in holders:
        above = below = 1
        for other in holders:
            if other != x:
                above = above * other % PRIME
                below = below * (other - x) % PRIME
        found.append(above * pow(below, -1, PRIME))
    return tuple(found)


def _value(coefficients: Sequence[int], x: int) -> int:
    total = 0
    for coefficient in coefficients:
        total = (total * x + coefficient) % PRIME
    return total


def _require_holders(holders: Sequence[int]) -> None:
    for x in holders:
        if not 1 <= x < PRIME:  # at 0 stands the secret, and PRIME is another name of 0
            raise ValueError(f"{x} is not the number of a holder: they begin at 1")
