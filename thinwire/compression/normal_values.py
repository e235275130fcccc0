"""Bits and errors of quantized normal values, for `eden(b)`: rotated values are nearly normal (`rotation.py`).

With whole bits each value becomes the nearest of `LEVELS`. With up to 1.5 bits only the signs of the values beyond a
threshold of t standard deviations are sent: the functions say what that takes in bits, how large the error is, and
which t takes a given rate. They are computed in float64.
"""

from __future__ import annotations

import functools
import math
from decimal import Decimal

# Lloyd-Max levels of the standard normal distribution (Lloyd 1982; Max 1960), the positive half, as float32, and their
# mean squared error.
LEVELS = {
    1: (0.79788458,),
    2: (0.45278004, 1.51041758),
    3: (0.24509411, 0.75600529, 1.34390926, 2.15194559),
    4: (0.12839504, 0.38804829, 0.65675914, 0.94234043, 1.25623119, 1.61804640, 2.06901717, 2.73258948),
}
ERRORS = {1: 0.363380, 2: 0.117482, 3: 0.034548, 4: 0.009501}


def share_beyond(t: float) -> float:
    """Return the share of normal values whose magnitude is at least `t` standard deviations."""
    return math.erfc(t / math.sqrt(2))


def bits_beyond(t: float) -> float:
    """Return the entropy in bits a value of which normal values are beyond `t`, and of their signs.

    >>> round(bits_beyond(2.5), 3)
    0.109
    """
    p = share_beyond(t)
    return p - p * math.log2(p) - (1 - p) * math.log1p(-p) / math.log(2)


def variance_beyond(t: float) -> float:
    """Return E||y - x||^2 / ||x||^2 for normal x, if y has the signs of x beyond `t`, and <x, y> = ||x||^2.

    >>> round(variance_beyond(2.5), 2)
    9.11
    """
    density = math.exp(-t * t / 2) / math.sqrt(2 * math.pi)
    return share_beyond(t) / (4 * density**2) - 1


@functools.cache
def threshold(rate: Decimal) -> float:
    """Return the threshold t at which normal values take `rate` bits each, the nearest multiple of 1/4096.

    So coarse a grid gives each machine the same t, whatever the last bits of its exponentials are.

    >>> threshold(Decimal("0.109"))
    2.49951171875
    """
    low, high = 0.6, 6.0  # bits fall from 1.54 to 7e-8
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if bits_beyond(middle) > rate else (low, middle)
    return round(low * 4096) / 4096
