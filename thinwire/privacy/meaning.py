"""Puts an epsilon into plain words, for reports, for the dashboard and for the owner of a device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import ROUND_CEILING, Decimal
from typing import Final

from thinwire.core.formatting import rounded_up

UNITS: Final[Mapping[str, str]] = {"client": "one client with all its data", "record": "one record of one device"}


def unit_text(mode: str) -> str:
    """Return the unit of privacy of a mode in words.

    >>> unit_text("local"), unit_text("example")
    ('one client with all its data', 'one record of one device')
    """
    return UNITS["record" if mode == "example" else "client"]


def right_guesses(epsilon: float, delta: float) -> float:
    """Return how often someone guesses right, at most, whether one client's data were used, if both are as likely.

    The bound is (e^epsilon + delta) / (1 + e^epsilon) (Kairouz, Oh, Viswanath 2015, the vertices of their region).

    >>> right_guesses(0.0, 0.0), round(right_guesses(1.0, 0.0), 4)
    (0.5, 0.7311)
    """
    return min(1.0, (1 + delta * math.exp(-epsilon)) / (1 + math.exp(-epsilon)))


def percent_up(share: float) -> str:
    """Format a share in percent, never below its value, with as many digits as tell it from 100.

    >>> percent_up(0.73106), percent_up(0.5), percent_up(0.999665), percent_up(1.0)
    ('73.2 %', '50 %', '99.97 %', '100 %')
    """
    exact = Decimal(repr(share)) * 100
    steps = (exact.quantize(Decimal(step), ROUND_CEILING) for step in ("0.1", "0.01", "0.001", "0.0001"))
    return f"{float(next((up for up in steps if up < 100), 100)):g} %"


def meaning(epsilon: float | None, delta: float, mode: str = "central") -> str:
    """Return what an epsilon of a mode means for one client, or for one of its records, as sentences in plain words.

    >>> meaning(1.0, 0.0)[:101]
    'Someone who sees all released models, and holds it as likely as not that the data of one client were '
    """
    data = "one record of a device" if mode == "example" else "one client"
    if epsilon is None or not math.isfinite(epsilon):
        return f"No epsilon bounds what the released models tell of {data}."
    bet = percent_up(right_guesses(epsilon, delta))
    times = rounded_up(math.exp(min(epsilon, 700.0)))
    said = (
        f"Someone who sees all released models, and holds it as likely as not that the data of {data} were used, "
        f"guesses right in at most {bet} of such bets (50 % is a coin). Whatever that person may see has at most "
        f"{times} times the probability with these data that it has without, plus delta = {delta:g}."
    )
    return said + (" So large a bound protects no one by itself." if epsilon > 10 else "")
