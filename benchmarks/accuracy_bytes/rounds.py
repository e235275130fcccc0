"""How many rounds a model is given, fixed from fp32 alone on tuning seeds.

R is the first number of rounds after which fp32 gains under 0.3 points over the next R/4; at most 300. One round's
accuracy jumps by points with who was selected in it, so what is gained is the mean of the R/4 rounds after R less the
mean of the R/4 rounds up to R. Each R is judged with the learning rate that is best there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.accuracy_bytes.reading import Curve, over

GAIN = 0.3  # points
STEP, FEWEST, MOST = 20, 20, 300


@dataclass(frozen=True)
class Rounds:
    """`gain`: what fp32 wins in the quarter after it; None where the most was taken without looking further."""

    rounds: int
    rate: float
    gain: float


def gain(curves: Mapping[float, Curve], rounds: int) -> Rounds | None:
    """Of the best learning rate at `rounds`; None where no curve goes a quarter further."""
    quarter = rounds // 4
    best: Rounds | None = None
    top = float("-inf")
    for rate, curve in curves.items():
        before, after = over(curve, rounds - quarter + 1, rounds), over(curve, rounds + 1, rounds + quarter)
        if before is None or after is None or max(curve) < rounds + quarter:
            continue
        if before > top:
            best, top = Rounds(rounds, rate, after - before), before
    return best


def rounds_needed(curves: Mapping[float, Curve]) -> Rounds | None:
    """The first R that is enough, or the most; None where the curves are too short to tell.

    >>> flat, slow = dict.fromkeys(range(1, 101), 90.0), {r: r / 10 for r in range(1, 101)}
    >>> rounds_needed({0.5: flat}), rounds_needed({0.5: slow})
    (Rounds(rounds=20, rate=0.5, gain=0.0), None)
    """
    for rounds in range(FEWEST, MOST + 1, STEP):
        found = gain(curves, rounds)
        if found is None:
            return None
        if found.gain < GAIN or rounds == MOST:
            return found
    return None
