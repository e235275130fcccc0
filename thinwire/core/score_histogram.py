"""AUC and F1 of a histogram of scores, on a client and of the sum over clients.

A histogram is a list of two lists: the numbers of negative and of positive examples in each bin, by rising score
(client/train/evaluate.py). Its middle is the score 1/2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

MAX_HISTOGRAMS = 4  # of a reply
MAX_BINS = 512
MAX_COUNT = 2**40  # of one bin: examples of a client
MAX_LETTERS = 58  # of a histogram's name, with the longest ending of a metric's

Histograms: TypeAlias = Mapping[str, list[list[int]]]  # name -> counts of the negatives, counts of the positives


def auc(negatives: Sequence[float], positives: Sequence[float]) -> float | None:
    """Return the area under the ROC curve; None without an example of each class.

    It is the probability that a positive example has a higher score than a negative one; of two in one bin it counts
    half (Hanley and McNeil 1982, "The meaning and use of the area under a ROC curve").

    >>> auc([2, 1], [1, 2])
    0.6666666666666666
    """
    below, found = 0.0, 0.0
    for negative, positive in zip(negatives, positives, strict=True):
        found += positive * (below + negative / 2)
        below += negative
    pairs = below * sum(positives)
    return found / pairs if pairs else None


def f1(negatives: Sequence[float], positives: Sequence[float]) -> float | None:
    """Return the F1 of the positive class at the threshold 1/2; None if no example is positive or taken to be.

    >>> f1([3, 1], [1, 3])
    0.75
    """
    middle = len(positives) // 2
    right, wrong, missed = sum(positives[middle:]), sum(negatives[middle:]), sum(positives[:middle])
    return 2 * right / (2 * right + wrong + missed) if right + wrong + missed else None


def names_of(histograms: Iterable[str]) -> list[str]:
    """Return the names of the metrics of histograms with these names.

    >>> names_of(["sick"])
    ['sick_auc', 'sick_f1']
    """
    return [f"{name}_{ending}" for name in histograms for ending in ("auc", "f1")]


def values(name: str, counts: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the metrics of a histogram: NAME_auc and NAME_f1, as far as they exist.

    >>> values("sick", [[3, 1], [1, 3]])
    {'sick_auc': 0.75, 'sick_f1': 0.75}
    """
    found = dict(zip(names_of([name]), (auc(*counts), f1(*counts)), strict=True))
    return {metric: value for metric, value in found.items() if value is not None}


def own_values(histograms: Histograms) -> dict[str, tuple[float, float]]:
    """Return a client's metrics of its own histograms as (sum, count), the count being its examples."""
    found: dict[str, tuple[float, float]] = {}
    for name, counts in histograms.items():
        total = float(sum(map(sum, counts)))
        found |= {metric: (value * total, total) for metric, value in values(name, counts).items()}
    return found


def checked(raw: object) -> dict[str, list[list[int]]]:
    """Return the histograms of a reply; raise ValueError unless they are within the bounds."""
    if not isinstance(raw, Mapping) or len(raw) > MAX_HISTOGRAMS:
        raise ValueError(f"more than {MAX_HISTOGRAMS} histograms, or none by name")
    for name, counts in raw.items():
        if not isinstance(name, str) or not 0 < len(name) <= MAX_LETTERS or not name.isprintable():
            raise ValueError(f"{str(name)[:80]!r} is no name of a histogram")
        if not (isinstance(counts, list) and len(counts) == 2 and all(isinstance(one, list) for one in counts)):
            raise ValueError(f"the histogram {name!r} has no counts of two classes")
        bins = len(counts[0])
        if bins != len(counts[1]) or bins not in range(2, MAX_BINS + 1, 2):
            raise ValueError(f"the histogram {name!r} has no even number of bins up to {MAX_BINS}")
        if not all(type(n) is int and 0 <= n <= MAX_COUNT for n in (*counts[0], *counts[1])):
            raise ValueError(f"a count of the histogram {name!r} is no whole number up to {MAX_COUNT}")
    return dict(raw)
