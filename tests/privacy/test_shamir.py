"""Shamir's scheme: the threshold's shares give the secret, one share fewer gives nothing."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.scripted_rng import ScriptedRng
from thinwire.privacy.secret_rng import SystemRng
from thinwire.privacy.shamir import PRIME, SECRET_BYTES, SHARE_BYTES, combine, split

secrets = st.binary(min_size=32, max_size=32) | st.sampled_from([bytes(32), b"\xff" * 32, bytes(31) + b"\x01"])


@st.composite
def sharings(draw: st.DrawFn) -> tuple[bytes, int, list[int], dict[int, bytes]]:
    """(secret, threshold, holders, shares)"""
    holders = draw(st.lists(st.integers(1, 2**16) | st.integers(1, PRIME - 1), min_size=1, max_size=12, unique=True))
    secret, threshold = draw(secrets), draw(st.integers(1, len(holders)))
    return secret, threshold, holders, split(secret, threshold, holders, ScriptedRng(draw(st.integers(0, 2**32))))


def through(points: dict[int, int], x: int) -> int:
    """The value at x of the polynomial through the points, modulo PRIME: Lagrange's formula in its own words."""
    total = 0
    for at, value in points.items():
        for other in points:
            if other != at:
                value = value * (x - other) * pow(at - other, -1, PRIME) % PRIME
        total += value
    return total % PRIME


@given(made=sharings(), choice=st.randoms())
def test_any_threshold_of_the_shares_gives_the_secret(made, choice: random.Random) -> None:
    secret, threshold, holders, shares = made
    assert {len(share) for share in shares.values()} == {SHARE_BYTES}
    chosen = choice.sample(holders, choice.randint(threshold, len(holders)))
    assert combine({x: shares[x] for x in chosen}, threshold) == secret


def test_every_choice_of_the_threshold_gives_the_secret() -> None:
    shares = split(b"k" * 32, 3, range(1, 7), SystemRng())
    for chosen in itertools.combinations(shares, 3):
        assert combine({x: shares[x] for x in chosen}, 3) == b"k" * 32


@given(made=sharings(), other=secrets)
def test_one_share_fewer_is_consistent_with_every_secret(made, other: bytes) -> None:
    """For any threshold - 1 shares and any other secret there are shares of the other holders that give it."""
    _, threshold, holders, shares = made
    known = {x: int.from_bytes(shares[x], "big") for x in holders[: threshold - 1]}
    points = {0: int.from_bytes(other, "big"), **known}
    forged = {x: through(points, x).to_bytes(SHARE_BYTES, "big") for x in holders[threshold - 1 :]}
    for x, share in forged.items():
        assert combine({**{one: shares[one] for one in known}, x: share}, threshold) == other


@given(made=sharings())
def test_fewer_shares_than_the_threshold_are_refused(made) -> None:
    _, threshold, holders, shares = made
    with pytest.raises(ValueError, match="fewer"):
        combine({x: shares[x] for x in holders[: threshold - 1]}, threshold)
    with pytest.raises(ValueError, match="fewer"):
        combine(shares, 0)


def test_one_secret_is_shared_in_another_way_each_time() -> None:
    first, second = (split(bytes(32), 2, [1, 2, 3], SystemRng()) for _ in range(2))
    assert all(first[x] != second[x] for x in first)


def test_shares_are_spread_over_the_whole_field() -> None:
    """The highest byte is 1 for 297 of 2^256 values only, and each other byte has mean 127.5: 6 sigma are allowed."""
    drawn = [split(bytes(32), 2, [7, 9], SystemRng())[9] for _ in range(2000)]
    assert {share[0] for share in drawn} == {0}
    for place in range(1, SHARE_BYTES):
        mean = sum(share[place] for share in drawn) / len(drawn)
        assert abs(mean - 127.5) < 6 * 73.9 / len(drawn) ** 0.5


def test_a_threshold_of_one_gives_everybody_the_secret() -> None:
    assert set(split(b"x" * 32, 1, [1, 5], SystemRng()).values()) == {b"\x00" + b"x" * 32}


@pytest.mark.parametrize("secret", [b"", bytes(31), bytes(33)])
def test_a_secret_of_another_length_is_refused(secret: bytes) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        split(secret, 1, [1], SystemRng())


@pytest.mark.parametrize("threshold", [-1, 0, 4])
def test_a_threshold_that_cannot_be_met_is_refused(threshold: int) -> None:
    with pytest.raises(ValueError, match="3 holders"):
        split(bytes(32), threshold, [1, 2, 3], SystemRng())


@pytest.mark.parametrize(("holders", "why"), [([0, 1], "0 is not"), ([-1, 1], "-1 is not"), ([2, 2], "two holders")])
def test_a_holder_without_a_place_of_its_own_is_refused(holders: list[int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        split(bytes(32), 2, holders, SystemRng())


@pytest.mark.parametrize("x", [PRIME, PRIME + 1])
def test_a_second_name_of_a_place_is_refused(x: int) -> None:
    with pytest.raises(ValueError, match="begin at 1"):
        split(bytes(32), 2, [1, x], SystemRng())
    with pytest.raises(ValueError, match="begin at 1"):
        combine({x: bytes(SHARE_BYTES), 1: bytes(SHARE_BYTES)}, 2)


def test_the_secret_itself_is_no_share() -> None:
    with pytest.raises(ValueError, match="0 is not"):
        combine({0: bytes(SHARE_BYTES), 1: bytes(SHARE_BYTES)}, 2)


@pytest.mark.parametrize(
    "share", [b"", bytes(32), bytes(34), PRIME.to_bytes(33, "big"), (PRIME + 1).to_bytes(33, "big"), b"\xff" * 33]
)
def test_a_share_outside_the_field_is_refused(share: bytes) -> None:
    with pytest.raises(ValueError, match="33 bytes"):
        combine({1: bytes(SHARE_BYTES), 2: share}, 2)
    with pytest.raises(ValueError, match="33 bytes"):  # also where it is not needed
        combine({1: bytes(SHARE_BYTES), 2: bytes(SHARE_BYTES), 3: share}, 2)


def test_shares_that_give_more_than_32_bytes_are_refused() -> None:
    points = {0: 2**256, 1: 5}
    with pytest.raises(ValueError, match="not those of one secret"):
        combine({1: (5).to_bytes(33, "big"), 2: through(points, 2).to_bytes(33, "big")}, 2)
    largest = {0: 2**256 - 1, 1: 5}
    assert combine({1: (5).to_bytes(33, "big"), 2: through(largest, 2).to_bytes(33, "big")}, 2) == b"\xff" * 32


def is_probably_prime(n: int, rounds: int = 40) -> bool:
    """Miller and Rabin: a composite passes with probability 4^-rounds."""
    odd, twos, rng = n - 1, 0, random.Random(1)
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for _ in range(rounds):
        x = pow(rng.randrange(2, n - 1), odd, n)
        if x not in (1, n - 1) and not any((x := x * x % n) == n - 1 for _ in range(twos - 1)):
            return False
    return True


def test_the_field_is_the_smallest_prime_above_every_secret() -> None:
    assert is_probably_prime(PRIME)
    assert [n for n in range(2**256, PRIME) if n % 2 and is_probably_prime(n, 4)] == []
    assert not is_probably_prime(561)  # a Carmichael number
    assert PRIME > 2 ** (8 * SECRET_BYTES)
    assert PRIME <= 2 ** (8 * SHARE_BYTES)


def test_both_secrets_of_a_client_are_shared_among_a_hundred_in_time() -> None:
    """Its figure is printed; the bound is far off, because tests share the machine."""
    began = time.perf_counter()
    made = [split(bytes(32), 51, range(1, 101), SystemRng()) for _ in range(2)]
    halfway = time.perf_counter()
    for shares in made:
        combine(shares, 51)
    print(f"n = 100, t = 51, two secrets: split {halfway - began:.4f} s, combine {time.perf_counter() - halfway:.4f} s")
    assert halfway - began < 5
