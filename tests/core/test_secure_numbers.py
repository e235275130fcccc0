"""The integers of secure aggregation: thresholds by both adversaries, widths, and the sentence for each that fails."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from thinwire.aggregation.lattice import LatticeTerms
from thinwire.core.errors import PlanError
from thinwire.core.plan_values import SecureSection
from thinwire.core.secure_numbers import check_numbers, share_of, threshold

shares = st.floats(0, 0.99)


@given(st.integers(0, 300), st.integers(1, 300))
def test_a_share_that_means_a_whole_number_of_clients_is_that_number(part, whole):
    assume(part <= whole)
    assert share_of(part / whole, whole) == part


@given(st.integers(3, 500), shares, shares, st.sampled_from(["curious", "malicious"]))
def test_a_threshold_is_above_the_corrupt_clients_and_within_the_remaining_ones(selected, gamma, delta, adversary):
    corrupt, dropout = share_of(gamma, selected), share_of(delta, selected)
    try:
        found = threshold(selected, gamma, delta, adversary)
    except PlanError as error:
        least = corrupt + 1 if adversary == "curious" else (selected + corrupt) // 2 + 1
        assert max(3, corrupt + 2, least) > selected - dropout
        assert error.why
        assert error.hint
        return
    assert (found.corrupt, found.dropout) == (corrupt, dropout)
    assert corrupt < found.t <= found.min_survivors <= selected - dropout
    assert found.min_survivors >= max(3, corrupt + 2), "two honest clients are in each sum"
    if adversary == "malicious":
        assert 2 * found.t > selected + corrupt >= 2 * (found.t - 1)


@pytest.mark.parametrize(
    ("selected", "gamma", "delta", "adversary", "t"),
    [
        (3, 0.1, 0.1, "curious", 2),
        (10, 0.1, 0.1, "curious", 6),
        (10, 0.7, 0.1, "curious", 8),
        (10, 0.1, 0.7, "curious", 3),
        (100, 0.1, 0.1, "malicious", 56),
        (100, 0.33, 0.33, "malicious", 67),
        (4, 0.1, 0.1, "malicious", 3),
    ],
)
def test_the_threshold_of_some_cohorts(selected, gamma, delta, adversary, t):
    assert threshold(selected, gamma, delta, adversary).t == t


@given(st.integers(3, 60), st.floats(0, 0.5), st.floats(0, 0.3))
def test_no_two_lists_of_survivors_get_enough_answers_under_a_malicious_aggregator(selected, gamma, delta):
    """Each honest client answers for one list, each corrupt one for both: one list stays below t."""
    try:
        found = threshold(selected, gamma, delta, "malicious")
    except PlanError:
        return
    honest = selected - found.corrupt
    assert all(min(first, honest - first) + found.corrupt < found.t for first in range(honest + 1))


def width_of(selected: int, bits: int) -> int:
    return LatticeTerms(1000, bits, 1.0, 0, selected, 1, 1.0).width


@pytest.mark.parametrize(("selected", "bits"), list(itertools.product([3, 4, 100, 1000, 65535], [2, 3, 8, 12])))
def test_the_width_is_the_smallest_that_holds_every_sum(selected, bits):
    largest = selected * (2 ** (bits - 1) - 1)
    width = width_of(selected, bits)
    assert width == 1 + math.ceil(math.log2(largest + 1))
    assert -(2 ** (width - 1)) <= -largest
    assert largest <= 2 ** (width - 1) - 1
    assert largest > 2 ** (width - 2) - 1


def refused(selected: int, target: int | None = None, **keys) -> PlanError:
    with pytest.raises(PlanError) as error:
        check_numbers(SecureSection(enabled=True, **keys), selected, selected if target is None else target)
    assert error.value.why
    return error.value


def test_numbers_that_fit_are_not_refused():
    check_numbers(SecureSection(enabled=True), 3, 3)
    check_numbers(SecureSection(enabled=True, max_dropout=0.3, min_survivors=91), 130, 100)
    check_numbers(SecureSection(enabled=True, bits=16, weight_max=2**32, metrics={"loss": 1.0}), 100, 100)


@pytest.mark.parametrize(("selected", "word"), [(1, "1 client"), (2, "2 clients")])
def test_a_sum_of_fewer_than_three_is_refused(selected, word):
    error = refused(selected)
    assert error.what == f"secure aggregation of {word}"
    assert error.hint == "3 devices or more, and no [cohort] clients below 3"


def test_what_over_selection_cuts_counts_as_drop_outs():
    error = refused(130, 100, max_dropout=0.2)
    assert error.what == "over-selection cuts 30 of 130 clients, and [secure] max_dropout = 0.2 allows 26"
    assert error.hint.startswith("[secure] max_dropout = 0.24 and more")
    check_numbers(SecureSection(enabled=True, max_dropout=0.24), 130, 100)


def test_a_sum_cannot_need_more_clients_than_the_planned_drop_outs_leave():
    error = refused(100, min_survivors=91)
    assert (error.what, error.hint) == (
        "[secure] min_survivors = 91 among 100 clients", "[secure] min_survivors = 90, or more clients",
    )  # fmt: skip
    check_numbers(SecureSection(enabled=True, min_survivors=90), 100, 100)


def test_the_largest_cohort_with_the_most_bits_fits_into_lanes_of_32_bits():
    assert width_of(65_535, 16) == 32


@pytest.mark.parametrize("metrics", [{}, {"loss": 10.0}])
def test_the_largest_weight_that_is_offered_instead_is_the_largest_that_fits(metrics):
    error = refused(100, weight_max=2**60, metrics=metrics)
    fitting = int(error.hint.split()[-1])
    check_numbers(SecureSection(enabled=True, weight_max=fitting, metrics=metrics), 100, 100)
    refused(100, weight_max=fitting + 1, metrics=metrics)
