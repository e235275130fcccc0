"""Whether a chain costs accuracy: the paired one-sided 95 % bound of (codec - fp32).

Cells of one seed share first model, cut of the data, draws of clients and batches, so their difference says more than
either of them. Student's t over seeds: the true mean difference lies above the bound in 95 of 100 such experiments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy.special import stdtrit

CONFIDENCE = 0.95
MARGIN = 0.5  # points


@dataclass(frozen=True)
class Paired:
    """Points: mean and standard deviation of the differences, and what the mean is at least."""

    seeds: int
    mean: float
    sd: float
    bound: float

    @property
    def non_inferior(self) -> bool:
        return self.bound > -MARGIN


def paired(codec: Sequence[float], fp32: Sequence[float]) -> Paired:
    """Accuracies of the same seeds in the same order; of a single pair nothing is known.

    >>> paired([90.0, 91.0, 92.0], [90.0, 91.0, 92.0]).bound
    0.0
    """
    differences = [one - other for one, other in zip(codec, fp32, strict=True)]
    if len(differences) < 2:
        return Paired(len(differences), fmean(differences), math.inf, -math.inf)
    mean, sd = fmean(differences), stdev(differences)
    return Paired(len(differences), mean, sd, mean - quantile(len(differences) - 1) * sd / math.sqrt(len(differences)))


def quantile(freedom: int) -> float:
    """Of Student's t."""
    return float(stdtrit(freedom, CONFIDENCE))
