"""Server optimizers against their papers, written out plainly in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.codec_examples import made
from thinwire.aggregation import optimizers
from thinwire.aggregation.server_optimizers import server_optimizer
from thinwire.core.errors import CodecError
from thinwire.core.plan_schema import ServerSection
from thinwire.core.types import State

SECONDS = {
    "fedadam": lambda v, d: 0.99 * v + 0.01 * d * d,
    "fedyogi": lambda v, d: v - 0.01 * d * d * np.sign(v - d * d),
    "fedadagrad": lambda v, d: v + d * d,
}


@pytest.mark.parametrize("name", SECONDS)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), momentum=st.sampled_from([0.0, 0.9]), size=st.sampled_from([1, 300, 70_000]))
@example(seed=111, momentum=0.0, size=70_000)
def test_adaptive_steps_are_algorithm_2_of_reddi_et_al(name: str, seed: int, momentum: float, size: int) -> None:
    ours = server_optimizer(ServerSection(optimizer=name, lr=0.1, momentum=momentum))
    params, state = np.zeros(size, np.float32), State()
    x, m, v = np.zeros(size), np.zeros(size), np.full(size, 1e-6)
    apart = np.full(size, True)  # from Yogi's jump, where float32 and float64 may fall on different sides
    for step in range(5):
        change = made(size, seed + step, "normal", -3)
        apart &= np.abs(v - change.astype(np.float64) ** 2) > 1e-5 * v
        m = momentum * m + (1 - momentum) * change
        v = SECONDS[name](v, change.astype(np.float64))
        x += 0.1 * m / (np.sqrt(v) + 1e-3)
        params, state = ours.step(params, change, state)
    assert np.count_nonzero(~apart) <= size / 1000
    np.testing.assert_allclose(params[apart], x[apart], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(state["second"][apart], v[apart], rtol=1e-4)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), momentum=st.floats(0, 0.99))
def test_fedavgm_adds_up_what_momentum_leaves(seed: int, momentum: float) -> None:
    ours = server_optimizer(ServerSection(optimizer="fedavgm", lr=0.5, momentum=momentum))
    params, state, x, v = np.zeros(300, np.float32), State(), np.zeros(300), np.zeros(300)
    for step in range(5):
        change = made(300, seed + step, "normal", 0)
        v = momentum * v + change
        x += 0.5 * v
        params, state = ours.step(params, change, state)
    np.testing.assert_allclose(params, x, rtol=1e-4, atol=1e-4)


def test_fedavgm_without_momentum_is_fedavg() -> None:
    change = made(300, 1, "normal", 0)
    ours = server_optimizer(ServerSection(optimizer="fedavgm", momentum=0.0))
    params, _ = ours.step(np.zeros(300, np.float32), change.copy(), {})
    plain, _ = server_optimizer(ServerSection()).step(np.zeros(300, np.float32), change.copy(), {})
    assert params.tobytes() == plain.tobytes()


@pytest.mark.parametrize("name", list(optimizers))
def test_a_change_that_is_zero_moves_nothing_at_first(name: str) -> None:
    ours = server_optimizer(ServerSection(optimizer=name))
    params, _ = ours.step(np.ones(10, np.float32), np.zeros(10, np.float32), {})
    assert (params == 1).all()


@pytest.mark.parametrize("name", SECONDS)
def test_squares_that_overflow_stop_a_coordinate_and_make_nothing_infinite(name: str) -> None:
    ours, params, state = server_optimizer(ServerSection(optimizer=name)), np.zeros(2, np.float32), State()
    for _ in range(3):
        params, state = ours.step(params, np.array([1e30, 1], np.float32), state)
    assert np.isfinite(params).all()
    assert all(np.isfinite(array).all() for array in state.values())


def test_a_key_that_the_optimizer_does_not_know_is_refused() -> None:
    with pytest.raises(CodecError, match="beta2 with optimizer = 'fedadagrad'"):
        server_optimizer(ServerSection(optimizer="fedadagrad", beta2=0.5))
