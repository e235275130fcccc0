"""A lower bound on epsilon from guesses about one run, by Steinke, Nasr and Jagielski 2023.

"Privacy Auditing with One (1) Training Run": each of m canaries is included with probability 1/2, by its own coin. An
attacker sees what was released, and guesses the coins of r canaries; r is chosen before. If the mechanism is (epsilon,
delta)-private towards each canary, then for every v (theorem 5.2, with beta and alpha of W ~ Binomial(r, q), q =
1 / (1 + e^-epsilon)):

    P(at least v guesses are right) <= P(W >= v) + 2 m delta max over 1 <= i <= m of P(v > W >= v - i) / i

An epsilon for which the right side is below 0.05 is refuted. The largest one is the bound, with 95 % confidence. For
delta = 0 that is the logit of the bound of Clopper and Pearson.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
SEARCHED = 40  # bisections of an interval of length 1


def right_guesses(scores: NDArray[np.floating], included: NDArray[np.bool_], guesses: int) -> int:
    """Return how many guesses are right: the highest half is guessed as included, the lowest as not.

    `scores` (m,) are higher for an included canary; the others are not guessed. ValueError for an odd number of
    guesses, or more than canaries.
    """
    if guesses % 2 or not 0 < guesses <= scores.size:
        raise ValueError(f"{guesses} guesses about {scores.size} canaries")
    order, half = np.argsort(scores, kind="stable"), guesses // 2
    return int(np.count_nonzero(included[order[-half:]]) + np.count_nonzero(~included[order[:half]]))


def probability_of_luck(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return the bound above on the probability of at least `right` right guesses under (epsilon, delta).

    >>> round(probability_of_luck(100, 10, 10, 0.0, 0.0), 6)  # ten coins
    0.000977
    """
    weights = _binomial(guesses, 1 / (1 + math.exp(-epsilon)))
    beta = float(weights[right:].sum())
    if right == 0 or delta == 0:
        return min(1.0, beta)
    near = np.cumsum(weights[right - 1 :: -1]) / np.arange(1, right + 1)  # beyond i = v nothing is added
    return min(1.0, beta + 2 * canaries * delta * float(near.max()))


def lower_bound(canaries: int, guesses: int, right: int, delta: float, confidence: float = CONFIDENCE) -> float:
    """Return the largest epsilon that these guesses refute at this delta; 0 if they refute none.

    >>> lower_bound(1000, 100, 50, 1e-6), round(lower_bound(1000, 100, 100, 0.0), 2)
    (0.0, 3.49)
    """

    def refuted(epsilon: float) -> bool:
        return probability_of_luck(canaries, guesses, right, epsilon, delta) < 1 - confidence

    if not refuted(0.0):
        return 0.0
    high = 1.0
    while refuted(high):
        high += 1
    low = high - 1
    for _ in range(SEARCHED):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def _binomial(count: int, q: float) -> NDArray[np.float64]:
    """Return P(W = k) for k = 0 .. count."""
    k = np.arange(count + 1, dtype=np.float64)
    factorials = np.concatenate([[0.0], np.cumsum(np.log(k[1:]))])
    logs = factorials[-1] - factorials - factorials[::-1] + k * math.log(q) + (count - k) * math.log1p(-q)
    return np.asarray(np.exp(logs), dtype=np.float64)
