"""The noise of a private run, computed from its plan and public numbers alone: `NoisePlan`.

The aggregator, each client and `thinwire privacy plan` compute it for themselves and get the same. A client that gets
an assignment decides by its own result whether it takes part, not by what the aggregator says.

All clients' updates are scaled down to an L2 norm of at most `clip`, and rounded to a grid with `scale` steps a clip.
After that the squared norm of the integers is at most `squared_sensitivity(scale, dimensions)`: that is how much one
client can move the sum. The noise in the sum has a standard deviation of `noise_multiplier` times the clip.

- central: the aggregator adds the noise once, to the sum.
  With `mechanism = "tree"` a node of a tree gets it in place of a round (`tree_aggregation`), and the cost of a
  participation in all nodes is that of one release of more sensitivity.
- local: each client adds the noise to its own update, before anyone sees it. Any other update in its place moves it by
  at most twice the bound. So there the noise is in multiples of twice the clip.
- example: each device adds noise to the sum of its records' clipped gradients, at each of its `[local] steps`. The
  cost is of one record, which is in the sum of a step with the probability batch / records. The plan gives both, and
  the sum is divided by batch. So neither depends on how many records a device has.
- distributed: each client adds its part. The cost is that of the fewest honest clients whose noise is in a sum:
  `honest` = the fewest survivors (`fewest_survivors`) less the corrupt clients, who subtract their own noise. So each
  client adds 1 / honest of the variance, and a sum of all clients has more noise than the cost says.

Unit of privacy: all data of one client, or in mode example one record of it. `participations` is the largest number of
rounds in which one client takes part, and the cost of a run is that of so many releases. With
`[privacy] sampling_rate` a client takes part in each round with that probability, and pays for every round of the run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from thinwire.core.plan import RunPlan
from thinwire.core.plan_values import PrivacySection, SecureSection
from thinwire.core.privacy_numbers import (
    MAX_DEVIATION,
    count_ratio,
    padded_dimensions,
    squared_sensitivity,
    width_for,
)
from thinwire.core.secure_numbers import fewest_survivors, rotation_block, share_of
from thinwire.privacy.accounting import Release, epsilon, noise_for
from thinwire.privacy.samplers import TableSampler
from thinwire.privacy.tree_aggregation import booked, cost_factor, length_of

CENTRAL_STEPS = 4.0  # grid steps a clip, times the root of the dimensions: rounding adds 1 percent to the sensitivity
LEAST_STEPS = 256.0
DISTANCE = 2.0**-100  # of one draw of a `TableSampler`, at most


@dataclass(frozen=True)
class NoisePlan:
    """Gives the grid and the noise of each round of a run, and what one round costs a client that takes part.

    `scale` is the number of grid steps a clip, `variance` the noise of one source (the aggregator, or one client) in
    squared steps, and `width` the bits of a lane of the masked sum, 0 without one. `count` is what a client adds to the
    count that an adaptive clip follows, or subtracts from it, in steps; 0 without one.
    """

    release: Release
    noise_multiplier: float
    scale: float
    variance: float
    width: int
    participations: int
    count: int = 0

    def epsilon(self, delta: float, rounds: int | None = None) -> float:
        """Return epsilon of a client after so many rounds in which it took part; by default after the most."""
        return epsilon({self.release: self.participations if rounds is None else rounds}, delta)

    @property
    def sampler(self) -> TableSampler:
        """Return the source of one draw of the noise; it is made once for each variance."""
        return sampler_of(self.release.distribution, self.variance)


@lru_cache(maxsize=4)  # a table has a few megabytes, and the rounds of a run have the same
def sampler_of(distribution: str, variance: float) -> TableSampler:
    """Return the sampler of noise with this distribution and variance."""
    made = TableSampler.skellam(variance) if distribution == "skellam" else TableSampler.discrete_gaussian(variance)
    if made.distance > DISTANCE:
        raise ValueError(f"a draw of {distribution} noise of variance {variance:g} is too far from its distribution")
    return made


def participations_of(plan: RunPlan) -> int:
    """Return the largest number of rounds of a run in which one client takes part."""
    return most_participations(plan.privacy, plan.run.rounds)


def most_participations(privacy: PrivacySection, rounds: int) -> int:
    """Return the largest number of these rounds in which one client takes part."""
    return min(-(-rounds // privacy.min_separation), privacy.max_participations or rounds)


def share_of_participation(plan: RunPlan) -> int:
    """Return what a participation costs in a run with `mechanism = "tree"`, in multiples of what a node costs."""
    length, participations = length_of(plan.privacy, plan.run.rounds), participations_of(plan)
    return cost_factor(length, plan.privacy.min_separation, participations)


def honest_survivors(secure: SecureSection, selected: int) -> int:
    """Return the fewest honest clients in a sum of a round that selects so many clients."""
    return fewest_survivors(secure, selected, noised=True) - share_of(secure.max_corrupt, selected)


def noise_plan(plan: RunPlan, dimensions: int, selected: int) -> NoisePlan:
    """Return the noise of a plan with a `[privacy] mode`.

    `dimensions` is the number of coordinates that get noise (distributed: padded ones), and `selected` the number of
    clients of a round.
    """
    honest = honest_survivors(plan.secure, selected) if plan.privacy.mode == "distributed" else 1
    block = padded_dimensions(dimensions, rotation_block(plan.secure))[1] if plan.secure.enabled else 1
    clients = plan.cohort.clients
    counted = clients if plan.privacy.adaptive and isinstance(clients, int) else 0
    privacy, local, sampled = plan.privacy, plan.local, (plan.privacy.sampling_rate or 1.0, 1)
    if privacy.mode == "example":
        if privacy.records is None or not isinstance(local.steps, int):  # a device gets plans that nobody has checked
            raise ValueError("[privacy] records and [local] steps give the cost of noised steps")
        sampled = local.batch / privacy.records, local.steps
    return _noise_plan(
        privacy, sampled, honest, plan.run.rounds, participations_of(plan), dimensions, selected, block, counted
    )


def spending(plan: RunPlan, dimensions: int, selected: int = 1) -> tuple[str, str]:
    """Return in which population a client spends in one round of a plan, and what: the JSON of the release.

    `dimensions` and `selected` are those of `noise_plan`. A client knows that it was sampled, so for its own ledger
    sampling amplifies nothing.
    """
    release = noise_plan(plan, dimensions, selected).release
    if plan.privacy.sampling_rate is not None:
        release = replace(release, rate=1.0)
    return plan.privacy.population or plan.run.task, release.to_json()


@lru_cache(maxsize=8)
def _noise_plan(
    privacy: PrivacySection, sampled: tuple[float, int], honest: int, rounds: int, participations: int, dimensions: int,
    selected: int, block: int, counted: int,
) -> NoisePlan:  # fmt: skip
    distributed = privacy.mode == "distributed"
    clips = 2 if privacy.mode == "local" else 1  # by how many clips one client moves what the noise hides

    def made(multiplier: float) -> NoisePlan:
        ratio = count_ratio(counted, multiplier) if counted else 0.0
        of_update = multiplier * math.sqrt(1 + ratio**2)  # the noise in clips, where the count takes its share
        if distributed:
            width, scale = width_for(selected, dimensions, block, of_update, rounds, honest)
        else:
            finest = MAX_DEVIATION / (clips * of_update)
            width, scale = 0, min(max(LEAST_STEPS, CENTRAL_STEPS * math.sqrt(dimensions)), finest)
        count = max(1, round(ratio * scale)) if counted else 0
        squared = squared_sensitivity(scale, dimensions) + count**2
        variance = (clips * multiplier) ** 2 * (scale**2 + count**2)
        is_sum = distributed and privacy.noise == "discrete-gaussian"
        distribution = "discrete-gaussian-sum" if is_sum else privacy.noise
        release = Release(
            distribution, clips * math.sqrt(squared), variance, dimensions + bool(count), honest if distributed else 1,
            sampled[0], DISTANCE, sampled[1], "record" if privacy.mode == "example" else "client",
        )  # fmt: skip
        if privacy.mechanism == "tree":
            release = booked(release, length_of(privacy, rounds), privacy.min_separation, participations)
        return NoisePlan(release, multiplier, scale, variance / honest, width, participations, count)

    if privacy.noise_multiplier is not None:
        return made(privacy.noise_multiplier)
    if privacy.target_epsilon is None:
        raise ValueError("neither noise_multiplier nor target_epsilon says how much noise is added")
    return made(noise_for(privacy.target_epsilon, privacy.delta, lambda z: made(z).release, participations))
