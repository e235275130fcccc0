"""Encoding of lattice points: residuals that lose nothing, rounding without bias, and the same bits everywhere."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.support.lattices import KINDS, bound, drawn, encoded, of_kind, summed
from tests.support.scripted_rng import ScriptedRng
from thinwire.aggregation import lattice as module
from thinwire.aggregation import lattice_window
from thinwire.aggregation.lattice import rounding_variance
from thinwire.compression import native
from thinwire.core import Key
from thinwire.core.errors import NonFiniteUpdate

GOLDEN = Path(__file__).parents[1] / "golden/lattice"


class Counting:
    """Gives 0, 1, 2, .. as draws of 16 bits."""

    def fill(self, out: NDArray[np.uint8] | NDArray[np.uint32]) -> None:
        draws = out.view(np.uint16)
        draws[:] = np.arange(draws.size)

    def random_bytes(self, count: int) -> bytes:
        raise AssertionError("rounding draws words")


@pytest.fixture(params=native.available())
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    with native.using(request.param):
        yield request.param


# The residual


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(KINDS), size=st.sampled_from([40, 1000, 4097, 70_001]), seed=st.integers(0, 99),
    weight=st.integers(1, 9), norm=st.sampled_from([1e-30, 1e-3, 0.9, 30.0, 1e30]),
    awkward=st.lists(st.sampled_from([0.0, -0.0, 1e-45, -1e-38, 3.4028235e38, 1.0]), max_size=2),
    path=st.sampled_from(native.available()), last=st.booleans(),
)  # fmt: skip
def test_the_residual_is_the_vector_minus_what_is_represented_rounded_once(
    kind: tuple[int, float, int], size: int, seed: int, weight: int, norm: float, awkward: list[float], path: str,
    last: bool,
) -> None:  # fmt: skip
    with native.using(path):
        lattice, x = of_kind(kind, size, weight_max=9), drawn(size, seed, norm)
        x[: len(awkward)] = awkward
        residual = x.copy()
        points = encoded(lattice, residual, seed, weight, lattice.walk.windows - 1 if last else 0)
        represented = lattice.represented(points)
        assert np.isfinite(represented).all()
        assert (residual == x - represented).all()
        lattice.restore(points, residual)
        assert np.abs(residual - x).max() <= 2.0**-22 * max(np.abs(x).max(), np.abs(represented).max())


def test_what_is_clipped_stays_in_the_residual(path: str) -> None:
    lattice, x = bound(weight_max=4), drawn(10_000, norm=8.0)
    residual = x.copy()
    points = encoded(lattice, residual, weight=2)
    assert points.clipped == pytest.approx(1 / 4)  # half of 8 is 4 times the clip
    assert points.scaled == 1.0
    assert np.linalg.norm(lattice.represented(points) * 0.5) == pytest.approx(1.0, rel=0.02)
    assert np.linalg.norm(residual) == pytest.approx(6.0, rel=0.02)


def test_a_vector_that_does_not_fit_the_grid_is_scaled_down_once_as_a_whole(path: str) -> None:
    lattice, x = bound(65_536, rotate=64), np.zeros(65_536, np.float32)
    x[640:704] = drawn(64, norm=0.99)  # all of the norm in one rotated block
    residual = x.copy()
    points = encoded(lattice, residual)
    assert points.clipped == 1.0
    assert 0.01 < points.scaled < 0.3
    most = np.abs(points.lanes.view(np.int16)).max()
    assert lattice.terms.most - 1 <= most <= lattice.terms.most
    represented = lattice.represented(points)
    np.testing.assert_allclose(represented, x * points.scaled, atol=6 * lattice.step)
    assert (residual == x - represented).all()


def test_without_rotation_no_vector_is_scaled(path: str) -> None:
    lattice, x = bound(rotate=0), np.zeros(10_000, np.float32)
    x[17] = -5.0
    points = encoded(lattice, x)
    assert points.clipped == pytest.approx(0.2)
    assert points.scaled == 1.0
    assert points.lanes.view(np.int16)[17] == -lattice.terms.most


def test_the_order_of_the_walk_mixes_unlike_tensors_before_the_rotation() -> None:
    """The model's own order would not: its factor is printed, and docs/explain/secure-aggregation.md has both."""
    draws = np.random.default_rng(4)
    tensors = [draws.normal(size=20_000) * size for size in np.exp(2 * draws.normal(size=50))]
    x = np.concatenate(tensors).astype(np.float32)
    x *= np.float32(0.999 / np.linalg.norm(x))
    mixed, unmixed = bound(x.size, rotate=65_536), bound(x.size, rotate=65_536)
    vars(unmixed.walk)["permutation"] = np.arange(x.size // 64, dtype=np.uint32)
    factors = [encoded(lattice, x.copy()).scaled for lattice in (mixed, unmixed)]
    print("scaled by", factors)
    assert factors[0] > 0.9
    assert factors[1] < 0.7


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_is_refused_and_the_vector_unchanged(
    kind: tuple[int, float, int], bad: float, path: str
) -> None:
    lattice = of_kind(kind, 9000)
    for place in (0, 4095, 8999):
        x = drawn(9000)
        x[place] = bad
        before = x.tobytes()
        with pytest.raises(NonFiniteUpdate):
            encoded(lattice, x)
        assert x.tobytes() == before


def test_feedback_sends_everything_in_the_end() -> None:
    lattice, sent = bound(2000, support=0.25, bits=3, rotate=256), np.zeros(2000)
    update, x = drawn(2000, norm=0.05), np.zeros(2000, np.float32)
    for step in range(400):
        x += update
        points = encoded(lattice, x, seed=step, window=step % lattice.walk.windows)
        sent += lattice.represented(points)
    np.testing.assert_allclose(sent + x, 400.0 * update, atol=1e-3)
    assert np.linalg.norm(x) < 0.1 * np.linalg.norm(400 * update)


# Rounding


@settings(deadline=None, max_examples=30)
@given(place=st.floats(-126, 126, width=32), path=st.sampled_from(native.available()))
def test_rounding_is_unbiased_to_half_of_what_a_draw_resolves(place: float, path: str) -> None:
    with native.using(path):
        lattice = bound(65_536, rotate=0, bits=16, selected=1, clip=32_767 * 2.0**10)  # a step of 2^10
        x = np.full(65_536, place * lattice.step, np.float32)
        points = lattice.encode(x, 1, 0, Key(1), Counting())
        integers = points.lanes[: lattice.padded].view(np.int16)
        assert set(np.unique(integers)) <= {int(np.floor(place)), int(np.floor(place)) + 1}
        assert integers.mean() == pytest.approx(place, abs=2.0**-17)


@pytest.mark.parametrize(
    ("rotate", "bits", "norm"), [(65_536, 8, 1.0), (65_536, 4, 0.5), (65_536, 2, 1.0), (0, 16, 1.0)]
)
def test_the_mean_squared_error_of_a_mean_is_the_formulas(rotate: int, bits: int, norm: float) -> None:
    size, weights = 60_000, [3, 1, 4, 4, 2]
    lattice = bound(size, rotate=rotate, bits=bits, weight_max=4)
    updates = [drawn(size, seed, norm * 4 / weight) for seed, weight in enumerate(weights)]
    points = [encoded(lattice, x.copy(), seed, weights[seed]) for seed, x in enumerate(updates)]
    assert all(each.scaled == 1.0 for each in points)
    mean = lattice.decode_sum(summed(points), 5, sum(weights), 0, Key(11))
    exact = sum(w * x.astype(np.float64) for w, x in zip(weights, updates, strict=True)) / sum(weights)
    measured, expected = np.mean((mean - exact) ** 2), lattice.mean_squared_error(5, sum(weights), norm)
    print(f"{bits} bits, rotate {rotate}: mean squared error {measured:.4g}, formula {expected:.4g}")
    assert measured == pytest.approx(expected, rel=0.05)


def test_with_equal_weights_the_error_is_the_documented_share_of_the_norm() -> None:
    lattice = bound(60_000, rotate=65_536)
    share = 60_000 * lattice.mean_squared_error(10, 10)
    tau = lattice.step * 127 * math.sqrt(lattice.padded) / lattice.terms.clip
    documented = tau**2 / (6 * 10 * 127**2) * 60_000 / lattice.padded
    assert share == pytest.approx(documented, rel=1e-3)


def test_the_variance_of_rounding_is_that_of_drawn_numbers() -> None:
    numbers = np.random.default_rng(1).normal(size=400_000)
    for deviation in (0.05, 0.2, 0.5, 3.0):
        fractions = deviation * numbers % 1
        assert rounding_variance(deviation) == pytest.approx(np.mean(fractions * (1 - fractions)), rel=0.02)
    assert rounding_variance(100.0) == pytest.approx(1 / 6)


# The same bits


@settings(deadline=None, max_examples=25)
@given(
    kind=st.sampled_from(KINDS), size=st.sampled_from([1, 63, 65, 4095, 4097, 65_537, 140_003]),
    seed=st.integers(0, 99), norm=st.sampled_from([1e-3, 1.0, 50.0]), sparse=st.booleans(),
)  # fmt: skip
def test_every_path_gives_what_numpy_gives(
    kind: tuple[int, float, int], size: int, seed: int, norm: float, sparse: bool
) -> None:
    lattice = of_kind(kind if size > 1 else (kind[0], 1.0, kind[2]), size)
    x = drawn(size, seed, norm)
    if sparse:
        x[size // 3 :] = 0

    def bits() -> tuple[object, ...]:
        own = x.copy()
        points = lattice.encode(own, 1, lattice.walk.windows - 1, Key(seed), ScriptedRng(seed))
        mean = lattice.decode_sum(points.lanes, 1, 1, lattice.walk.windows - 1, Key(seed))
        return points.lanes.tobytes(), own.tobytes(), mean.tobytes(), points.clipped, points.scaled

    with native.using("numpy"):
        expected = bits()
    for path in native.available()[:-1]:
        with native.using(path):
            assert bits() == expected, path


@pytest.mark.parametrize("kind", [(0, 1.0, 8), (65_536, 1.0, 8), (1024, 0.5, 16)])
def test_no_bit_depends_on_the_number_of_threads_or_the_blocks_that_one_takes(
    kind: tuple[int, float, int], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 500_003  # two groups of four blocks, of which the last one is not whole
    lattice, found = of_kind(kind, size), set()
    for threads, group in [(1, 4), (1, 1), (2, 4), (3, 1), (3, 2)]:
        monkeypatch.setattr(module, "GROUP", group)
        x = drawn(size)
        with native.using_threads(threads):
            points = encoded(lattice, x)
            found.add((points.lanes.tobytes(), x.tobytes(), lattice.represented(points).tobytes()))
    assert len(found) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_every_path_gives_the_golden_lanes_and_mean(kind: tuple[int, float, int], path: str) -> None:
    """The files are written where they are missing: they are what devices and aggregators of a run must agree on."""
    lattice = of_kind(kind, 3001, weight_max=3)
    x = (np.arange(3001, dtype=np.float32) % 97 - 48) * np.float32(2.0**-11)
    points = lattice.encode(x, 2, lattice.walk.windows - 1, Key(1, 2), ScriptedRng(34))
    mean = lattice.decode_sum(points.lanes, 1, 2, lattice.walk.windows - 1, Key(1, 2))
    name = f"rotate-{kind[0]}-support-{kind[1]}-bits-{kind[2]}"
    for ending, data in [("lanes", points.lanes.astype(f"<u{points.lanes.itemsize}")), ("f4", mean.astype("<f4"))]:
        file = GOLDEN / f"{name}.{ending}"
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(data.tobytes())
        assert data.tobytes() == file.read_bytes()


# Memory and padding


def test_the_padding_of_a_rotation_is_small() -> None:
    for coordinates in [1, 63, 64, 65, 1000, 5000, 65_535, 100_000, 255_600, 25_560_000]:
        padded = lattice_window.padded_size(coordinates, 65_536)
        blocks = list(lattice_window.rotated_blocks(padded, 65_536))
        assert 0 <= padded - coordinates <= max(63, coordinates / 32)
        assert blocks[0][0] == 0 and blocks[-1][1] == padded
        assert all(start % (stop - start) == 0 and stop - start >= 64 for start, stop in blocks)


def test_encoding_takes_little_more_memory_than_its_lanes() -> None:
    lattice, x = bound(4_000_000, rotate=65_536), drawn(4_000_000)
    encoded(lattice, x.copy())
    tracemalloc.start()
    encoded(lattice, x)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 4_000_000 + (3 << 20)  # half a model in lanes of 16 bits
