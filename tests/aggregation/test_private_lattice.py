"""Lattice points with noise: a bounded norm whatever the update is, noise on every coordinate, and sums that fit."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.support.lattices import drawn, summed
from tests.support.scripted_rng import ScriptedRng
from thinwire.aggregation import codecs, private_lattice
from thinwire.aggregation.lattice import BadSum, Points
from thinwire.aggregation.plan_codecs import lattice_of, noised_dimensions
from thinwire.aggregation.private_lattice import NotRounded, PrivateLattice
from thinwire.compression import native
from thinwire.core import Key, RunPlan
from thinwire.core.errors import NonFiniteUpdate
from thinwire.core.types import SecureWork
from thinwire.privacy.noise_plan import NoisePlan

SIZE, CLIENTS = 3000, 10


def plan_of(clients: int = CLIENTS, noise: float = 1.0, support: float = 1.0, more: str = "") -> RunPlan:
    return RunPlan.parse(f"""
        [run]
        task = "toy"
        rounds = 10
        evaluate = "off"
        [cohort]
        clients = {clients}
        deadline_s = 60
        late = "drop"
        [local]
        lr = 1.0
        steps = 1
        buffers = "local"
        [secure]
        enabled = true
        max_corrupt = 0.1
        max_dropout = 0.2
        support = {support}
        [privacy]
        mode = "distributed"
        clip = 2.0
        noise_multiplier = {noise}
        delta = 1e-3
        {more}""")


def lattice(size: int = SIZE, clients: int = CLIENTS, **changes: Any) -> PrivateLattice:
    made = lattice_of(plan_of(clients, **changes), size, SecureWork(clients, 0, 2.0), "run-identity")
    assert isinstance(made, PrivateLattice)
    return made


class Silent:
    """Draws no noise."""

    def fill(self, out: NDArray[np.int32], rng: object) -> None:
        del rng
        out[:] = 0


def noiseless(made: PrivateLattice) -> Any:
    return patch.object(NoisePlan, "sampler", Silent())


def encoded(made: PrivateLattice, x: Any, seed: int = 1, window: int = 0) -> Points:
    return made.encode(x, 1, window, Key(11), ScriptedRng(seed))


def integers(made: PrivateLattice, points: Points) -> NDArray[np.int64]:
    kind = np.int16 if made.dtype.itemsize == 2 else np.int32
    return points.lanes[: made.padded].view(kind).astype(np.int64)


@given(st.integers(1, 5000), st.integers(-40, 30), st.integers(0, 2**20), st.booleans())
@settings(max_examples=60)
def test_the_norm_of_a_clients_integers_is_bounded_whatever_its_update_is(
    size: int, power: int, seed: int, spike: bool
) -> None:
    made, rng = lattice(size), np.random.default_rng(seed)
    x = np.zeros(size, np.float32)
    if spike:
        x[rng.integers(size)] = 2.0**power
    else:
        x[:] = rng.standard_normal(size) * 2.0**power
    with noiseless(made):
        found = integers(made, encoded(made, x, seed))
    assert int(np.sum(found**2)) <= made.most_squared


def test_an_update_of_zeros_is_encoded_and_stays_zeros() -> None:
    made = lattice()
    with noiseless(made):
        points = encoded(made, np.zeros(SIZE, np.float32))
    assert not integers(made, points).any()


@pytest.mark.parametrize("support", [1.0, 0.25])
def test_without_noise_the_sum_is_that_of_the_clipped_updates_over_all_selected_clients(support: float) -> None:
    made = lattice(support=support)
    window = made.walk.windows - 1
    updates = [drawn(SIZE, seed, norm) for seed, norm in enumerate([0.5, 2.0, 30.0])]
    left = [update.copy() for update in updates]
    with noiseless(made):
        points = [encoded(made, x, seed, window) for seed, x in enumerate(left)]
    mean = made.decode_sum(summed(points), 3, 3, window, Key(11))
    sent = [update - rest for update, rest in zip(updates, left, strict=True)]
    assert np.linalg.norm(sent[2]) <= 2.0 * math.sqrt(1.05 * 1.05)
    assert mean == pytest.approx(sum(sent) / CLIENTS, abs=1e-4)
    on = np.zeros(SIZE, bool)
    on[made.walk.indices(window)] = True
    assert not mean[~on].any()


def test_what_stays_on_the_client_does_not_depend_on_the_noise() -> None:
    made = lattice()
    noised, silent = drawn(SIZE, 3, 5.0), drawn(SIZE, 3, 5.0)
    first = encoded(made, noised, seed=4)
    with noiseless(made):
        second = encoded(made, silent, seed=4)
    assert noised.tobytes() == silent.tobytes()
    assert first.lanes.tobytes() != second.lanes.tobytes()


@pytest.mark.parametrize("noise", [0.5, 8.0])  # lanes of 16 and of 32 bits
def test_every_coordinate_gets_noise_of_the_planned_variance_padding_included(noise: float) -> None:
    made = lattice(size=40_000, noise=noise)
    assert made.padded > 40_000
    found = integers(made, encoded(made, np.zeros(40_000, np.float32)))
    for part in (found[:40_000], found[40_000:]):
        spread = math.sqrt(2 / part.size)  # of an estimated variance of Gaussian noise
        assert part.var() == pytest.approx(made.noise.variance, rel=5 * spread)
        assert abs(part.mean()) < 5 * math.sqrt(made.noise.variance / part.size)
    honest = made.noise.release.parties
    assert made.noise.variance * honest == pytest.approx((noise * made.noise.scale) ** 2)


def test_the_worst_sum_of_all_clients_with_noise_does_not_wrap_around() -> None:
    """All clients send one update, and all of it lies in one block: no cohort has larger coordinates."""
    clients, size = 60, 65_536 * 3
    made = lattice(size, clients)
    update = np.zeros(size, np.float32)
    update[65_536 : 2 * 65_536] = drawn(65_536, 5, 2.0)
    points = [encoded(made, update.copy(), seed) for seed in range(clients)]
    mean = made.decode_sum(summed(points), clients, clients, 0, Key(11))
    noise = 2.0 * math.sqrt(clients / made.noise.release.parties) / clients
    assert float(np.sqrt(np.mean((mean - update) ** 2))) == pytest.approx(noise, rel=0.02)


def test_a_sum_with_a_mask_left_on_is_found() -> None:
    made = lattice()
    total = encoded(made, drawn(SIZE)).lanes + np.random.default_rng(1).integers(0, 1 << 16, made.lanes).astype(
        made.dtype
    )
    with pytest.raises(BadSum, match="check lanes"):
        made.decode_sum(total, 1, 1, 0, Key(11))


def test_an_update_that_no_attempt_rounds_within_the_bound_is_not_sent_and_stays() -> None:
    made, x = lattice(), drawn(SIZE)
    made.most_squared = -1
    with patch.object(private_lattice, "ATTEMPTS", 3), pytest.raises(NotRounded):
        encoded(made, x)
    assert x.tobytes() == drawn(SIZE).tobytes()


def test_infinity_is_refused() -> None:
    made, x = lattice(), drawn(SIZE)
    x[7] = np.inf
    with pytest.raises(NonFiniteUpdate):
        encoded(made, x)


def test_kernels_and_numpy_make_the_same_points() -> None:
    made = lattice(70_000)
    first = encoded(made, drawn(70_000, 8, 3.0), seed=9).lanes
    with native.using("numpy"):
        second = encoded(made, drawn(70_000, 8, 3.0), seed=9).lanes
    assert first.tobytes() == second.tobytes()


def test_an_aggregator_that_names_another_number_of_clients_or_another_clip_gets_no_lattice() -> None:
    """The noise of a client follows from both, and the plan that the device has read says both."""
    for work in (SecureWork(CLIENTS + 1, 0, 2.0), SecureWork(CLIENTS, 0, 4.0)):
        with pytest.raises(ValueError, match="not those of the plan"):
            lattice_of(plan_of(), SIZE, work, "run-identity")


def test_a_smaller_support_gets_noise_on_fewer_coordinates() -> None:
    whole, part = (noised_dimensions(plan_of(support=support), 200_000) for support in (1.0, 0.1))
    assert (whole, part) == (262_144, 32_768)


@pytest.mark.parametrize("clip", [5.2e-318, 2.0**-61])
def test_a_clip_that_float32_cannot_bound_is_refused(clip: float) -> None:
    """With a denormal clip the clipped norm was off by a third: whether the rounding failed told of one update."""
    plan = plan_of()
    made = RunPlan.from_json({**plan.to_json(), "privacy": {**plan.to_json()["privacy"], "clip": clip}})
    with pytest.raises(ValueError, match="is not between"):
        lattice_of(made, SIZE, SecureWork(CLIENTS, 0, clip), "run-identity")
    assert any(f"clip = {clip}" in refused.what for refused in made.check(codecs))


def test_the_squared_norm_of_the_largest_coordinates_is_exact() -> None:
    most = lattice().terms.most
    lanes = np.full(1 << 18, most, np.uint32)
    assert private_lattice._squared(lanes) == (1 << 18) * most**2 > 2**61
