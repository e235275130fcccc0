"""Which devices a round draws where it does not ask all: with equal odds, or rather those that are quick.

Odds follow what was measured and are bounded: the slowest device has an eighth of the quickest one's, so nobody is left
out for ever. One that is not measured yet has the quickest's, so that it soon is. Who is drawn more often moves the
model more often: what is learned leans towards the data of the quick.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from thinwire.core.keys import Key, derive, seed63

LEAST = 1 / 8  # of the quickest device's odds
TINY_S = 1e-9  # no time is less: one may be divided by it


@dataclass(frozen=True)
class Odds:
    """Each candidate's, 1 for the quickest, and how they came to be; no `each`: all are alike.

    `why_not`: of each candidate the sentence that stands beside it when it is not drawn.
    """

    each: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    why_not: Mapping[str, str] = field(default_factory=dict)


def odds(selection: str, seconds: Mapping[str, float | None], of: str) -> Odds:
    """One over the seconds `of` something (a step, an exchange), where the quickest has 1 and nobody less than LEAST.

    >>> found = odds("link", {"a": 2.0, "b": 4.0, "c": 90.0, "d": None}, "an exchange")
    >>> found.reason
    'drawn by link: 2.00 s to 90.00 s an exchange, odds from 1 to 0.12; 1 not measured yet counts as the quickest'
    >>> found.why_not["b"]
    "not drawn: its odds are 0.50 of the quickest's, with 4.00 s an exchange"
    """
    known = [max(taken, TINY_S) for taken in seconds.values() if taken is not None]
    if not known:
        return Odds(reason=f"drawn by {selection}: nobody is measured yet, so all have the same odds")
    quickest = min(known)
    each = {d: 1.0 if s is None else max(LEAST, quickest / max(s, TINY_S)) for d, s in seconds.items()}
    said = f"drawn by {selection}: {quickest:.2f} s to {max(known):.2f} s {of}, odds from 1 to {min(each.values()):.2f}"
    if unknown := len(seconds) - len(known):
        said += f"; {unknown} not measured yet count{'s' if unknown == 1 else ''} as the quickest"
    return Odds(each, said, {d: _why_not(each[d], s, of) for d, s in seconds.items()})


def _why_not(odds: float, seconds: float | None, of: str) -> str:
    if seconds is None:
        return "not drawn: it is not measured yet, and has the odds of the quickest"
    return f"not drawn: its odds are {odds:.2f} of the quickest's, with {seconds:.2f} s {of}"


def draw(seed: int, number: int, candidates: Sequence[str], count: int, found: Odds) -> tuple[str, ...]:
    """`count` of the candidates, in their names' order; it depends on (seed, round, candidates, odds) alone.

    With odds a device's place is a drawn waiting time at its own rate (Efraimidis and Spirakis 2006).
    """
    key = derive(Key(seed), "cohort", number)
    if not found.each:
        return tuple(sorted(random.Random(seed63(key)).sample(candidates, count)))

    def waits(device: str) -> float:
        uniform = (seed63(derive(key, device)) + 1) / 2**63
        return -math.log(uniform) / found.each[device]

    return tuple(sorted(sorted(candidates, key=waits)[:count]))


def floor_of(min_replies: float, asked: int) -> int:
    """The fewest replies that make a step: a share of those asked (rounded up), or from 1 on a count.

    >>> floor_of(0.5, 7), floor_of(1.0, 7), floor_of(3, 7)
    (4, 1, 3)
    """
    return max(1, math.ceil(min_replies * asked - 1e-9) if min_replies < 1 else int(min_replies))
