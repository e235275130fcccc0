"""Whole-set metrics of a model version, from the sum of its clients' histograms of scores.

From three clients on, `best` and `target` go by a sum in which no client has more than `max_weight` times the examples
of the median client. The value of a client is not clipped, because it has none of its own in the sum.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low

from thinwire.core.score_histogram import MAX_HISTOGRAMS, Histograms, values

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
