"""AUC and F1 of a histogram of scores, on a client and of the sum over clients.

A histogram is a list of two lists: the numbers of negative and of positive examples in each bin, by rising score
(client/train/evaluate.py). Its middle is the score 1/2.

Whole-set metrics of a model version come from the sum of its clients' histograms (`pooled_scores`). From three clients
on, `best` and `target` go by a sum in which no client has more than `max_weight` times the examples of the median
client. The value of a client is not clipped, because it has none of its own in the sum.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import TypeAlias

MEASURED, TRAINED = "eval/", "train/"  # prefixes of a reply's metrics: of the model that was sent, and of training
MAX_METRIC_LETTERS = 64  # of a metric's name after its prefix
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


FEWEST = 3  # clients from which on weights are bounded


@dataclass(frozen=True)
class PooledScores:
    """Holds the metrics of the plain sums; those of sums with bounded weights, if a weight is bounded; and by whom."""

    plain: dict[str, float] = field(default_factory=dict)
    bounded: dict[str, float] = field(default_factory=dict)
    clipped: dict[str, list[str]] = field(default_factory=dict)  # update id -> metrics


def pooled_scores(replies: Mapping[str, Histograms], max_weight: float = math.inf) -> PooledScores:
    """Pool the histograms of a model version, by the update id of their reply.

    A name counts that at least half of the clients with any histogram report, with the number of bins that most of them
    have.

    >>> pooled_scores({"a": {"sick": [[1, 0], [0, 0]]}, "b": {"sick": [[0, 0], [0, 1]]}}).plain
    {'sick_auc': 1.0, 'sick_f1': 1.0}
    """
    found = PooledScores()
    for name in _names(replies.values()):
        said = {update_id: own[name] for update_id, own in replies.items() if name in own}
        bins = Counter(len(counts[0]) for counts in said.values()).most_common(1)[0][0]
        said = {update_id: counts for update_id, counts in said.items() if len(counts[0]) == bins}
        totals = {update_id: sum(map(sum, counts)) for update_id, counts in said.items()}
        plain = values(name, _summed(list(said.values()), [1.0] * len(said)))
        found.plain.update(plain)
        most = max_weight * median_low(totals.values()) if len(said) >= FEWEST else math.inf
        heavy = [update_id for update_id, total in totals.items() if total > most]
        if heavy:
            shares = [min(1.0, most / totals[update_id]) if totals[update_id] else 1.0 for update_id in said]
            found.bounded.update(values(name, _summed(list(said.values()), shares)))
            for update_id in heavy:
                found.clipped.setdefault(update_id, []).extend(plain)
    return found


def _names(replies: Iterable[Histograms]) -> list[str]:
    """Return the names that at least half of the clients with any histogram report."""
    carrying = [own for own in replies if own]
    times = Counter(name for own in carrying for name in own)
    most = sorted((name for name in times if 2 * times[name] >= len(carrying)), key=lambda name: (-times[name], name))
    return sorted(most[:MAX_HISTOGRAMS])


def _summed(histograms: Sequence[list[list[int]]], shares: Sequence[float]) -> list[list[float]]:
    """Return the weighted sum of histograms of the same bins."""
    return [
        [math.fsum(share * n for share, n in zip(shares, each, strict=True)) for each in zip(*lists, strict=True)]
        for lists in zip(*histograms, strict=True)
    ]
