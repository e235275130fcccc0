"""The metrics of a secure round: the scalars of a client's masked vector, and the metrics of their sums.

A metric NAME of `[secure] metrics` has two scalars: NAME is the client's mean, clipped to the bound, times NAME/count,
the examples behind it, in units of bound / 2^METRIC_BITS. A name that begins with `train/` is a metric of training, any
other one of evaluation. A fraction of an example does not count.

A histogram NAME of `[secure] histograms` has a scalar for each count of `evaluate(model, data)`: NAME/0/BIN of the
negative and NAME/1/BIN of the positive examples. From their sums follow NAME_auc and NAME_f1.

A sum that is exact to many digits has few summands that fit it: the sum of three accuracies to 24 bits has one, for a
reader who knows how many examples the clients have. So a mean times its examples is rounded at random to whole units of
2^-10 of the bound, which many combinations of clients add up to, and a histogram has whole examples of all clients.

Invariant: a client counts at most `weight_max` examples in each of them, as its update does. Of a larger test set it
draws that many for the histogram. The draws and the rounding are the client's secret.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from thinwire.core.score_histogram import MAX_BINS, MEASURED, TRAINED, Histograms, values
from thinwire.core.secure_numbers import METRIC_BITS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from thinwire.core.plan import RunPlan
    from thinwire.core.plan_values import SecureSection
    from thinwire.core.prng import SecretRng
    from thinwire.core.types import Metrics

UNIT = 1 << METRIC_BITS


def scalar_names(secure: SecureSection) -> tuple[str, ...]:
    """Return the names of the scalars of all metrics and histograms, in the order of the masked vector.

    >>> from thinwire.core.plan_values import SecureSection
    >>> scalar_names(SecureSection(metrics={"loss": 10.0}))
    ('loss', 'loss/count')
    >>> len(scalar_names(SecureSection(histograms=("sick",))))
    1024
    """
    pairs = (part for name in sorted(secure.metrics) for part in (name, f"{name}/count"))
    return (*pairs, *(bin_ for name in sorted(secure.histograms) for row in _bins(name) for bin_ in row))


def client_scalars(secure: SecureSection, metrics: Metrics, histograms: Histograms, rng: SecretRng) -> dict[str, int]:
    """Return a client's scalars by name: whole numbers that sum. They are 0 for what the client lacks, or is NaN.

    `metrics` and `histograms` are those of a reply's header in the clear.
    """
    made: dict[str, int] = {}
    for name, bound in secure.metrics.items():
        total, count = metrics.get(_in_header(name), (0.0, 0.0))
        mean, counted = total / count if count else math.nan, min(int(count), secure.weight_max)
        counted = 0 if math.isnan(mean) else counted
        made[name] = _rounded(min(max(mean / bound, -1.0), 1.0) * counted * UNIT, rng) if counted else 0
        made[f"{name}/count"] = counted
    for name in secure.histograms:
        counts = np.array(histograms.get(name) or np.zeros((2, MAX_BINS)), np.int64)
        drawn = _drawn(counts.reshape(-1), secure.weight_max, rng)
        made |= {bin_: int(one) for bin_, one in zip([*_bins(name)[0], *_bins(name)[1]], drawn, strict=True)}
    return made


def _rounded(value: float, rng: SecretRng) -> int:
    """Return one of the two nearest whole numbers at random, so that the mean is the value."""
    below = math.floor(value)
    chance = int.from_bytes(rng.random_bytes(8), "little") / 2**64
    return below + (chance < value - below)


def _drawn(counts: NDArray[np.int64], most: int, rng: SecretRng) -> NDArray[np.int64]:
    """Return the counts by bin of `most` examples, drawn without replacement; all of them if there are no more."""
    if (examples := int(counts.sum())) <= most:
        return counts
    keys = np.empty(2 * examples, np.uint32)
    rng.fill(keys)
    chosen = np.argpartition(keys.view(np.uint64), most)[:most]
    return np.bincount(np.repeat(np.arange(counts.size), counts)[chosen], minlength=counts.size)


def unsummed(plan: RunPlan, histograms: Histograms) -> str:
    """Return why a protected run cannot sum these histograms of a client; "" if it can, or needs none of them."""
    if plan.privacy.mode != "off" and histograms:
        return "evaluate(model, data) gave a histogram, and a private run releases none"
    other = [name for name in plan.secure.histograms if len(histograms.get(name, [()])[0]) not in (0, MAX_BINS)]
    return f"the histogram {other[0]!r} has no {MAX_BINS} bins: leave bins out" if other else ""


def may_report(plan: RunPlan) -> bool:
    """Return True if training may report metrics: in a protected run only if it sums one of training under masks."""
    return not plan.is_protected or any(name.startswith(TRAINED) for name in plan.secure.metrics)


def impossible(secure: SecureSection, sums: Mapping[str, int], survivors: int) -> str:
    """Return what no clients of a round have among the sums of so many; "" if all is possible."""
    most = survivors * secure.weight_max
    for name in secure.metrics:
        total, count = sums[name], sums[f"{name}/count"]
        if not 0 <= count <= most or abs(total) > count << METRIC_BITS:
            return f"the sum of {name} is above its bound, or is not of {survivors} clients"
    for name in secure.histograms:
        counts = [sums[bin_] for row in _bins(name) for bin_ in row]
        if min(counts) < 0 or sum(counts) > most:
            return f"the sum of the histogram {name} is not of {survivors} clients"
    return ""


def summed_metrics(secure: SecureSection, sums: Mapping[str, int]) -> Metrics:
    """Return the metrics of the sums as (sum, count), by their names in a header. One that no client had is absent."""
    found = {
        _in_header(name): (sums[name] * bound / UNIT, float(sums[f"{name}/count"]))
        for name, bound in secure.metrics.items()
        if sums[f"{name}/count"] > 0
    }
    for name in secure.histograms:
        counts = [[sums[bin_] for bin_ in row] for row in _bins(name)]
        examples = float(sum(map(sum, counts)))
        found |= {MEASURED + made: (mean * examples, examples) for made, mean in values(name, counts).items()}
    return found


def _in_header(name: str) -> str:
    return name if name.startswith(TRAINED) else MEASURED + name


def _bins(name: str) -> list[list[str]]:
    """Return the names of the scalars of a histogram: of the negatives, then of the positives."""
    return [[f"{name}/{label}/{place}" for place in range(MAX_BINS)] for label in (0, 1)]
