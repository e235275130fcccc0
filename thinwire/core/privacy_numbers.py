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
MAX_INFLATION = 1.05  # of the sensitivity, by rounding: a width is chosen for it
WIDTHS = range(8, 33)
MAX_STEPS = 1 << 20  # a clip: float32 computes the places, and its errors stay below what conditional rounding allows
MAX_DEVIATION = 2.0**16  # grid steps of one source's noise: a table of the sampler has 16 bytes a step
DIGITS = 10
COUNT_NOISE, QUANTILE, RATE = 0.05, 0.5, 0.2  # of an adaptive clip (Andrew et al. 2021, section 3.1)


CLIP_RANGE = (2.0**-60, 2.0**60)  # of a norm that bounds updates: far from the ends of float32


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


def count_ratio(clients: int, noise_multiplier: float) -> float:
    """Return b / S of the count that an adaptive clip follows: a client adds b or -b, beside an update of S steps.

    The count is one more coordinate of the same release, with the same noise. Its noise has a standard deviation of
    sigma_b = `COUNT_NOISE` clients of n, at least z, in units of clients that count 1/2 or -1/2. With the noise z
    sqrt(S^2 + b^2) of the release that gives b = z S / sqrt(4 sigma_b^2 - z^2). For the update alone the noise is
    z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2) clips (Andrew et al. 2021, Theorem 1).

    >>> z = 1.0 * math.sqrt(1 + count_ratio(100, 1.0) ** 2)
    >>> round(z, 6), round((1.0**-2 - (2 * 5.0) ** -2) ** -0.5, 6)
    (1.005038, 1.005038)
    """
    deviation = max(COUNT_NOISE * clients, noise_multiplier)
    return noise_multiplier / math.sqrt(4 * deviation**2 - noise_multiplier**2)


def next_clip(clip: float, share: float) -> float:
    """Return the clip after a round in which this share of the clients had an update within it; noise may be in it.

    C exp(-RATE (share - QUANTILE)): it follows the median of the norms (Andrew et al. 2021, section 2).

    >>> [round(next_clip(1.0, share), 3) for share in (0.0, 0.5, 1.0)]
    [1.105, 1.0, 0.905]
    """
    return min(max(clip * math.exp(-RATE * (min(max(share, 0.0), 1.0) - QUANTILE)), 2.0**-60), 2.0**60)


def padded_dimensions(coordinates: int, largest: int) -> tuple[int, int]:
    """Return how many coordinates get noise after a rotation in blocks of one size, and that size.

    Blocks of one size bound each coordinate best: an update may lie in one block alone, and a block of 64 values
    spreads it over 64 coordinates only. So a private sum has no smaller block at its end, as other sums have.

    >>> padded_dimensions(255_600, 65536), padded_dimensions(300, 65536)
    ((262144, 65536), (512, 512))
    """
    block = min(largest, max(64, 1 << (coordinates - 1).bit_length()))
    return -(-coordinates // block) * block, block


def largest_coordinate(
    scale: float, clients: int, dimensions: int, block: int, noise_multiplier: float, rounds: int, honest: int
) -> float:
    """Return a bound on all coordinates of all sums of a run, in steps, which holds with probability 1 - TAIL.

    The sum of n updates has a norm of at most n S, all of it in one block of B coordinates in the worst case. Random
    signs make each coordinate sub-Gaussian with a variance of (n S)^2 / B (Hoeffding's inequality). All clients have
    the same signs, so nothing cancels between them. Noise of all n clients has n / honest of the variance (z S)^2 that
    the cost counts. Sums of Skellam noise of variance v have E exp(t X) = exp(v (cosh t - 1)), and those of discrete
    Gaussians no more. So with L = ln(2 d T / TAIL), no coordinate of d in T rounds is above

        min over t > 0 of (s t^2 / 2 + v (cosh t - 1) + L) / t        s = (n S)^2 / B, v = (z S)^2 n / honest

    but with probability TAIL (Chernoff). At the minimum s t^2 / 2 + v (t sinh t - cosh t + 1) = L, and the value is
    s t + v sinh t.
    Rounding moves a coordinate by less than a step a client, which is added. Conditional rounding makes the roundings
    of one client depend on each other, so no smaller bound is taken for them.
    """
    signal, noise = (clients * scale) ** 2 / block, (noise_multiplier * scale) ** 2 * clients / honest
    exponent = math.log(2 * dimensions * rounds / TAIL)

    def reached(t: float) -> float:
        return signal * t * t / 2 + noise * (t * math.sinh(t) - 2 * math.sinh(t / 2) ** 2)

    low, high = 0.0, 40.0  # sinh(40) is above any variance
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if reached(middle) <= exponent else (low, middle)
    return signal * low + noise * math.sinh(low) + clients if signal + noise else float(clients)


def scale_for(
    width: int, clients: int, dimensions: int, block: int, noise_multiplier: float, rounds: int, honest: int
) -> float:
    """Return the most grid steps a clip with which a sum of `width` bits, noise included, wraps around hardly ever.

    A sum that wraps around is a wrong step, and no loss of privacy: the noise is in it. ValueError if no grid is that
    fine. `DIGITS` binary digits are kept, so that machines whose exponentials differ have the same grid.
    """
    most = (1 << (width - 1)) - 1
    low, high = 0.0, float(MAX_STEPS)
    for _ in range(60):
        middle = (low + high) / 2
        fits = largest_coordinate(middle, clients, dimensions, block, noise_multiplier, rounds, honest) <= most
        low, high = (middle, high) if fits else (low, middle)
    if low < 1:
        raise ValueError(f"{width} bits do not hold a sum of {clients} clients and its noise")
    unit = 2.0 ** (math.frexp(low)[1] - DIGITS)
    return math.floor(low / unit) * unit


def width_for(
    clients: int, dimensions: int, block: int, noise_multiplier: float, rounds: int, honest: int
) -> tuple[int, float]:
    """Return the fewest bits for which rounding adds at most 5 percent to the sensitivity, and the grid steps a clip.

    The noise of one client has a standard deviation of at most `MAX_DEVIATION` steps. ValueError if 32 bits are too
    few, or the grid would be too coarse for the noise.
    """
    finest = MAX_DEVIATION * math.sqrt(honest) / noise_multiplier
    for width in WIDTHS:
        try:
            scale = scale_for(width, clients, dimensions, block, noise_multiplier, rounds, honest)
        except ValueError:
            continue
        if inflation(scale := min(scale, finest), dimensions) <= MAX_INFLATION:
            return width, scale
    raise ValueError(f"a sum of {clients} clients with noise_multiplier = {noise_multiplier:g} needs over 32 bits")
