"""The grid of a private sum: how far one client moves it, and how many bits a sum with its noise needs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.core.privacy_numbers import (
    COUNT_NOISE,
    MAX_INFLATION,
    TAIL,
    count_ratio,
    inflation,
    largest_coordinate,
    next_clip,
    padded_dimensions,
    scale_for,
    squared_sensitivity,
    width_for,
)

BLOCK = 65_536


@pytest.mark.parametrize(
    ("width", "dimensions", "expected"),
    [(15, 20, 1.035), (15, 25, 1.82), (16, 20, 1.009), (16, 25, 1.256), (18, 20, 1.0005), (18, 25, 1.018),
     (11, 20, 4.6), (11, 25, 26.9)],
)  # fmt: skip
def test_the_inflation_of_a_width_is_near_that_of_the_requirements(
    width: int, dimensions: int, expected: float
) -> None:
    """100 clients, noise of one clip, 1 000 rounds.

    The requirements say 1.03, 1.73, 1.007, 1.22, 1.000, 1.015, 3.9 and 22.6, for updates that spread over all blocks.
    Here an update may lie in one block, and Skellam's tail counts.
    """
    scale = scale_for(width, 100, 2**dimensions, BLOCK, 1.0, 1000, 100)
    assert inflation(scale, 2**dimensions) == pytest.approx(expected, rel=0.01)


def test_a_thousand_clients_need_two_bits_more_than_updates_that_spread_would() -> None:
    width, scale = width_for(1000, 2**25, BLOCK, 1.0, 100, 1000)
    assert width == 20
    assert inflation(scale, 2**25) < 1.02


@pytest.mark.parametrize(("clients", "noise"), [(200, 0.0), (3, 4.0), (40, 0.5)])
def test_no_sum_is_above_the_bound(clients: int, noise: float) -> None:
    """Equal updates in one block and Skellam noise, 200 rounds of 64 coordinates."""
    block, scale, rng = 1024, 300.0, np.random.default_rng(1)
    update = rng.standard_normal(block)
    update *= scale / np.linalg.norm(update)
    signs = rng.choice([-1.0, 1.0], (200, block))
    rows = np.sign(rng.standard_normal((64, block))) / math.sqrt(block)  # as those of a Hadamard matrix
    sums = clients * ((signs * update) @ rows.T)
    mean = clients * (noise * scale) ** 2 / 2
    sums = sums + rng.poisson(mean, sums.shape) - rng.poisson(mean, sums.shape)
    bound = largest_coordinate(scale, clients, block, block, noise, 200, 1)
    assert np.abs(sums).max() <= bound - clients
    assert np.abs(sums).max() >= 0.4 * (bound - clients)


def test_the_bound_is_that_of_gaussians_where_the_noise_is_large() -> None:
    exponent = math.log(2 * 2**20 * 10 / TAIL)
    gaussian = math.sqrt(2 * exponent * 50 * (2.0 * 1000) ** 2 / 40)
    assert largest_coordinate(1000.0, 50, 2**20, 2**40, 2.0, 10, 40) == pytest.approx(50 + gaussian, rel=1e-3)


@given(st.integers(2, 5000), st.floats(0.01, 100))
def test_the_count_of_an_adaptive_clip_takes_the_share_of_the_noise_that_the_paper_says(
    clients: int, noise: float
) -> None:
    deviation = max(COUNT_NOISE * clients, noise)
    assert deviation > noise / 2
    of_update = (noise**-2 - (2 * deviation) ** -2) ** -0.5
    ratio = count_ratio(clients, noise)
    assert noise * math.sqrt(1 + ratio**2) == pytest.approx(of_update, rel=1e-9)
    assert noise * math.sqrt(1 + ratio**2) / (2 * ratio) == pytest.approx(deviation, rel=1e-9), "in clients"


@given(st.floats(1e-6, 1e6), st.floats(-5, 5))
def test_a_clip_follows_the_median_and_one_round_changes_it_little(clip: float, share: float) -> None:
    found = next_clip(clip, share)
    assert abs(math.log(found / clip)) <= 0.1 + 1e-9
    assert (found > clip) == (share < 0.5) or share == 0.5 or found == pytest.approx(clip)


@given(st.integers(1, 10**7))
def test_all_blocks_of_a_private_sum_have_one_size(coordinates: int) -> None:
    padded, block = padded_dimensions(coordinates, BLOCK)
    assert padded % block == 0
    assert coordinates <= padded < coordinates + block
    assert block == BLOCK or padded == block
    assert padded_dimensions(padded, BLOCK) == (padded, block)


@given(st.floats(0, 1e6), st.integers(1, 2**25))
def test_the_bound_is_between_that_of_no_rounding_and_that_of_the_worst_one(scale: float, dimensions: int) -> None:
    found = squared_sensitivity(scale, dimensions)
    assert found <= (scale + math.sqrt(dimensions)) ** 2
    assert found >= math.floor(scale**2)


@settings(max_examples=25)
@given(st.integers(2, 1000), st.integers(64, 2**22), st.floats(0.1, 10), st.integers(1, 1000))
def test_the_chosen_width_is_the_fewest_bits_that_inflate_little(
    clients: int, dimensions: int, noise: float, rounds: int
) -> None:
    width, scale = width_for(clients, dimensions, 64, noise, rounds, max(1, clients // 2))
    assert inflation(scale, dimensions) <= MAX_INFLATION
    if width > 8:
        try:
            finer = scale_for(width - 1, clients, dimensions, 64, noise, rounds, max(1, clients // 2))
        except ValueError:
            return
        assert inflation(finer, dimensions) > MAX_INFLATION


def test_a_sum_that_no_width_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="needs over 32 bits"):
        width_for(1000, 2**25, BLOCK, 1e9, 10, 500)
