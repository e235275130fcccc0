"""Noise that a client adds itself: to its update (`[privacy] mode = "local"`), or in its training (`"example"`).

`noised` is for local mode. The update is clipped and rounded to a grid, and gets integer noise, by the same code as the
aggregator's sum (`aggregation.private_lattice`). Only then it is a float again. What follows, the codec and the
network, is post-processing: whatever they do, the guarantee stays. So the order is

    train -> clip -> round -> noise -> scale -> encode -> commit -> send

and no number of the update before its noise is kept, committed or sent. A retry after a crash trains and draws again,
and only a committed reply leaves the device, so two draws on one update are never seen.

`release_of` is what the device's own ledger books for an assignment of any mode.

`private_steps` and `DeviceSecrets` are for example mode, whose steps `train/private.py` makes. The worker process has
no other part of Thinwire, so it gets its secret randomness from here.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

import numpy as np

from thinwire.client.train.layout import Key
from thinwire.client.train.protocol import PrivateSteps, TrainResult
from thinwire.compression.vector_ops import finite
from thinwire.core.errors import NonFiniteUpdate
from thinwire.core.personal_layers import shared_layout
from thinwire.core.records import replace

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thinwire.aggregation.private_lattice import Draw
    from thinwire.client.calls import Say
    from thinwire.core.layout import Layout
    from thinwire.core.plan import RunPlan
    from thinwire.core.prng import SecretRng
    from thinwire.core.types import Vector


def without_divergence(
    done: TrainResult, raw_update: Vector, kept: Vector | None, buffers: Vector | None, say: Say
) -> TrainResult:
    """Return a protected training's result; if it is not finite, `kept` and `buffers` are as before it.

    Then `raw_update`, its update, becomes zeros, in place. A failure instead would leave the device without noise and
    without masks: an aggregator may send a model that only a record above some value drives to infinity, and would
    learn of that record as often and as exactly as it likes.
    """
    vectors = [vector for vector in (raw_update, done.kept, done.buffers) if vector is not None]
    if all(map(finite, vectors)) and math.isfinite(done.loss[0]):
        return done
    say("training diverged: an update of zeros is sent, which tells nothing of it")
    raw_update.fill(0.0)
    begun_with = done.buffers if buffers is None else buffers
    return replace(done, kept=kept, buffers=begun_with, state=None, loss=(0.0, 0.0), reported={})


def noised(
    update: Vector, plan: RunPlan, layout: Layout, rng: SecretRng | None = None, draw: Draw | None = None
) -> Vector:
    """Return an update of the model's size, clipped and with the noise of its plan; `update` is donated.

    Its cost is the release of `privacy.noise_plan.spending`: whatever the update is, another one in its place would
    change the probability of each result no more than that. `rng` and `draw` are replaced by tests only. Raise
    `NonFiniteUpdate` for NaN or infinity, and `NotRounded` if no attempt rounds the update within its bound.

    Invariant: each call draws fresh noise, and the result is used once.
    """
    from thinwire.aggregation.private_lattice import PrivateSum, clip_layers  # here: without private runs none is used
    from thinwire.privacy.noise_plan import noise_plan
    from thinwire.privacy.secret_rng import SystemRng

    assert plan.privacy.clip is not None, "the plan check demands it"
    secret, noise = rng or SystemRng(), noise_plan(plan, update.size, 1)
    if plan.privacy.clipping == "per-layer":
        clip_layers(update, layout.model_tensors, plan.privacy.clip)
    alone = PrivateSum(update.size, plan.privacy.clip, noise.scale, 1, secret)
    alone.add(update)
    sampler = noise.sampler
    return alone.release(draw or (lambda out: sampler.fill(out, secret)))


def release_of(plan: RunPlan, layout: Layout, selected: int) -> tuple[str, str]:
    """Return in which population an assignment to train spends, and what: the JSON of the release.

    `layout` is that of the task's whole model, and `selected` the clients of a secure round, 1 without one. Personal
    layers get no noise: with them the release would be one of more dimensions, on another grid. Raise `PlanError` if
    the plan's globs do not fit the model.
    """
    from thinwire.aggregation.plan_codecs import noised_dimensions  # here: without private runs none is used
    from thinwire.privacy.noise_plan import spending

    size = shared_layout(layout, plan.local.personal_layers).model_size
    return spending(plan, noised_dimensions(plan, size), selected)


def private_steps(plan: RunPlan, size: int) -> PrivateSteps:
    """Return the numbers of the private steps of a plan with `mode = "example"`, for a model of this size.

    They follow from the plan alone. The steps and batches of an assignment are ignored, because the ledger books those
    of the plan.
    """
    from thinwire.privacy.noise_plan import noise_plan

    noise, clip = noise_plan(plan, size, 1), plan.privacy.clip
    assert clip is not None, "the plan check demands it"
    return PrivateSteps(
        noise.release.steps, plan.local.batch, noise.release.rate, clip, noise.scale, noise.variance, size
    )


COIN_BITS = 32


class DeviceSecrets:
    """The secret randomness of private steps: sums with noise, coins of records and seeds; it is `train.Secrets`.

    `rng` is replaced by tests only.
    """

    def __init__(self, rng: SecretRng | None = None) -> None:
        from thinwire.privacy.secret_rng import SystemRng

        self.rng: SecretRng = rng or SystemRng()

    def sum_of(self, work: PrivateSteps) -> NoisedGradients:
        """Return an empty sum for a step."""
        return NoisedGradients(work, self.rng)

    def coins(self, count: int, rate: float) -> NDArray[np.intp]:
        """Return the indices of the records in a batch: each with the probability `rate`, rounded down to 2^-32."""
        words = np.empty(count, np.uint32)
        self.rng.fill(words)
        return np.flatnonzero(words < np.uint64(rate * 2.0**COIN_BITS))

    def key(self) -> Key:
        """Return a key that nobody can guess."""
        drawn = self.rng.random_bytes(16)
        return Key(int.from_bytes(drawn[:8], "little"), int.from_bytes(drawn[8:], "little"))


class NoisedGradients:
    """The sum of one step's clipped gradients: integers, as in the aggregator's sum, with discrete Gaussian noise."""

    def __init__(self, work: PrivateSteps, rng: SecretRng) -> None:
        from thinwire.aggregation.private_lattice import PrivateSum
        from thinwire.privacy.noise_plan import sampler_of

        self._rng, self._sampler = rng, sampler_of("discrete-gaussian", work.variance)
        self._sum = PrivateSum(work.dimensions, work.clip, work.scale, work.batch, rng)

    def add(self, vector: Vector) -> None:
        """Clip a gradient and add it; one with NaN or infinity counts as zero, so that it ends nothing."""
        with contextlib.suppress(NonFiniteUpdate):
            self._sum.add(vector)

    def release(self) -> Vector:
        """Return the noised sum divided by the plan's batch."""
        return self._sum.release(lambda out: self._sampler.fill(out, self._rng))
