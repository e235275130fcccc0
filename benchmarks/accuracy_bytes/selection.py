"""Which chain goes to the fresh seeds: decided on seeds A alone, by rules that stood here before any of them ran.

What an accuracy is was changed once after the digits' seeds A had run, and they were judged again: see changed.py.

1. Every candidate runs on the first few seeds A. Those whose mean difference to fp32 is above -0.5 points stay: at most
   six, the ones with the highest ratio, and the fallback.
2. These run on all seeds A. Selected is the highest ratio among those that seeds B may be expected to pass: the mean
   less one standard error of A (the best of many looks better than it is) less what the bound on B takes is above
   -0.5 points. The standard deviation is pooled over all chains of this step, since a few seeds tell little of one.
3. Nothing passes: the fallback is selected.

Finalists are the selected chain and the three others that came closest: the passing ones by ratio, then the rest by
their mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.accuracy_bytes.bound import MARGIN, Paired, quantile
from benchmarks.accuracy_bytes.trials import Chain

FALLBACK = Chain("stc(0.04)")  # fixed in advance: what the figure is of where the selected chain fails on B
WORST = -MARGIN  # points: the mean difference under which a candidate is out after the first seeds
STAY = 6
FINALISTS = 4


@dataclass(frozen=True)
class Judged:
    """A candidate on seeds A. `ratio`: payload bytes up of fp32 over the chain's at equal rounds."""

    chain: Chain
    rate: float
    ratio: float
    paired: Paired
    expected: float = -math.inf  # the bound that B is expected to find, less a standard error of A

    @property
    def passes(self) -> bool:
        return self.expected > -MARGIN


@dataclass(frozen=True)
class Selected:
    chain: Chain
    rate: float
    why: str
    finalists: tuple[Judged, ...]


def staying(judged: Sequence[Judged]) -> list[Judged]:
    """Who goes on after the first seeds; the fallback always does."""
    good = [one for one in judged if one.paired.mean > WORST and one.chain != FALLBACK]
    good.sort(key=lambda one: (-one.ratio, one.chain.name))
    return good[:STAY] + [one for one in judged if one.chain == FALLBACK]


def expectations(judged: Sequence[Judged], seeds_b: int) -> list[Judged]:
    """The same with what B may be expected to find."""
    freedom = sum(one.paired.seeds - 1 for one in judged)
    squares = sum(one.paired.sd**2 * (one.paired.seeds - 1) for one in judged if one.paired.seeds > 1)
    sd = math.sqrt(squares / freedom) if freedom else math.inf
    takes = quantile(seeds_b - 1) / math.sqrt(seeds_b)
    return [
        Judged(
            one.chain, one.rate, one.ratio, one.paired, one.paired.mean - sd * (1 / math.sqrt(one.paired.seeds) + takes)
        )
        for one in judged
    ]


def select(judged: Sequence[Judged], rates: Mapping[Chain, float], seeds_b: int) -> Selected:
    told = expectations(judged, seeds_b)
    passing = sorted((one for one in told if one.passes), key=lambda one: (-one.ratio, one.chain.name))
    others = sorted((one for one in told if not one.passes), key=lambda one: (-one.paired.mean, one.chain.name))
    finalists = tuple((passing + others)[:FINALISTS])
    if not passing:
        return Selected(FALLBACK, rates[FALLBACK], "nothing passed on seeds A: the chain fixed in advance", finalists)
    best = passing[0]
    return Selected(best.chain, best.rate, "the highest ratio of those that passed on seeds A", finalists)
