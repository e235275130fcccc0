"""The grid of a private sum: how far one client moves it, and how many bits a sum with its noise needs."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.core.privacy_numbers import MOST_INFLATION, inflation, scale_for, squared_sensitivity, width_for


@pytest.mark.parametrize(
    ("width", "dimensions", "expected"),
    [(15, 20, 1.03), (15, 25, 1.73), (16, 20, 1.007), (16, 25, 1.22), (18, 20, 1.000), (18, 25, 1.015),
     (11, 20, 3.9), (11, 25, 22.6)],
)  # fmt: skip
def test_the_inflation_of_a_width_is_that_of_the_requirements(width: int, dimensions: int, expected: float) -> None:
    """100 clients, noise of one clip, 1 000 rounds: the figures that were computed apart from this code."""
    scale = scale_for(width, 100, 2**dimensions, 1.0, 1000, 100)
    assert inflation(scale, 2**dimensions) == pytest.approx(expected, rel=0.01)


@given(st.floats(0, 1e6), st.integers(1, 2**25))
def test_the_bound_is_between_that_of_no_rounding_and_that_of_the_worst_one(scale: float, dimensions: int) -> None:
    found = squared_sensitivity(scale, dimensions)
    assert found <= (scale + math.sqrt(dimensions)) ** 2
    assert found >= math.floor(scale**2)


@given(st.integers(2, 1000), st.integers(64, 2**22), st.floats(0.1, 10), st.integers(1, 1000))
def test_the_chosen_width_is_the_fewest_bits_that_inflate_little(
    clients: int, dimensions: int, noise: float, rounds: int
) -> None:
    width, scale = width_for(clients, dimensions, noise, rounds, max(1, clients // 2))
    assert inflation(scale, dimensions) <= MOST_INFLATION
    if width > 8:
        try:
            finer = scale_for(width - 1, clients, dimensions, noise, rounds, max(1, clients // 2))
        except ValueError:
            return
        assert finer == 0 or inflation(finer, dimensions) > MOST_INFLATION


def test_a_sum_that_no_width_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="needs over 32 bits"):
        width_for(1000, 2**25, 1e9, 10, 500)
