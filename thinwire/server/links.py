"""How long a device takes: estimates with their uncertainty, from durations that were seen. No I/O.

A transfer of n bytes takes `start_s + n * byte_s`. The slope is the median over pairs of transfers (Theil 1950, Sen
1968), which nearly a third of them may spoil; pairs of about one size say nothing of it. What the line leaves over
is kept as ratios, seen over fitted, so that predictions at the sizes that are usual are right whatever the line is.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

KEPT = 16  # of the last ones: one outlier among them is passed over, two are believed
UNLIKE = 2.0  # how many times larger a transfer must be than another, for the two to tell a start from a rate
START_SHARE = 0.5  # of the quickest transfer: the most that a round trip explains while all have one size
THIN_BYTES_S = 125_000.0  # 1 Mb/s, the thinnest links that we measure: as thin is one that nothing is known of
START_S = 1.0  # the most that a start is taken to be where a thin link would have carried as much in less
LEAST_BYTE_S = 1e-15  # 8 Pb/s: a claim below it is no rate, and its inverse no number

Sample = tuple[float, float]  # (how much, seconds): bytes, steps, or 1


@dataclass(frozen=True)
class Spread:
    """Seconds: half of all are at most `p50`, nine of ten at most `p90`."""

    p50: float
    p90: float

    def __add__(self, other: Spread) -> Spread:
        """One after the other, if one being slow says nothing about the other: what is over p50 adds as squares."""
        middle = self.p50 + other.p50
        return Spread(middle, middle + math.hypot(self.p90 - self.p50, other.p90 - other.p50))

    def times(self, factor: float) -> Spread:
        return Spread(self.p50 * factor, self.p90 * factor)


NOTHING = Spread(0.0, 0.0)


def spread(values: Iterable[float]) -> Spread | None:
    """Median and p90 of what was seen; None where nothing was.

    p90 is the nearest rank, but from 3 values on never the largest: one outlier decides nothing. It lies at least
    p50 / 2n over p50: one value alone says as little of the next as the first round trip of TCP (RFC 6298, 2.2).

    >>> spread([2.0]), spread([2.0, 4.0, 6.0, 90.0])
    (Spread(p50=2.0, p90=3.0), Spread(p50=5.0, p90=6.0))
    """
    ordered = sorted(values)
    if not ordered:
        return None
    count = len(ordered)
    rank = math.ceil(0.9 * count)
    middle = statistics.median(ordered)
    seen = ordered[(min(rank, count - 1) if count >= 3 else rank) - 1]
    return Spread(middle, max(seen, middle * (1 + 0.5 / count)))


@dataclass(frozen=True)
class Line:
    """The time of a transfer by its size. `ratio`: what was seen over what the line says; `best`: the least of it."""

    start_s: float
    byte_s: float
    ratio: Spread
    best: float

    def seconds(self, size: float) -> Spread:
        return self.ratio.times(self.start_s + self.byte_s * size)

    def least_s(self, size: float) -> float:
        """The quickest that it could have been, by the best transfer that was seen."""
        return self.best * (self.start_s + self.byte_s * size)

    @property
    def bits_s(self) -> Spread | None:
        """Bandwidth: half the transfers had at least p50, nine of ten at least p90; None: too fast to be seen."""
        usual, slow = self.byte_s * self.ratio.p50, self.byte_s * self.ratio.p90
        if min(usual, slow) < LEAST_BYTE_S:
            return None
        return Spread(8 / usual, 8 / slow)


def line(transfers: Sequence[Sample], rtt_s: float = 0.0) -> Line | None:
    """Fit (bytes, seconds); None where there are none.

    Transfers of one size cannot tell the start from the rate: then the start is a known round trip, but at most half
    of the quickest. So little was sent says little of bandwidth, and it is rather taken to be lower than it is, but
    not as low as if a small answer's own overhead were its bytes: what 1 Mb/s would have carried in less time spent
    the rest of it, up to a second, on starting.

    >>> line([(1e3, 0.11), (1e6, 1.1), (1e3, 0.09), (2e6, 2.1)]).bits_s.p50  # doctest: +ELLIPSIS
    8...
    >>> round(line([(400, 0.1)]).seconds(40_000).p50, 2)
    0.42
    """
    sized = [(size, seconds) for size, seconds in transfers if size > 0]
    if not sized:
        return None
    start, rate = _fit(sized, rtt_s)
    fitted = [(seconds, start + rate * size) for size, seconds in sized]
    ratios = [seconds / expected for seconds, expected in fitted if expected > 0] or [1.0]
    return Line(start, rate, spread(ratios) or Spread(1.0, 1.0), min(ratios))


def _fit(sized: Sequence[Sample], rtt_s: float) -> tuple[float, float]:
    ordered = sorted(sized)
    unlike = ordered[-1][0] >= UNLIKE * ordered[0][0]
    pairs = [(a, b) for a, b in combinations(ordered, 2) if b[0] >= UNLIKE * a[0]] if unlike else []
    if pairs:
        rate = max(0.0, statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs))
        start = statistics.median(seconds - rate * size for size, seconds in sized)
        if start >= 0:
            return start, rate
        return 0.0, statistics.median(seconds / size for size, seconds in sized)
    quickest = min(seconds for _, seconds in sized)
    left_s = min(seconds - size / THIN_BYTES_S for size, seconds in sized)  # of what a thin link would have taken
    start = max(min(rtt_s, START_SHARE * quickest), min(START_S, left_s))
    return start, statistics.median((seconds - start) / size for size, seconds in sized)
