"""The walk of the support: each coordinate once in a pass, the same order everywhere, little memory."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.aggregation.lattice_window import MIN_VISITS, SupportWalk
from thinwire.core import Key


@settings(deadline=None, max_examples=80)
@given(size=st.integers(1, 20_000), share=st.floats(0.003, 1), seed=st.integers(0, 2**64 - 1))
def test_each_coordinate_is_visited_exactly_once_in_a_pass(size: int, share: float, seed: int) -> None:
    if math.ceil(1 / share) > size:
        share = 1.0
    walk = SupportWalk(size, share, Key(seed))
    visited = [walk.indices(window) for window in range(walk.windows)]
    assert [found.size for found in visited] == [walk.coordinates(window) for window in range(walk.windows)]
    assert walk.largest == max(found.size for found in visited)
    assert sorted(np.concatenate(visited).tolist()) == list(range(size))


@pytest.mark.parametrize(
    ("share", "windows"), [(1.0, 1), (0.5, 2), (0.3, 4), (0.1, 10), (0.01, 100), (1 / 49, 49), (1 / 3, 3)]
)
def test_a_pass_takes_as_many_steps_as_the_share_goes_into_one(share: float, windows: int) -> None:
    assert SupportWalk(100_000, share, Key(1)).windows == windows


def test_windows_differ_by_one_block_and_the_incomplete_last_one() -> None:
    walk = SupportWalk(1_000_037, 0.07, Key(2))
    counts = [walk.coordinates(window) for window in range(walk.windows)]
    assert max(counts[:-1]) - min(counts[:-1]) <= walk.block == 64
    assert counts[-1] - min(counts) <= walk.block + 1_000_037 % 64


def test_a_run_that_visits_a_coordinate_fewer_than_ten_times_is_seen() -> None:
    walk = SupportWalk(100_000, 0.01, Key(1))
    assert walk.visits(1000) == MIN_VISITS
    assert walk.visits(999) < MIN_VISITS


def test_every_window_has_its_share_of_every_tensor() -> None:
    walk, tensor = SupportWalk(4_000_000, 0.1, Key(3)), 400_000
    for window in range(walk.windows):
        shares = np.bincount(walk.indices(window) // tensor, minlength=10) / tensor
        assert abs(shares - 0.1).max() < 0.02  # 625 of 6250 blocks, give or take 24


def test_another_run_walks_in_another_order() -> None:
    orders = [SupportWalk(640_000, 0.1, Key(seed)).permutation for seed in (1, 2)]
    assert (orders[0] == orders[1]).sum() < 10


def test_the_order_is_the_same_everywhere_for_ever() -> None:
    walk = SupportWalk(1_000_037, 0.3, Key(1, 2))
    digest = hashlib.sha256(walk.permutation.astype("<u4").tobytes()).hexdigest()[:16]
    assert digest == "b1aefa6123900999"


def test_the_order_takes_a_sixteenth_of_a_byte_a_coordinate_and_cannot_be_changed() -> None:
    walk = SupportWalk(6_400_000, 1.0, Key(1))
    assert walk.permutation.nbytes * 16 == 6_400_000
    assert walk.order(0).base is walk.permutation
    with pytest.raises(ValueError, match="read-only"):
        walk.order(0)[0] = 1


@pytest.mark.parametrize(("size", "share"), [(0, 1.0), (10, 0.0), (10, 1.1), (10, 0.05), (1 << 32, 1.0)])
def test_a_walk_that_sends_nothing_or_needs_longer_numbers_is_refused(size: int, share: float) -> None:
    with pytest.raises(ValueError, match="coordinate|support"):
        SupportWalk(size, share, Key(1))


@pytest.mark.parametrize("window", [-1, 2])
def test_a_window_that_does_not_exist_is_refused(window: int) -> None:
    with pytest.raises(ValueError, match="is not one of 2"):
        SupportWalk(100, 0.5, Key(1)).order(window)
