"""Sums of lattice points: exact integers, and sums that cannot be right refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.lattices import KINDS, TERMS, bound, drawn, encoded, of_kind, summed
from thinwire.aggregation.lattice import BadSum, Lattice, Points
from thinwire.aggregation.lattice_window import Lanes
from thinwire.compression import native
from thinwire.core import Key
from thinwire.privacy.masks import add_masks, add_packed, check_packed, pack, packed_size


@pytest.fixture(params=native.available())
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    with native.using(request.param):
        yield request.param


# Integers and widths


@pytest.mark.parametrize(
    ("selected", "bits", "width"),
    [(1, 2, 2), (3, 2, 3), (4, 2, 4), (100, 2, 8), (100, 4, 11), (10, 8, 12), (100, 8, 15), (1000, 8, 18),
     (100, 16, 23), (65_537, 16, 32)],
)  # fmt: skip
def test_the_width_is_the_smallest_that_holds_the_largest_sum(selected: int, bits: int, width: int) -> None:
    terms = dataclasses.replace(TERMS, selected=selected, bits=bits)
    assert terms.width == width
    assert terms.width == 1 + int(np.ceil(np.log2(selected * terms.most + 1)))
    assert selected * terms.most <= 2 ** (width - 1) - 1
    assert Lattice(terms, Key(1)).dtype == (np.uint16 if width <= 16 else np.uint32)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("selected", "bits"), [(1, 2), (7, 2), (100, 8), (258, 8), (3000, 16)])
def test_clients_that_all_send_the_largest_integer_do_not_overflow(
    selected: int, bits: int, sign: int, path: str
) -> None:
    lattice = bound(200, rotate=0, selected=selected, bits=bits)
    one = lattice.terms.most * sign
    lanes = np.zeros(lattice.lanes, lattice.dtype)
    lanes[: lattice.padded] = np.array(selected * one).astype(lattice.dtype)
    lanes[lattice.padded :] = (selected + (1 << lattice.width)) % (1 << 8 * lanes.itemsize)  # upper bits are ignored
    mean = lattice.decode_sum(lanes, selected, selected, 0, Key(1))
    np.testing.assert_allclose(mean, one * lattice.step, rtol=1e-6)


@settings(deadline=None, max_examples=40)
@given(
    kind=st.sampled_from(KINDS), size=st.sampled_from([40, 1000, 4097, 70_001]), seed=st.integers(0, 99),
    weights=st.lists(st.integers(1, 50), min_size=1, max_size=5), path=st.sampled_from(native.available()),
)  # fmt: skip
def test_the_sum_decodes_to_the_weighted_mean_of_what_the_clients_represented(
    kind: tuple[int, float, int], size: int, seed: int, weights: list[int], path: str
) -> None:
    with native.using(path):
        lattice = of_kind(kind, size, weight_max=40)
        points = [encoded(lattice, drawn(size, seed + i, 0.9), seed + i, weight) for i, weight in enumerate(weights)]
        used = [each.weight for each in points]
        assert used == [min(weight, 40) for weight in weights]
        total = summed(points)
        integers = sum(each.lanes.astype(np.int64).astype(f"i{total.itemsize}") for each in points)
        assert (total.view(f"i{total.itemsize}") == integers).all()  # exact
        mean = lattice.decode_sum(total, len(weights), sum(used), 0, Key(11))
        expected = sum(w * lattice.represented(p).astype(np.float64) for w, p in zip(used, points, strict=True))
        error = np.abs(mean - expected / sum(used)).max()
        assert error <= 1e-6 * max(np.abs(lattice.represented(p)).max() for p in points) * 40
        off = np.setdiff1d(np.arange(size), lattice.walk.indices(0))
        assert not mean[off].any()


# Masked sums


def masked(lattice: Lattice, seeds: range, wrong: int | None = None) -> tuple[Lanes, list[Points]]:
    """Return the sum of packed, masked points after all masks were removed, and the points; `wrong` has another key."""
    total, points = np.zeros(lattice.lanes, lattice.dtype), []
    for seed in seeds:
        points.append(encoded(lattice, drawn(lattice.terms.size, seed), seed))
        pairs = [(bytes([min(seed, peer), max(seed, peer)] * 16), 1 if seed < peer else -1) for peer in seeds]
        lanes, own = points[-1].lanes.copy(), bytes([seed] * 32)
        add_masks(lanes, [(own, 1), *(pair for peer, pair in zip(seeds, pairs, strict=True) if peer != seed)])
        sent = np.empty(packed_size(lanes.size, lattice.width), np.uint8)
        pack(lanes, lattice.width, sent)
        check_packed(sent, lanes.size, lattice.width)
        add_packed(sent, lattice.width, total)
        add_masks(total, [(bytes([99] * 32) if seed == wrong else own, -1)])
    return total, points


@pytest.mark.parametrize("kind", KINDS)
def test_a_sum_of_masked_and_packed_points_is_that_of_the_plain_ones(kind: tuple[int, float, int]) -> None:
    lattice = of_kind(kind, 5000)
    total, points = masked(lattice, range(4))
    mean = lattice.decode_sum(total, 4, 4, 0, Key(11))
    assert mean.tobytes() == lattice.decode_sum(summed(points), 4, 4, 0, Key(11)).tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_a_self_mask_removed_with_another_key_is_found(kind: tuple[int, float, int]) -> None:
    lattice = of_kind(kind, 5000)
    with pytest.raises(BadSum, match="check lanes"):
        lattice.decode_sum(masked(lattice, range(3), wrong=1)[0], 3, 3, 0, Key(11))


# Sums that cannot be right


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_that_was_not_removed_is_found(kind: tuple[int, float, int]) -> None:
    lattice = of_kind(kind, 2000)
    total = summed([encoded(lattice, drawn(2000, seed), seed) for seed in range(3)])
    for seed in range(200):
        mask = np.random.default_rng(seed).integers(0, 1 << 8 * total.itemsize, total.size, dtype=total.dtype)
        with pytest.raises(BadSum, match="check lanes"):
            lattice.decode_sum(total + mask, 3, 3, 0, Key(11))


def test_the_check_lanes_hold_at_least_64_bits() -> None:
    for bits in range(2, 17):
        lattice = bound(bits=bits)
        assert (lattice.lanes - lattice.padded) * lattice.width >= 64
        assert (encoded(lattice, drawn(10_000)).lanes[lattice.padded :] == 1).all()


def test_a_sum_without_one_of_its_clients_is_found() -> None:
    lattice = bound(2000)
    total = summed([encoded(lattice, drawn(2000, seed), seed) for seed in range(3)])
    with pytest.raises(BadSum, match="check lanes are not 4"):
        lattice.decode_sum(total, 4, 4, 0, Key(11))


def test_random_lanes_before_the_check_lanes_are_found_by_their_range(path: str) -> None:
    lattice = bound(2000)
    total = encoded(lattice, drawn(2000)).lanes
    total[100:140] = np.random.default_rng(1).integers(0, 1 << 16, 40)
    with pytest.raises(BadSum, match=r"above 1 times 127"):  # each is found with probability 1 - 255 / 4096
        lattice.decode_sum(total, 1, 1, 0, Key(11))


@pytest.mark.parametrize(("survivors", "weight_sum"), [(2, 1), (2, 9), (1, 0)])
def test_a_sum_of_weights_that_the_survivors_cannot_have_is_refused(survivors: int, weight_sum: int) -> None:
    lattice = bound(weight_max=4)
    with pytest.raises(BadSum, match="do not have the sum"):
        lattice.decode_sum(encoded(lattice, drawn(10_000)).lanes, survivors, weight_sum, 0, Key(11))


def test_lanes_of_another_size_or_type_are_refused() -> None:
    lattice = bound()
    for lanes in (np.zeros(lattice.lanes - 1, np.uint16), np.zeros(lattice.lanes, np.uint32)):
        with pytest.raises(ValueError, match="expected"):
            lattice.decode_sum(lanes, 1, 1, 0, Key(1))
    with pytest.raises(ValueError, match="11 survivors of 10"):
        lattice.decode_sum(np.zeros(lattice.lanes, np.uint16), 11, 11, 0, Key(1))


@pytest.mark.parametrize(
    "wrong",
    [{"bits": 1}, {"bits": 17}, {"rotate": 100}, {"rotate": 32}, {"rotate": 1 << 17}, {"selected": 0},
     {"weight_max": 0}, {"weight_max": 1 << 62}, {"clip": 0.0}, {"clip": float("nan")}, {"support": 0.0},
     {"bits": 16, "selected": 1 << 17}],
)  # fmt: skip
def test_terms_that_do_not_fit_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is not|do not fit|needs"):
        bound(**wrong)


def test_a_weight_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        encoded(bound(), drawn(10_000), weight=0)
