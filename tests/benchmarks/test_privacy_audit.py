"""`benchmarks.privacy_audit` can fail: it refutes sums without noise, and no claim of a known Gaussian."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest

from benchmarks.audited_run import attacked_run
from benchmarks.one_run_audit import lower_bound, probability_of_luck, right_guesses
from benchmarks.privacy_audit import DELTA, EPSILON, NAMES, figures
from tests.support.benchmark_document import document_of

ROOT = Path(__file__).parents[2]


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """The exact epsilon of one Gaussian: Balle and Wang 2018, theorem 8."""
    phi, low, high = NormalDist().cdf, 0.0, 100.0
    for _ in range(100):
        epsilon = (low + high) / 2
        shift = epsilon * noise_multiplier
        left = phi(1 / (2 * noise_multiplier) - shift) - math.exp(epsilon) * phi(-1 / (2 * noise_multiplier) - shift)
        low, high = (epsilon, high) if left > delta else (low, epsilon)
    return high


def test_without_delta_the_bound_is_that_of_clopper_and_pearson() -> None:
    for guesses, right in ((20, 20), (100, 80)):
        q = 1 / (1 + math.exp(-lower_bound(10**5, guesses, right, 0.0)))
        tail = sum(math.comb(guesses, k) * q**k * (1 - q) ** (guesses - k) for k in range(right, guesses + 1))
        assert tail == pytest.approx(0.05, rel=1e-6)


def test_luck_grows_with_epsilon_with_delta_and_with_the_canaries() -> None:
    base = probability_of_luck(1000, 200, 130, 0.3, 1e-5)
    assert base < probability_of_luck(1000, 200, 130, 0.4, 1e-5)
    assert base < probability_of_luck(1000, 200, 130, 0.3, 1e-4)
    assert base < probability_of_luck(9000, 200, 130, 0.3, 1e-5)
    assert base > probability_of_luck(1000, 200, 131, 0.3, 1e-5)
    assert lower_bound(1000, 200, 80, 1e-5) == 0.0


@pytest.mark.parametrize("noise", [0.5, 1.5, 4.0])
def test_the_bound_of_a_known_gaussian_is_below_its_epsilon_and_not_far_below(noise: float) -> None:
    rng, canaries, delta = np.random.default_rng(7), 100_000, 1e-6
    exact, found = gaussian_epsilon(noise, delta), []
    for _ in range(20):
        included = rng.random(canaries) < 0.5
        scores = included + noise * rng.standard_normal(canaries)
        found.append(lower_bound(canaries, 500, right_guesses(scores, included, 500), delta))
    assert max(found) < exact
    assert np.mean(found) > 0.4 * exact


def test_guesses_are_even_and_about_canaries_that_there_are() -> None:
    scores, included = np.arange(4.0), np.array([False, True, False, True])
    assert right_guesses(scores, included, 2) == 2
    assert right_guesses(scores, included, 4) == 2
    for guesses in (0, 3, 6):
        with pytest.raises(ValueError, match="guesses about 4 canaries"):
            right_guesses(scores, included, guesses)


def test_the_audit_refutes_the_claim_with_the_noise_off_and_not_with_it() -> None:
    made = document_of("privacy_audit")
    found = made["figures"]
    assert (made["benchmark"], made["preset"], len(made["rows"])) == ("privacy_audit", "tiny", 9)
    assert found["claimed_epsilon"] == EPSILON
    for end in ("", "_distributed"):
        assert found["audited_lower" + end] <= EPSILON < found["audited_lower_without_noise" + end]
    end = "_one_lattice"
    assert found["audited_lower" + end] <= EPSILON < found["audited_lower_without_noise" + end]
    assert all(row["delta"] == DELTA < 1 / row["canaries"] for row in made["rows"])
    assert set(NAMES.values()) < set(found)


@pytest.mark.parametrize(("noised", "shown"), [(True, False), (False, True)])
def test_the_attack_on_released_models_works_without_noise_and_shows_less_than_the_claim_with_it(
    noised: bool, shown: bool
) -> None:
    row = attacked_run("central", clients=24, rounds=2, seed=3, noised=noised)
    assert (row["right"] == row["guesses"]) == shown
    if noised:
        assert row["audited_lower"] <= row["claimed_epsilon"] == 8.0
    assert figures([row])["run_audited_lower" + "_without_noise" * shown] == row["audited_lower"]
