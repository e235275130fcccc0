"""Epsilons equal published figures, follow the laws of composition and sampling, and stay in a budget."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, NeighboringRelation, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

from thinwire.core.errors import UsageError
from thinwire.privacy.accounting import ORDERS, SAMPLER_SHARE, Budget, Release, epsilon, noise_for

DELTA = 1e-5
ALPHA = np.array(ORDERS, dtype=float)


def discrete_gaussian(z: float = 1.0, rate: float = 1.0, **more) -> Release:
    return Release("discrete-gaussian", 1, z * z, 1, rate=rate, **more)


# Published figures are from the older conversion rdp + ln(1/delta) / (alpha - 1); ours gives less.
def older(release: Release, count: int) -> float:
    return float(np.min(count * release.rdp() - math.log(DELTA) / (ALPHA - 1)))


def test_abadi_2016_has_epsilon_1_26_after_10_000_steps():
    release = Release("gaussian", 1, 16, 1, rate=0.01)
    assert older(release, 10_000) == pytest.approx(1.26, abs=0.005)
    assert epsilon({release: 10_000}, DELTA) == pytest.approx(1.0355, abs=1e-4)


@pytest.mark.parametrize(("z", "epochs", "published"), [(1.12, 60, 2.92), (0.6, 30, 9.74), (1.2, 10, 1.20)])
def test_the_table_of_tensorflow_privacy_which_is_the_accountant_of_mironov_2019(z, epochs, published):
    """The table in tutorials/README.md of tensorflow/privacy: 60 000 examples, batches of 256, delta = 1e-5."""
    release = discrete_gaussian(z, 256 / 60_000)
    assert older(release, epochs * 60_000 // 256) == pytest.approx(published, rel=0.01)


def test_dp_accounting_gives_the_same_epsilon_for_the_same_events():
    for z, rate, count in ((1.0, 1.0, 1), (5.0, 1.0, 30), (1.0, 0.01, 1000), (4.0, 0.05, 500)):
        library = RdpAccountant(ORDERS)
        library.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(z)), count)
        assert epsilon({discrete_gaussian(z, rate): count}, DELTA) == pytest.approx(
            library.get_epsilon(DELTA), rel=1e-6
        )


def by_hand(z: float) -> float:
    """Return the exact epsilon of one Gaussian: Balle and Wang 2018, Thm 8."""
    return float(brentq(lambda e: norm.cdf(0.5 / z - e * z) - math.exp(e) * norm.cdf(-0.5 / z - e * z) - DELTA, 0, 60))


@pytest.mark.parametrize("relation", list(NeighboringRelation))
def test_the_library_doubles_the_sensitivity_in_one_accountant_only(relation):
    """z is relative to C here. Under REPLACE_ONE the PLD doubles C by itself, and the RDP wants z relative to 2 C."""
    replaced = relation is NeighboringRelation.REPLACE_ONE
    rdp, pld = RdpAccountant(neighboring_relation=relation), PLDAccountant(relation)
    rdp.compose(GaussianDpEvent(1.0))
    pld.compose(GaussianDpEvent(1.0))
    assert rdp.get_epsilon(DELTA) == pytest.approx(4.73, abs=0.005)
    assert pld.get_epsilon(DELTA) == pytest.approx(9.997 if replaced else 4.377, abs=0.001)
    ours = epsilon({Release("gaussian", 2 if replaced else 1, 1, 1): 1}, DELTA)
    exactly = by_hand(0.5 if replaced else 1.0)
    assert pld.get_epsilon(DELTA) == pytest.approx(exactly, abs=0.001)
    assert exactly <= ours <= 1.09 * exactly


distances = st.floats(-40, -4.5).map(lambda power: 10.0**power)


@given(st.floats(0.5, 20), st.integers(1, 30), distances)
def test_epsilon_pays_for_the_distance_of_the_samplers(z, count, distance):
    release = discrete_gaussian(z, distance=distance / count)
    found = epsilon({release: count}, DELTA)
    offsets = np.log1p(-1 / ALPHA) * ALPHA - np.log(ALPHA - 1)

    def pays(at: float) -> bool:
        exact_delta = np.exp(np.min((ALPHA - 1) * (count * release.rdp() - at) + offsets))
        return bool(exact_delta + (1 + math.exp(at)) * distance <= DELTA * (1 + 1e-9))

    grid = np.linspace(0, 40, 2000)
    if math.isinf(found):
        assert not any(pays(at) for at in grid)
    else:
        assert pays(found)
        assert not any(pays(at) for at in grid[grid < found - 1e-6])


def test_distances_that_consume_delta_leave_no_claim():
    assert epsilon({discrete_gaussian(1000, distance=DELTA / 2): 1}, DELTA) == math.inf
    assert epsilon({Release("skellam", 1, 1e6, 1000, 10, distance=DELTA / 20_000): 1}, DELTA) == math.inf
    assert epsilon({Release("skellam", 1, 1e6, 1000, 10, distance=DELTA / 1e6): 1}, DELTA) < 0.1


releases = st.builds(
    Release,
    st.sampled_from(["discrete-gaussian", "skellam"]),
    st.sampled_from([0.0, 1.0, 3.5, 100.0]),
    st.floats(0.5, 1e6),
    st.sampled_from([1, 1000]),
    rate=st.sampled_from([1.0, 0.5, 0.01]),
    distance=st.sampled_from([0.0, 1e-12]),
) | st.builds(  # of clients who add a part of the noise each: no sampling amplifies it
    Release,
    st.sampled_from(["discrete-gaussian-sum", "skellam"]),
    st.sampled_from([0.0, 1.0, 3.5, 100.0]),
    st.floats(0.5, 1e6),
    st.sampled_from([1, 1000]),
    st.sampled_from([2, 10, 500]),
    distance=st.sampled_from([0.0, 1e-12]),
)


def changed(release: Release, **what) -> Release:
    return Release(**(vars(release) | what))


@settings(deadline=None)
@given(releases, st.integers(0, 500), st.integers(0, 500), st.floats(1, 10))
def test_epsilon_rises_with_rounds_and_falls_with_noise_and_sampling(release, count, more, factor):
    base = epsilon({release: count}, DELTA)
    assert base <= epsilon({release: count + more}, DELTA)
    assert base >= epsilon({changed(release, variance=release.variance * factor): count}, DELTA)
    assert base <= epsilon({changed(release, rate=1.0): count}, DELTA)
    assert base <= epsilon({changed(release, sensitivity=release.sensitivity * factor): count}, DELTA)
    assert base >= epsilon({release: count}, 10 * DELTA)
    assert Release.from_json(release.to_json()) == release


def test_what_releases_nothing_costs_nothing_and_what_adds_no_noise_costs_everything():
    assert epsilon({}, DELTA) == 0
    assert epsilon({discrete_gaussian(0): 0}, DELTA) == 0
    assert epsilon({Release("skellam", 0, 0, 5, distance=0.5): 9}, DELTA) == 0
    assert epsilon({discrete_gaussian(0): 1}, DELTA) == math.inf


def test_a_release_computes_its_cost_once():
    release = discrete_gaussian(3, 0.02)
    assert release.rdp() is discrete_gaussian(3, 0.02).rdp()
    with pytest.raises(ValueError, match="read-only"):
        release.rdp()[0] = 0


def rounds(budget: Budget, release: Release) -> int:
    """Return how many releases the filter allows; from the first that it refuses on, it refuses all."""
    low, high = 0, 1 << 24
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if budget.allows({release: middle}, release) else (low, middle)
    return low


@pytest.mark.parametrize("total", [0.5, 1.0, 2.0, 8.0])
def test_a_budget_of_one_order_loses_little_against_the_minimum_over_all(total):
    for z, rate in ((30.0, 1.0), (2.0, 0.01), (1.0, 0.01)):
        release = discrete_gaussian(z, rate)
        best = float(np.max((total - np.log1p(-1 / ALPHA) + np.log(DELTA * ALPHA) / (ALPHA - 1)) / release.rdp()))
        assert 0.997 * best - 1 <= rounds(Budget(total, DELTA, release), release) <= best
        if rate == 1:
            assert 0.997 * best - 1 <= rounds(Budget(total, DELTA), release) <= best


def test_a_budget_that_does_not_know_the_releases_may_lose_most_of_them():
    release = discrete_gaussian(1, 0.01)
    assert rounds(Budget(2, DELTA), release) == 28
    assert rounds(Budget(2, DELTA, release), release) == 877


@settings(deadline=None)
@given(st.lists(releases, max_size=12), st.floats(0.1, 20))
def test_what_a_budget_allowed_costs_at_most_the_budget(stream, total):
    budget, spent = Budget(total, DELTA), dict[Release, int]()
    order = budget.order()
    for release in stream:
        if budget.allows(spent, release):
            spent[release] = spent.get(release, 0) + 1
        assert budget.order() == order
    assert epsilon(spent, DELTA) <= total * (1 + 1e-6)


def test_a_budget_keeps_a_fixed_share_of_delta_for_samplers():
    budget = Budget(1, DELTA)
    fits = SAMPLER_SHARE * DELTA / (1 + math.e)
    assert budget.allows({}, discrete_gaussian(100, distance=0.99 * fits))
    assert not budget.allows({}, discrete_gaussian(100, distance=1.01 * fits))
    assert not budget.allows(
        {discrete_gaussian(100, distance=0.5 * fits): 1}, discrete_gaussian(99, distance=0.6 * fits)
    )


@pytest.mark.parametrize("target", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("kind", ["discrete-gaussian", "skellam", "sampled"])
def test_the_noise_for_a_target_is_the_least_within_a_ten_thousandth(kind, target):
    def release_of(z: float) -> Release:
        if kind == "sampled":
            return discrete_gaussian(z, 0.05)
        return Release(kind, 1000, (1000 * z) ** 2, 10**6)

    found = noise_for(target, DELTA, release_of, 50)
    assert epsilon({release_of(found): 50}, DELTA) <= target
    assert epsilon({release_of(found * (1 - 1.1e-4)): 50}, DELTA) > target


def test_a_target_that_no_noise_reaches_is_refused():
    with pytest.raises(ValueError, match="out of reach"):
        noise_for(1.0, DELTA, lambda z: discrete_gaussian(z, distance=DELTA), 1)


@pytest.mark.parametrize(
    "what",
    [
        {"distribution": "laplace"}, {"variance": -1.0}, {"variance": math.nan}, {"variance": math.inf}, {"rate": 0.0},
        {"rate": 1.5}, {"rate": math.nan}, {"sensitivity": -1.0}, {"sensitivity": math.nan}, {"dimensions": 0},
        {"dimensions": 1.5}, {"parties": 0}, {"parties": True}, {"distance": -1e-9}, {"distance": 2.0},
        {"rate": 0.5, "parties": 2},
    ],
)  # fmt: skip
def test_a_release_refuses_a_number_that_makes_no_sense_and_names_it(what):
    with pytest.raises(ValueError, match=next(iter(what))):
        changed(discrete_gaussian(), **what)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan, 2.0])
def test_a_delta_outside_of_0_and_1_is_refused(delta):
    for call in (
        lambda: epsilon({}, delta),
        lambda: Budget(1, delta),
        lambda: noise_for(1, delta, discrete_gaussian, 1),
    ):
        with pytest.raises(ValueError, match="delta"):
            call()


@pytest.mark.parametrize("target", [0.0, -1.0, math.nan, math.inf])
def test_an_epsilon_that_is_no_budget_is_refused(target):
    for call in (lambda: Budget(target, DELTA), lambda: noise_for(target, DELTA, discrete_gaussian, 1)):
        with pytest.raises(ValueError, match="epsilon"):
            call()


@pytest.mark.parametrize(
    "call", [lambda: epsilon({discrete_gaussian(): -1}, 0.1), lambda: noise_for(1, 0.1, discrete_gaussian, 0)]
)
def test_a_count_below_what_can_happen_is_refused(call):
    with pytest.raises(ValueError, match="count"):
        call()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"distribution": "gaussian"}'])
def test_a_text_that_is_no_release_is_refused(text):
    with pytest.raises(ValueError):
        Release.from_json(text)


def test_without_dp_accounting_a_sampled_gaussian_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(UsageError) as caught:
        Release("gaussian", 1, 2.25, 1, rate=0.123).rdp()
    assert "thinwire[privacy]" in caught.value.hint
    assert epsilon({Release("gaussian", 1, 2.25, 1): 1}, DELTA) > 0


def test_accounting_is_imported_without_scipy_and_dp_accounting():
    code = "import sys, thinwire.privacy.accounting; print({'scipy', 'dp_accounting'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
