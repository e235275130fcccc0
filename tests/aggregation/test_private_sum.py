"""The sum of central privacy: exact integers, each client within its bound, noised once."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from tests.support.scripted_rng import ScriptedRng
from thinwire.aggregation import private_lattice
from thinwire.aggregation.private_lattice import NotRounded, PrivateSum
from thinwire.core.errors import NonFiniteUpdate
from thinwire.core.privacy_numbers import squared_sensitivity

VALUES = st.floats(-(2.0**100), 2.0**100, width=32)


def no_noise(out: NDArray[np.int32]) -> None:
    out[:] = 0


def made(size: int, clip: float = 1.0, scale: float = 500.0, clients: int = 1, seed: int = 1) -> PrivateSum:
    return PrivateSum(size, clip, scale, clients, ScriptedRng(seed))


@given(arrays(np.float32, st.integers(1, 40), elements=VALUES), st.floats(1.0, 1000.0))
def test_one_client_moves_the_integers_by_no_more_than_the_bound(vector: NDArray[np.float32], scale: float) -> None:
    one = made(vector.size, scale=scale)
    before = vector.copy()
    below = one.add(vector)
    assert one.total is not None
    assert int(np.dot(one.total, one.total)) <= squared_sensitivity(scale, vector.size)
    assert below == (math.sqrt(float(np.sum(vector.astype(np.float64) ** 2))) <= 1.0)
    assert (vector == before).all()


def test_the_mean_is_that_of_the_clipped_updates_over_the_selected_clients() -> None:
    rng = np.random.default_rng(3)
    vectors = [rng.standard_normal(1000).astype(np.float32) * size for size in (0.001, 0.01, 5.0)]
    whole = made(1000, clients=4, scale=1e5)
    for vector in vectors:
        whole.add(vector)
    expected = sum(v / max(1.0, float(np.linalg.norm(v))) for v in vectors) / 4
    assert np.abs(whole.release(no_noise) - expected).max() < 1e-4


def test_rounding_is_unbiased() -> None:
    """The mean of 4 000 roundings of one vector; its deviation is 0.5 / sqrt(4000) of a step at most."""
    vector, rounds = np.full(50, 0.0123, np.float32), 4000
    whole = made(50, clients=rounds, scale=30.0)
    for _ in range(rounds):
        whole.add(vector)
    assert np.abs(whole.release(no_noise) - 0.0123).max() < 7 * 0.5 / math.sqrt(rounds) / 30


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_vector_that_is_not_finite_changes_nothing(value: float) -> None:
    whole = made(3)
    with pytest.raises(NonFiniteUpdate):
        whole.add(np.array([0.0, value, 1.0], np.float32))
    assert whole.total is not None
    assert not whole.total.any()


def test_a_sum_is_released_once() -> None:
    whole = made(3)
    whole.add(np.ones(3, np.float32))
    whole.release(no_noise)
    with pytest.raises(RuntimeError, match="second draw"):
        whole.release(no_noise)
    with pytest.raises(RuntimeError, match="was released"):
        whole.add(np.ones(3, np.float32))


def test_noise_is_added_to_the_integers_before_they_are_scaled() -> None:
    whole = made(4, clip=2.0, scale=100.0, clients=5)
    whole.add(np.zeros(4, np.float32))

    def draw(out: NDArray[np.int32]) -> None:
        out[:] = (1, -2, 300, 0)

    unit = 2.0 / 100.0 / 5
    assert whole.release(draw) == pytest.approx(np.array([1, -2, 300, 0]) * unit)


def test_a_failed_draw_releases_nothing() -> None:
    whole = made(4)

    def draw(out: NDArray[np.int32]) -> None:
        raise OSError("no entropy")

    with pytest.raises(OSError, match="no entropy"):
        whole.release(draw)
    with pytest.raises(RuntimeError):
        whole.release(no_noise)


def test_a_vector_that_no_attempt_rounds_within_the_bound_is_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_lattice, "squared_sensitivity", lambda scale, size: 1)
    whole = made(10)
    with pytest.raises(NotRounded):
        whole.add(np.ones(10, np.float32))
    assert whole.total is not None
    assert not whole.total.any()
