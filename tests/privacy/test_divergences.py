"""Costs are not below the exact Renyi divergences, summed over the integers, and are those of the papers."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ive

from thinwire.privacy.accounting import ORDERS, Release

ALPHA = np.array(ORDERS, dtype=float)
SMALL = [2, 3, 4, 8, 16]  # orders whose divergence is summed over the integers
REACH = 700


@lru_cache
def log_pmf(distribution: str, variance: float, parties: int = 1):
    """Return the logarithms of the noise's probabilities at -REACH ... REACH, -inf where a float64 has none."""
    k = np.arange(-REACH, REACH + 1)
    with np.errstate(divide="ignore"):
        if distribution == "skellam":
            return np.log(ive(np.abs(k), variance))  # e^-mu I_k(mu): its variance is mu
        one = np.exp(-k * k / (2 * variance / parties))
        one, made = one / one.sum(), one / one.sum()
        for _ in range(parties - 1):
            made = np.convolve(made, one)[REACH : 3 * REACH + 1]
        return np.log(made)


def divergence(p, q, alpha: int) -> float:
    both = np.isfinite(p) & np.isfinite(q) & (p > -600) & (q > -600)
    terms = alpha * p[both] - (alpha - 1) * q[both]
    assert max(terms[0], terms[-1]) < terms.max() - 40  # nothing that counts was cut off
    return float(np.logaddexp.reduce(terms)) / (alpha - 1)


def exact(distribution: str, variance: float, shift: int, alpha: int, rate: float = 1.0, parties: int = 1) -> float:
    """Return the larger of both directions of the divergence between the noise and its Poisson sampled shift."""
    noise = log_pmf(distribution, variance, parties)
    shifted = np.concatenate([np.full(shift, -np.inf), noise[:-shift]])
    with np.errstate(divide="ignore"):
        mixed = np.logaddexp(np.log(1 - rate) + noise, math.log(rate) + shifted) if rate < 1 else shifted
    return max(divergence(mixed, noise, alpha), divergence(noise, mixed, alpha))


def bound(alpha: int, release: Release) -> float:
    return float(release.rdp()[ORDERS.index(alpha)])


def test_the_variance_of_skellam_noise_is_mu():
    k = np.arange(-REACH, REACH + 1)
    assert np.sum(k * k * np.exp(log_pmf("skellam", 9.0))) == pytest.approx(9.0)


@pytest.mark.parametrize("alpha", SMALL)
@pytest.mark.parametrize("shift", [1, 3])
@pytest.mark.parametrize("variance", [1.0, 9.0, 60.0])
def test_skellam_costs_a_little_more_than_its_exact_divergence(variance, shift, alpha):
    found = bound(alpha, Release("skellam", shift, variance, 1))
    value = exact("skellam", variance, shift, alpha)
    assert value <= found * (1 + 1e-12)
    if variance >= 60:
        assert found <= 1.16 * value


def test_skellam_in_several_dimensions_is_above_the_sum_over_the_coordinates():
    for shifts in ([2, 1, 1], [3], [1] * 9):
        length = math.sqrt(sum(each * each for each in shifts))
        for alpha in SMALL:
            value = sum(exact("skellam", 60.0, each, alpha) for each in shifts)
            assert value <= bound(alpha, Release("skellam", length, 60.0, len(shifts))) <= 1.5 * value


@pytest.mark.parametrize("alpha", SMALL)
def test_skellam_is_the_theorem_of_agarwal_kairouz_and_liu(alpha):
    """Thm 3.5 as the authors' program has it (google-research/federated, distributed_dp) with scale 1."""
    d2, mu, d = 40.0, 900.0, 10**6
    d1 = min(d2 * d2, math.sqrt(d) * d2)
    second = min(((2 * alpha - 1) * d2**2 + 6 * d1) / (4 * mu**2), 3 * d1 / (2 * mu))
    assert bound(alpha, Release("skellam", d2, mu, d)) == pytest.approx(alpha / (2 * mu) * d2**2 + second, rel=1e-12)


@pytest.mark.parametrize("alpha", SMALL)
@pytest.mark.parametrize("variance", [2.0, 30.0])
def test_a_discrete_gaussian_costs_its_exact_divergence(variance, alpha):
    for shift in (1, 2):
        value = exact("discrete-gaussian", variance, shift, alpha)
        assert bound(alpha, Release("discrete-gaussian", shift, variance, 1)) == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("alpha", SMALL)
@pytest.mark.parametrize("parties", [2, 3, 10])
@pytest.mark.parametrize("sigma", [0.5, 0.6, 1.0, 2.0])
def test_a_sum_of_discrete_gaussians_costs_at_least_its_exact_divergence(sigma, parties, alpha):
    variance = parties * sigma**2
    value = exact("discrete-gaussian", variance, 1, alpha, parties=parties)
    found = bound(alpha, Release("discrete-gaussian-sum", 1, variance, 1, parties))
    assert value <= found * (1 + 1e-9)
    if sigma == 2:
        assert found == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("parties", [1, 2, 50])
@pytest.mark.parametrize("sigma", [0.5, 0.8, 1.5])
def test_a_sum_of_discrete_gaussians_is_not_below_either_form_of_the_published_bound(sigma, parties):
    """Kairouz, Liu, Steinke 2021: Thm 1 (concentrated), and the form of the authors' program, which names Prop. 14."""
    d2, d = 3.0, 64
    tau = 10 * sum(math.exp(-2 * math.pi**2 * sigma**2 * k / (k + 1)) for k in range(1, parties))
    concentrated = min(
        math.sqrt(d2**2 / (parties * sigma**2) + tau * d / 2), d2 / (math.sqrt(parties) * sigma) + tau * math.sqrt(d)
    )
    program = np.minimum(
        ALPHA / 2 * d2**2 / (parties * sigma**2) + tau * d,
        ALPHA / 2 * (d2 / (math.sqrt(parties) * sigma) + math.sqrt(d) * tau) ** 2,
    )
    found = Release("discrete-gaussian-sum", d2, parties * sigma**2, d, parties).rdp()
    published = np.maximum(ALPHA * concentrated**2 / 2, program)
    assert np.allclose(found, published, rtol=1e-12)


def test_a_sum_of_too_little_noise_each_claims_nothing():
    assert np.all(np.isinf(Release("discrete-gaussian-sum", 1, 10 * 0.24, 1, 10).rdp()))


@pytest.mark.parametrize("alpha", SMALL)
@pytest.mark.parametrize("rate", [0.01, 0.3, 0.9])
@pytest.mark.parametrize(
    ("distribution", "variance"), [("discrete-gaussian", 2.0), ("skellam", 9.0), ("skellam", 60.0)]
)
def test_a_sampled_release_costs_at_least_both_directions_of_its_mixture(distribution, variance, rate, alpha):
    found = bound(alpha, Release(distribution, 1, variance, 1, rate=rate))
    value = exact(distribution, variance, 1, alpha, rate)
    assert value <= found * (1 + 1e-9)
    if distribution == "discrete-gaussian":
        assert found == pytest.approx(value, rel=1e-8)
    elif variance == 60:
        assert found <= 1.15 * value


@given(st.floats(1e-6, 30), st.floats(1e-3, 0.999), st.floats(1, 40))
def test_symmetric_noise_has_its_larger_divergence_from_the_mixture_to_the_noise(log_ratio, rate, alpha):
    """Mironov, Talwar, Zhang 2019, Thm 5, for a pair of outputs that the reflection x -> v - x swaps, P / Q = L, 1 / L.

    E_Q[(M / Q)^alpha - (M / Q)^(1 - alpha)] is a mean over such pairs, and no pair makes it negative.
    """
    ratio = math.exp(log_ratio)
    one, other = 1 - rate + rate * ratio, 1 - rate + rate / ratio
    log_terms = [alpha * math.log(one), log_ratio + alpha * math.log(other)]
    subtracted = [(1 - alpha) * math.log(one), log_ratio + (1 - alpha) * math.log(other)]
    assert np.logaddexp(*log_terms) >= np.logaddexp(*subtracted) - 1e-12


@pytest.mark.parametrize("rate", [1e-4, 0.01, 0.3])
@pytest.mark.parametrize("distribution", ["discrete-gaussian", "skellam"])
def test_sampling_costs_at_most_the_general_bound_of_zhu_and_wang(distribution, rate):
    """Zhu and Wang 2019, Thm 5, for noise that need not be symmetric: terms from the third on count three times."""
    rdp = Release(distribution, 1, 4, 1).rdp()
    found = Release(distribution, 1, 4, 1, rate=rate).rdp()
    for alpha in range(2, 33):
        terms = [math.comb(alpha, k) * (1 - rate) ** (alpha - k) * rate**k for k in range(alpha + 1)]
        total = terms[0] + terms[1] + terms[2] * math.exp(rdp[0])
        total += sum(3 * terms[k] * math.exp((k - 1) * rdp[k - 2]) for k in range(3, alpha + 1))
        assert found[alpha - 2] <= math.log(total) / (alpha - 1) * (1 + 1e-6)


@pytest.mark.parametrize(("rate", "z"), [(0.01, 4.0), (0.001, 0.7), (0.3, 2.0), (0.9, 10.0)])
def test_the_sampled_bound_is_the_exact_value_of_a_gaussian_at_every_order(rate, z):
    library = Release("gaussian", 1, z * z, 1, rate=rate).rdp()
    assert np.allclose(Release("discrete-gaussian", 1, z * z, 1, rate=rate).rdp(), library, rtol=1e-6)
