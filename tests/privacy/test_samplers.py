"""Samplers: tables against exact probabilities, draws against statistics that see one percent, kernels, failures."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chi2

from thinwire.compression import native
from thinwire.core.errors import ThinwireError, UsageError
from thinwire.privacy.samplers import MAX_VARIANCE, MIN_VARIANCE, ExactSampler, TableSampler
from thinwire.privacy.secret_rng import CHUNK, SystemRng

GAUSSIAN, SKELLAM = TableSampler.discrete_gaussian, TableSampler.skellam
KINDS = (GAUSSIAN, SKELLAM)
FULL = 1 << 127
DRAWS = 10**7
mpmath.mp.prec = 400


@pytest.fixture(params=native.available())
def path(request):
    with native.using(request.param):
        yield request.param


def thresholds_of(sampler: TableSampler) -> list[int]:
    pairs = zip(sampler.thresholds.tolist(), sampler.lower.tolist(), strict=True)
    return [upper << 64 | lower for upper, lower in pairs]


def magnitudes_of(sampler: TableSampler) -> list[Fraction]:
    """The exact probabilities of |X| = 0, 1, .. in the table."""
    return [Fraction(b - a, FULL) for a, b in itertools.pairwise([0, *thresholds_of(sampler)])]


def ideal(kind: object, variance: float, count: int) -> list[mpmath.mpf]:
    """The probabilities of |X| = 0 .. count - 1, from mpmath's own functions."""
    v, ks = mpmath.mpf(variance), range(count)
    if kind == GAUSSIAN:
        mass = mpmath.jtheta(3, 0, mpmath.exp(-1 / (2 * v)))
        one = [mpmath.exp(-(mpmath.mpf(k) ** 2) / (2 * v)) / mass for k in ks]
    else:
        one = [mpmath.exp(-v) * mpmath.besseli(k, v) for k in ks]
    return [one[0], *(2 * each for each in one[1:])]


def distance(sampler: TableSampler, expected: list[mpmath.mpf]) -> mpmath.mpf:
    """The statistical distance of the table from these probabilities, and what they leave to larger magnitudes."""
    found = [mpmath.mpf(p.numerator) / p.denominator for p in magnitudes_of(sampler)]
    found += [mpmath.mpf(0)] * (len(expected) - len(found))
    return (sum(abs(a - b) for a, b in zip(found, expected, strict=True)) + abs(1 - sum(expected))) / 2


# Tables


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variance", [MIN_VARIANCE, 0.07, 0.25, 1.0, 2.5, 10.1, 100.0])
def test_the_table_is_as_near_to_the_distribution_as_it_says(kind, variance: float) -> None:
    sampler = kind(variance)
    count = len(sampler.thresholds) + 60
    assert distance(sampler, ideal(kind, variance, count)) <= sampler.distance <= 2.0**-115
    nearly = math.nextafter(variance, 1e9)
    assert distance(sampler, ideal(kind, nearly, count)) > sampler.distance or variance == MIN_VARIANCE


@pytest.mark.parametrize(("kind", "variance"), [(GAUSSIAN, 4096.0**2 + 1 / 3), (SKELLAM, 2.0**32)])
def test_a_large_table_is_right_at_some_magnitudes(kind, variance: float) -> None:
    sampler = kind(variance)
    found, sigma = thresholds_of(sampler), math.isqrt(int(variance))
    assert found == sorted(found)
    assert found[-1] == FULL
    v, mass = mpmath.mpf(variance), mpmath.sqrt(2 * mpmath.pi * mpmath.mpf(variance))
    for k in (1, 7, sigma // 3, sigma, 3 * sigma, 6 * sigma):
        one = mpmath.exp(-v) * mpmath.besseli(k, v) if kind == SKELLAM else mpmath.exp(-k * k / (2 * v)) / mass
        assert abs(mpmath.mpf(found[k] - found[k - 1]) / FULL - 2 * one) < 2 * sampler.distance
    # The sum, coordinates * rounds * clients * distance, is far below any delta.
    assert 2**25 * 10_000 * 10_000 * sampler.distance < 1e-17


GOLDEN = {
    (GAUSSIAN, 0.25): "a6e8a45b71df9bd108dea87ba09ba069910025e4f8034ce5b58553c73e962940",
    (GAUSSIAN, 256.0): "9304ed6d8ef574d2c9d217f599b1cc70f2ff17eafee4d78c627500b75a13ee1d",
    (GAUSSIAN, 123456.789): "6c78fb2b6016bf56087365ea57c02c919435736f9097e8cc14201ec5a48184bf",
    (SKELLAM, 0.25): "83d1ecd4dc12ffc356e5bf7bdbb376602f15d5a96b3bf97074c79d2b49cf4824",
    (SKELLAM, 256.0): "a4343dfc3f53cdd666db1770ed71852a623433b6499ccad281875ede4d8c3eb5",
    (SKELLAM, 123456.789): "7bb3ecb8bb03a47edde6c1867d6fc8d16f842e8578065e177320d6bc5db7b806",
}


@pytest.mark.parametrize(("kind", "variance"), GOLDEN)
def test_both_ends_make_the_same_table(kind, variance: float) -> None:
    assert kind(variance).digest == kind(variance).digest == GOLDEN[kind, variance]


def test_another_variance_has_another_digest() -> None:
    variances = [100.0, math.nextafter(100.0, 0), math.nextafter(100.0, 200)]
    assert len({kind(variance).digest for kind in KINDS for variance in variances}) == 6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variance", [0.0, -1.0, -0.0, math.nan, math.inf, -math.inf, 1e-300, 2 * MAX_VARIANCE])
def test_an_absurd_variance_is_refused(kind, variance: float) -> None:
    with pytest.raises(UsageError, match="is not supported"):
        kind(variance)


def test_a_table_is_read_only() -> None:
    sampler = GAUSSIAN(4.0)
    for array in (sampler.thresholds, sampler.lower, sampler.guide):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


# Draws, word by word


class Words:
    """A `SecretRng` that gives these 64-bit words, and fails after the last one."""

    def __init__(self, words: Iterable[int]) -> None:
        self.left = np.array(list(words), np.uint64).tobytes()

    def random_bytes(self, count: int) -> bytes:
        raise AssertionError("noise comes from fill")

    def fill(self, out: NDArray[np.uint8] | NDArray[np.uint32]) -> None:
        if len(self.left) < out.nbytes:
            raise OSError("no entropy")
        out[:] = np.frombuffer(self.left[: out.nbytes], np.uint8)
        self.left = self.left[out.nbytes :]


def drawn(sampler: TableSampler, words: Iterable[int], count: int) -> list[int]:
    out, rng = np.full(count, 77, np.int32), Words(words)
    sampler.fill(out, rng)
    assert rng.left == b""
    return out.tolist()


def by_definition(thresholds: list[int], first: int, second: int = 0) -> int:
    magnitude = bisect.bisect_right(thresholds, (first >> 1) << 64 | second)
    return -magnitude if first & 1 else magnitude


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variance", [MIN_VARIANCE, 0.3, 5.0, 70_000.0])
def test_a_draw_is_the_number_of_thresholds_that_are_not_above_its_position(kind, variance: float, path: str) -> None:
    sampler = kind(variance)
    thresholds, uppers = thresholds_of(sampler), sampler.thresholds.tolist()
    near = {upper + off for upper in uppers for off in (-2, -1, 1, 2)} - set(uppers)
    words = [2 * position + sign for position in sorted(near) if 0 <= position < 1 << 63 for sign in (0, 1)]
    words += [0, 1, *np.random.default_rng(1).integers(0, 2**64, 3000, np.uint64).tolist()]
    assert drawn(sampler, words, len(words)) == [by_definition(thresholds, word) for word in words]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variance", [0.3, 5.0, 300.0])
def test_a_second_word_decides_where_the_first_equals_a_threshold(kind, variance: float, path: str) -> None:
    sampler, other, decided = kind(variance), 1234567, set()
    thresholds = thresholds_of(sampler)
    for place, threshold in enumerate(thresholds[:-1]):
        for second in {max(0, threshold % 2**64 - 1), threshold % 2**64, 0, 2**64 - 1}:
            first = 2 * (threshold >> 64) + second % 2
            expected = [by_definition(thresholds, word, second) for word in (other, first, other, first)]
            # The four first words are drawn together, a second word when it is needed.
            assert drawn(sampler, [other, first, other, first, second, second], 4) == expected
            decided.add(abs(expected[1]) > place)
    assert decided == {False, True}


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), variance=st.floats(MIN_VARIANCE, 1e4), count=st.integers(0, 3000), data=st.data())
def test_every_path_draws_the_same_from_the_same_words(seed: int, variance: float, count: int, data) -> None:
    sampler = data.draw(st.sampled_from(KINDS))(variance)
    words = np.random.default_rng(seed).integers(0, 2**64, count, np.uint64)
    if count:
        places = data.draw(st.lists(st.integers(0, count - 1), max_size=3))
        words[places] = 2 * sampler.thresholds[: len(places)] + np.uint64(seed % 2)

    def found() -> tuple[int, bytes]:
        out = np.full(count, 77, np.int32)
        return sampler._draw(words, out), out.tobytes()

    with native.using("numpy"):
        expected = found()
    for here in native.available():
        with native.using(here):
            assert found() == expected, here


def test_nothing_is_written_outside_of_the_array(path: str) -> None:
    around = np.full((3, 5000), 77, np.int32)
    SKELLAM(1e6).fill(around[1], SystemRng())
    assert (around[[0, 2]] == 77).all()
    assert (around[1] == 77).mean() < 0.01


def test_arrays_of_every_shape_and_size_are_overwritten_whole(path: str) -> None:
    sampler = SKELLAM(1e8)
    for shape in [(0,), (1,), (CHUNK // 8,), (CHUNK // 8 + 1,), (3, 7000), ()]:
        out = np.full(shape, 2**30, np.int32)
        sampler.fill(out, SystemRng())
        assert (abs(out) < 2**20).all()


@pytest.mark.parametrize(
    "out", [np.zeros(4, np.int64), np.zeros(4, np.uint32), np.zeros(8, np.int32)[::2], np.zeros((3, 2), np.int32).T,
            np.frombuffer(bytes(16), np.int32), np.frombuffer(bytearray(17), np.uint8)[1:].view(np.int32)],
)  # fmt: skip
def test_an_array_that_does_not_hold_draws_is_refused(out: NDArray) -> None:
    with pytest.raises(ValueError, match="contiguous array of int32"):
        GAUSSIAN(4.0).fill(out, SystemRng())
    assert not out.any()


# Failures of the entropy source


@pytest.mark.parametrize("draw", [lambda rng: GAUSSIAN(4.0).fill(np.zeros(9, np.int32), rng),
                                  lambda rng: ExactSampler(rng).discrete_gaussian(4.0)])  # fmt: skip
def test_a_system_without_entropy_is_an_error_and_nothing_is_drawn(draw: Callable, monkeypatch) -> None:
    def fail(count: int) -> bytes:
        raise OSError("no entropy")

    monkeypatch.setattr("os.urandom", fail)
    with pytest.raises(ThinwireError, match="gives no random bytes.*no entropy"):
        draw(SystemRng())


def test_an_error_within_an_array_is_raised_and_what_is_there_are_whole_draws(path: str) -> None:
    sampler, count = SKELLAM(1e6), CHUNK // 8
    out, words = np.full(2 * count, 2**30, np.int32), np.random.default_rng(1).integers(0, 2**64, count, np.uint64)
    with pytest.raises(OSError, match="no entropy"):
        sampler.fill(out, Words(words.tolist()))
    assert (out[count:] == 2**30).all()
    assert out[:3].tolist() == [by_definition(thresholds_of(sampler), word) for word in words[:3].tolist()]


def test_an_error_at_a_second_word_leaves_its_draw_and_those_after_it_unchanged(path: str) -> None:
    sampler = SKELLAM(300.0)
    out = np.full(3, 77, np.int32)
    with pytest.raises(OSError, match="no entropy"):
        sampler.fill(out, Words([0, 2 * int(sampler.thresholds[5]), 0]))
    assert out.tolist() == [0, 77, 77]


# Statistics, of draws that are new in each run. Sound draws fail one of them less than once in 10^9 runs: the level of
# chi-square is 10^-10, because the counts of a class, at least 400, are only nearly normal that far out.
CHI_LEVEL, KOLMOGOROV_LEVEL, LEAST = 1e-10, 1e-9, 400


def counted(draws: NDArray[np.int32], sampler: TableSampler) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """How often each value was drawn, from the least to the largest of the table, and its probability."""
    thresholds = thresholds_of(sampler)
    zero, *rest = (float(b - a) / FULL for a, b in itertools.pairwise([0, *thresholds]))
    half, reach = np.array(rest) / 2, len(rest)
    counts = np.bincount(draws.astype(np.int64) + reach, minlength=2 * reach + 1)
    return counts, np.concatenate([half[::-1], [zero], half])


def looks_drawn_from(draws: NDArray[np.int32], sampler: TableSampler) -> bool:
    """Chi-square over classes of neighbouring values that have 1/40 of the probability, and are expected 400 times."""
    counts, chances = counted(draws, sampler)
    edges, left = [0], 0.0
    for value, chance in enumerate(chances.tolist()):
        left += chance
        if left >= max(LEAST / draws.size, 1 / 40):
            edges.append(value + 1)
            left = 0.0
    classes = edges[:-2]  # the values behind the last whole class belong to it
    assert len(classes) > 1
    seen, expected = np.add.reduceat(counts, classes), draws.size * np.add.reduceat(chances, classes)
    return bool(((seen - expected) ** 2 / expected).sum() < chi2.isf(CHI_LEVEL, len(classes) - 1))


def furthest(draws: NDArray[np.int32], sampler: TableSampler) -> float:
    """The Kolmogorov-Smirnov statistic: the largest difference of the distribution functions."""
    counts, chances = counted(draws, sampler)
    return float(np.abs(np.cumsum(counts) / draws.size - np.cumsum(chances)).max())


def looks_distributed_like(draws: NDArray[np.int32], sampler: TableSampler) -> bool:
    """By the bound of Dvoretzky, Kiefer and Wolfowitz, which holds for whole numbers too."""
    return furthest(draws, sampler) < math.sqrt(math.log(2 / KOLMOGOROV_LEVEL) / (2 * draws.size))


def many(sampler: TableSampler, count: int) -> NDArray[np.int32]:
    out = np.empty(count, np.int32)
    sampler.fill(out, SystemRng())
    return out


@pytest.mark.parametrize(
    ("kind", "sigma"), [*itertools.product(KINDS, (0.8, 4096.0)), (GAUSSIAN, 3.0), (SKELLAM, 16.0), (GAUSSIAN, 256.0)]
)
def test_chi_square_and_kolmogorov_smirnov_of_ten_million_draws(kind, sigma: float) -> None:
    draws = many(kind(sigma**2), DRAWS)
    assert looks_drawn_from(draws, kind(sigma**2))
    assert looks_distributed_like(draws, kind(sigma**2))


@pytest.mark.parametrize(
    ("kind", "sigma", "off"),
    [(GAUSSIAN, 3.0, 0.99), (GAUSSIAN, 4096.0, 1.01), (SKELLAM, 3.0, 1.01), (SKELLAM, 4096.0, 0.99)],
)
def test_both_tests_see_a_standard_deviation_that_is_off_by_one_percent(kind, sigma: float, off: float) -> None:
    right = kind(sigma**2)
    draws = many(kind((off * sigma) ** 2), DRAWS)
    assert not looks_drawn_from(draws, right)
    assert not looks_distributed_like(draws, right)


def test_the_tests_see_draws_that_are_shifted_by_half_and_those_of_the_other_kind() -> None:
    gaussian, skellam = GAUSSIAN(9.0), SKELLAM(9.0)
    assert not looks_drawn_from(many(skellam, DRAWS), gaussian)
    draws = many(gaussian, DRAWS)
    draws[::2] += 1
    assert not looks_drawn_from(draws, gaussian)
    assert not looks_distributed_like(draws, gaussian)


def test_neighbouring_draws_are_not_correlated() -> None:
    draws = many(GAUSSIAN(256.0**2), DRAWS).astype(np.float64) / 256
    for lag in (1, 2, 3, CHUNK // 8):
        assert abs((draws[lag:] * draws[:-lag]).mean()) < 2e-3  # six standard errors


def test_a_sum_of_skellam_draws_is_a_skellam_draw_of_the_sum_of_the_variances() -> None:
    total = np.zeros(DRAWS, np.int32)
    for variance in (0.5, 1.5, 3.0, 4.0):
        total += many(SKELLAM(variance), DRAWS)
    assert looks_drawn_from(total, SKELLAM(9.0))
    assert looks_distributed_like(total, SKELLAM(9.0))


def test_the_convolution_of_two_skellam_tables_is_the_table_of_the_sum() -> None:
    one, other, both = SKELLAM(2.5), SKELLAM(4.75), SKELLAM(7.25)

    def two_sided(sampler: TableSampler) -> list[Fraction]:
        zero, *rest = magnitudes_of(sampler)
        return [*(p / 2 for p in reversed(rest)), zero, *(p / 2 for p in rest)]

    a, b = two_sided(one), two_sided(other)
    sums = [Fraction(0)] * (len(a) + len(b) - 1)
    for (i, p), (j, q) in itertools.product(enumerate(a), enumerate(b)):
        sums[i + j] += p * q
    wanted, middle = two_sided(both), len(sums) // 2
    reach = len(wanted) // 2
    off = sum(abs(p - q) for p, q in zip(sums[middle - reach : middle + reach + 1], wanted, strict=True))
    left = sum(sums[: middle - reach]) + sum(sums[middle + reach + 1 :])
    assert (off + left) / 2 <= one.distance + other.distance + both.distance


# The oracle


@pytest.mark.parametrize("variance", [0.25, 2.0, 30.5])
def test_the_exact_discrete_gaussian_draws_what_the_table_draws(variance: float) -> None:
    oracle = ExactSampler(SystemRng())
    draws = np.array([oracle.discrete_gaussian(variance) for _ in range(20_000)], np.int32)
    assert looks_drawn_from(draws, GAUSSIAN(variance))
    assert not looks_drawn_from(draws, GAUSSIAN(1.3 * variance))


@pytest.mark.parametrize("variance", [0.25, 2.0, 9.5])
def test_the_exact_skellam_draws_what_the_table_draws(variance: float) -> None:
    oracle = ExactSampler(SystemRng())
    draws = np.array([oracle.skellam(variance) for _ in range(20_000)], np.int32)
    assert looks_drawn_from(draws, SKELLAM(variance))
    assert not looks_drawn_from(draws, SKELLAM(1.3 * variance))


def test_an_exact_poisson_draw_has_the_probabilities_of_poisson() -> None:
    oracle, mean, count = ExactSampler(SystemRng()), Fraction(7, 3), 20_000
    seen = np.bincount([min(oracle.poisson(mean), 6) for _ in range(count)], minlength=7)
    chances = [math.exp(-float(mean)) * float(mean) ** k / math.factorial(k) for k in range(6)]
    expected = count * np.array([*chances, 1 - sum(chances)])
    assert ((seen - expected) ** 2 / expected).sum() < chi2.isf(CHI_LEVEL, 6)
