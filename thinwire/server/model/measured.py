"""Metrics of many clients as one: sums and counts are pooled, so that every example weighs the same."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from thinwire.core.types import Metrics


def pooled(all_metrics: Iterable[Metrics], prefix: str) -> dict[str, float]:
    """Sum over sums divided by sum over counts, of the metrics whose names begin with `prefix` (which is cut off).

    >>> pooled([{"eval/loss": (3.0, 2.0)}, {"eval/loss": (1.0, 2.0)}], "eval/")
    {'loss': 1.0}
    """
    sums: dict[str, list[float]] = {}
    for metrics in all_metrics:
        for name, (total, count) in metrics.items():
            if name.startswith(prefix):
                entry = sums.setdefault(name.removeprefix(prefix), [0.0, 0.0])
                entry[0] += total
                entry[1] += count
    return {name: total / count for name, (total, count) in sorted(sums.items()) if count > 0}


def spread(all_metrics: Iterable[Metrics], prefix: str) -> dict[str, list[float]]:
    """For each metric the least and the greatest value that one client had."""
    values: dict[str, list[float]] = {}
    for metrics in all_metrics:
        for name, (total, count) in metrics.items():
            if name.startswith(prefix) and count > 0:
                values.setdefault(name.removeprefix(prefix), []).append(total / count)
    return {name: [min(seen), max(seen)] for name, seen in sorted(values.items())}


def better(metric: str, new: float, old: float | None) -> bool:
    """Whether a value beats the best so far: loss is minimised, everything else maximised; NaN never wins."""
    if math.isnan(new):
        return False
    if old is None:
        return True
    return new < old if metric == "loss" else new > old


def reached(metrics: Mapping[str, float], metric: str, value: float) -> bool:
    """Whether a target is met: loss at most `value`, everything else at least."""
    if metric not in metrics:
        return False
    return metrics[metric] <= value if metric == "loss" else metrics[metric] >= value
