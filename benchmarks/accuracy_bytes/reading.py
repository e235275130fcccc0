"""What is read from finished cells: accuracies in points, and how they rise over the rounds."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from thinwire.reports.sweep_results import Trial

METRIC = "accuracy"
POINTS = 100.0
Curve = dict[int, float]  # round -> points, of the rounds whose model was measured


def accuracy(cell: Trial) -> float:
    """Points, as the mean over the models of the last quarter of the rounds; a run that failed has none.

    One model's accuracy jumps by points with who was selected in its round: that of the last one alone tells chains
    apart that are the same (docs/evidence/accuracy-bytes.md, "The first result").
    """
    if cell.status != "done":
        return 0.0
    rounds = len(cell.rounds)
    late = over(curve(cell), rounds - rounds // 4 + 1, rounds)
    return POINTS * cell.metrics.get(METRIC, 0.0) if late is None else late


def accuracies(cells: Sequence[Trial]) -> list[float]:
    return [accuracy(cell) for cell in cells]


def curve(cell: Trial) -> Curve:
    found = enumerate(cell.rounds, start=1)
    return {number: POINTS * one.metrics[METRIC] for number, one in found if METRIC in one.metrics}


def mean_curve(cells: Sequence[Trial]) -> Curve:
    """Of the rounds that all of them measured."""
    curves = [curve(cell) for cell in cells]
    common = set.intersection(*(set(one) for one in curves)) if curves else set()
    return {number: fmean(one[number] for one in curves) for number in sorted(common)}


def over(curve: Curve, first: int, last: int) -> float | None:
    """The mean of the rounds from `first` to `last`, both included."""
    found = [value for number, value in curve.items() if first <= number <= last]
    return fmean(found) if found else None
