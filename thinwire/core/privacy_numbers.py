"""The numbers of a private sum: how far one client moves it on a grid, and how fine a grid a sum of w bits can have.

A client's update is scaled down to an L2 norm of at most `clip`, which is `scale` grid steps, and each of its `d`
coordinates is rounded up or down at random. The result is kept only if its squared norm is at most
`squared_sensitivity`; otherwise it is rounded again. So the bound holds for every input, whatever its rounding did.

Invariant: each function gives the same on both ends, because they depend on public numbers only.
"""

from __future__ import annotations

import math

BETA = math.exp(-0.5)  # a rounding is within the bound with a probability of at least 1 - BETA, 0.39
TAIL = 1e-3  # probability that any coordinate of any sum of a run wraps around
MOST_INFLATION = 1.05  # of the sensitivity, by rounding: a width is chosen for it
WIDTHS = range(8, 33)


def squared_sensitivity(scale: float, dimensions: int) -> int:
    """Return the largest squared L2 norm, in squared steps, of one client's integers after conditional rounding.

    min{S^2 + d/4 + sqrt(2 ln(1/beta)) (S + sqrt(d)/2), (S + sqrt(d))^2} (Kairouz, Liu and Steinke 2021, conditional
    rounding), rounded down, which no integer vector notices.

    >>> squared_sensitivity(2270.0, 2**20), squared_sensitivity(0.0, 16)
    (5417826, 6)
    """
    root = math.sqrt(dimensions)
    probable = scale**2 + dimensions / 4 + math.sqrt(2 * math.log(1 / BETA)) * (scale + root / 2)
    return math.floor(min(probable, (scale + root) ** 2))


def inflation(scale: float, dimensions: int) -> float:
    """Return the norm of a client's integers over its norm before rounding: the cost is that of so much less noise."""
    return math.sqrt(squared_sensitivity(scale, dimensions)) / scale


def scale_for(width: int, clients: int, dimensions: int, noise_multiplier: float, rounds: int, honest: int) -> float:
    """Return the most grid steps a clip with which a sum of `width` bits, noise included, wraps around hardly ever.

    After a rotation with random signs each coordinate of the sum of n updates is sub-Gaussian with a standard deviation
    of at most n S / sqrt(d) (Hoeffding). Rounding adds at most n / 4 to the variance. Noise of all n clients adds
    n / honest of the variance that the cost counts, (z S)^2. The sum of these exceeds tau deviations with a
    probability of at most 2 exp(-tau^2 / 2); over d coordinates and all rounds it is TAIL for tau = sqrt(2 ln(2 d T /
    TAIL)). ValueError if no grid is that fine.

    The bound is for one rotation of all coordinates. It is too small where `mode = "distributed"` will rotate in blocks
    of 65536, with many clients whose updates are alike: that mode is refused in this version.
    """
    tau = math.sqrt(2 * math.log(2 * dimensions * rounds / TAIL))
    most = ((1 << (width - 1)) - 1) / tau

    def deviation(scale: float) -> float:
        noise = (noise_multiplier * scale) ** 2 * clients / honest
        return math.sqrt((clients * scale) ** 2 / dimensions + clients / 4 + noise)

    low, high = 0.0, float(1 << width)
    if deviation(low) > most:
        raise ValueError(f"{width} bits do not hold a sum of {clients} clients and its noise")
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if deviation(middle) <= most else (low, middle)
    return low


def width_for(clients: int, dimensions: int, noise_multiplier: float, rounds: int, honest: int) -> tuple[int, float]:
    """Return the fewest bits for which rounding adds at most 5 percent to the sensitivity, and the grid steps a clip.

    ValueError if 32 bits are too few.
    """
    for width in WIDTHS:
        try:
            scale = scale_for(width, clients, dimensions, noise_multiplier, rounds, honest)
        except ValueError:
            continue
        if scale > 0 and inflation(scale, dimensions) <= MOST_INFLATION:
            return width, scale
    raise ValueError(f"a sum of {clients} clients with noise_multiplier = {noise_multiplier:g} needs over 32 bits")
