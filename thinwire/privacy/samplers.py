"""Samplers of integer noise for differential privacy: the discrete Gaussian and the Skellam distribution.

`TableSampler` draws by inversion from a table. The table is made of Python integers from the exact value of the
variance, and no float decides a draw, so that both ends build the same table (`digest`). Its distance from the ideal
distribution is proven, and at most 2^-100. `ExactSampler` has no distance; it is the oracle in tests, and slow.

A draw takes 128 bits of randomness, of which 64 are read in all but about 2^-42 of the draws:

    sign       bit 0 of the first word
    position   the other 63 bits of the first word, then the 64 bits of the second word: a number below 2^127
    magnitude  the number of thresholds that are not above the position
    threshold  floor(2^127 P(|X| <= k)) for the magnitudes k = 0, 1, ..

Positive and negative draws of one magnitude are equally likely, and both signs of 0 are 0. The second word is read only
if the first 63 bits of the position are also those of a threshold.

Timing is not hidden. A lookup reads memory at an address that depends on the draw; a draw in the tail takes some steps
more. A program that watches the caches of the same processor may learn draws. The time of a whole `fill` adds up
thousands of draws, and tells a distant observer nothing that we know how to use. Mironov (2012), "On Significance of
the Least Significant Bits for Differential Privacy", is about floats, which are not used here.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from thinwire.compression.native import kernel
from thinwire.core.errors import UsageError
from thinwire.core.prng import SecretBits, SecretRng
from thinwire.privacy.secret_rng import CHUNK

MIN_VARIANCE, MAX_VARIANCE = 2.0**-10, 2.0**34
TAIL_BITS = 136  # each tail that the table leaves out has at most the probability 2^-136
POSITION_BITS, WORD_BITS = 127, 64
SCALE = 256  # bits behind the point of the discrete Gaussian's weights
START = 192  # bits of the first, smallest weight of Skellam's
MIN_GUIDE_BITS, MAX_GUIDE_BITS = 4, 18
FINER = 4  # a part of the guide has at most 1/8 of P(X = 0), where the guide's size allows it

Words = NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class TableSampler:
    """Draws integers of one distribution from a table, at some nanoseconds a draw.

    `distance` bounds the statistical distance of one draw from the ideal distribution. `digest` is the SHA-256 of the
    thresholds, 16 bytes each, little-endian: samplers of one digest have one distribution.

    The table has 16 bytes for each magnitude up to 13.8 standard deviations, at most 29 MB (variance 2^34), and a guide
    of at most 1 MB. While it is built, Python's integers take about nine times the table's memory.

    >>> TableSampler.skellam(100.0).distance < 2**-100
    True
    """

    thresholds: Words  # the upper 63 bits of each threshold, rising; the last is 2^63, above all positions
    lower: Words  # the lower 64 bits of each threshold
    guide: NDArray[np.uint32]  # entry b: thresholds below the first position whose upper bits are b
    distance: float
    digest: str

    @classmethod
    def discrete_gaussian(cls, variance: float) -> TableSampler:
        """Return a sampler of the discrete Gaussian: P(X = x) is proportional to exp(-x^2 / (2 variance)).

        The parameter is that of Canonne, Kamath and Steinke (2020), "The Discrete Gaussian for Differential Privacy".
        The distribution's own variance is slightly smaller. Raises UsageError if the parameter is out of range.
        """
        exact = _checked(variance)
        return cls._of(*_gaussian_weights(exact, _last(exact)))

    @classmethod
    def skellam(cls, variance: float) -> TableSampler:
        """Return a sampler of the difference of two Poisson draws, each of the mean `variance` / 2.

        The sum of independent draws is again Skellam, of the sum of the variances (Agarwal, Kairouz and Liu 2021, "The
        Skellam Mechanism for Differentially Private Federated Learning"). Raises UsageError if the variance is out of
        range.
        """
        exact = _checked(variance)
        return cls._of(*_skellam_weights(exact, _last(exact)))

    @classmethod
    def _of(cls, weights: list[int], error: Fraction) -> TableSampler:
        """Return the sampler that draws the magnitude 0 with weights[0], and each k > 0 with 2 * weights[k].

        `error` bounds the distance between the distribution of the weights and the ideal one without its tails.
        """
        total, raw = 2 * sum(weights) - weights[0], bytearray()
        for below in accumulate((2 * weight for weight in weights[1:]), initial=weights[0]):
            raw += ((below << POSITION_BITS) // total).to_bytes(2 * WORD_BITS // 8, "little")
            if below == total:  # the weights after it are 0
                break
        thresholds, lower = np.frombuffer(raw, "<u8").reshape(-1, 2).T.copy()[::-1]
        largest = (weights[0] << MAX_GUIDE_BITS) // total  # P(X = 0) in units of 2^-MAX_GUIDE_BITS
        bits = min(MAX_GUIDE_BITS, max(MIN_GUIDE_BITS, MAX_GUIDE_BITS + FINER - largest.bit_length()))
        edges = np.arange((1 << bits) + 1, dtype=np.uint64) << np.uint64(WORD_BITS - 1 - bits)
        guide = np.searchsorted(thresholds, edges).astype(np.uint32)
        for array in (thresholds, lower, guide):
            array.flags.writeable = False
        # Bernstein's bound: two for the tails, and two for each weight, of k and of -k (`_skellam_weights`); half a
        # unit of 2^-127 for each of the thresholds, which are rounded down.
        distance = error + Fraction(2 * len(weights) + 2, 1 << TAIL_BITS) + Fraction(len(thresholds), 1 << 128)
        rounded_up = math.nextafter(float(distance), 1.0)
        return cls(thresholds, lower, guide, rounded_up, hashlib.sha256(raw).hexdigest())

    def fill(self, out: NDArray[np.int32], rng: SecretBits) -> None:
        """Overwrite an array with independent draws.

        Raises ValueError, and changes nothing, unless `out` is a contiguous, aligned, writable array of int32. An error
        of `rng`, such as that of a system without entropy, is raised: what `out` holds then must not be used.

        Invariant: an entry is only overwritten with a whole draw, from words that no other draw reads.
        """
        if out.dtype != np.int32 or not (out.flags.c_contiguous and out.flags.aligned and out.flags.writeable):
            raise ValueError("draws go into one contiguous array of int32 that may be written")
        draws, words = out.reshape(-1), np.empty(CHUNK // 8, np.uint64)
        for start in range(0, draws.size, words.size):
            into = draws[start : start + words.size]
            drawn = words[: into.size]
            rng.fill(drawn.view(np.uint8))
            at = self._draw(drawn, into)
            while at < into.size:
                into[at] = self._draw_long(int(drawn[at]), rng)
                at += 1
                at += self._draw(drawn[at:], into[at:])

    def _draw(self, words: Words, out: NDArray[np.int32]) -> int:
        """Write a draw for each first word; stop at one that equals a threshold's, and return the number of draws."""
        run, bits = kernel("sampler_draw"), (self.guide.size - 1).bit_length() - 1
        if run is not None:
            x, table, guide, to = (array.ctypes.data for array in (words, self.thresholds, self.guide, out))
            return int(run(x, words.size, table, guide, bits, to))
        position = words >> np.uint64(1)
        found = np.searchsorted(self.thresholds, position)
        equal = np.flatnonzero(self.thresholds[found] == position)
        count = int(equal[0]) if equal.size else words.size
        out[:count] = np.where(words & np.uint64(1), -found, found)[:count]
        return count

    def _draw_long(self, word: int, rng: SecretBits) -> int:
        """Return the draw of a first word that equals a threshold's: by a second word."""
        second, sign = np.empty(1, np.uint64), word & 1
        rng.fill(second.view(np.uint8))
        first, last = (np.searchsorted(self.thresholds, np.uint64(word >> 1), side) for side in ("left", "right"))
        found = int(first + np.searchsorted(self.lower[first:last], second[0], "right"))
        return -found if sign else found


def _checked(variance: float) -> Fraction:
    """Return the exact value of a float."""
    if not MIN_VARIANCE <= variance <= MAX_VARIANCE:  # NaN is not
        raise UsageError(
            f"noise of variance {variance} is not supported",
            why=f"a table is made for a variance from {MIN_VARIANCE:.3g} to {MAX_VARIANCE:.3g}",
            hint="take a coarser grid for less variance, a finer one for more",
        )
    return Fraction(variance)


def _last(variance: Fraction) -> int:
    """Return the last magnitude k of a table: P(X > k) <= 2^-TAIL_BITS.

    Bernstein: P(X >= t) <= exp(-t^2 / (2 (v + t/3))). Both distributions satisfy it, as log E exp(sX) <= v s^2 / 2 for
    the discrete Gaussian (Canonne, Kamath and Steinke 2020), and v (cosh s - 1) <= v (exp s - 1 - s) for
    Skellam, s >= 0.
    """
    twice = Fraction(7, 5) * TAIL_BITS  # 2 ln 2 < 7/5
    t = math.isqrt(math.floor(twice * variance))
    while t * t < twice * (variance + Fraction(t, 3)):
        t += 1
    return t - 1


def _exp(x: Fraction) -> tuple[int, int]:
    """Return exp(-x) for x > 0, in units of 2^-SCALE, and a bound on its error in these units.

    Taylor's series for x / 2^h <= 1/2: a term is at most half of the one before and rounded once, so that it is off by
    less than 2 units, as is the sum of all terms that are left out. Each of h squarings doubles the error and rounds.
    """
    halvings = max(0, math.ceil(2 * x) - 1).bit_length()
    numerator, denominator = x.numerator, x.denominator << halvings
    value = term = 1 << SCALE
    order = 0
    while term:
        order += 1
        term = term * numerator // (denominator * order)
        value += -term if order % 2 else term
    error = 2 * order + 2
    for _ in range(halvings):
        value, error = value * value >> SCALE, 2 * error + 1
    return value, error


def _gaussian_weights(variance: Fraction, last: int) -> tuple[list[int], Fraction]:
    """Return exp(-k^2 / (2 v)) for k = 0 .. last in units of 2^-SCALE, and a bound on their distribution's distance.

    One weight follows from the other by the ratio exp(-(2k + 1) / (2 v)), which itself falls by exp(-1 / v). All are at
    most 1, so that the error of a product is at most the sum of both errors, and one unit for rounding: with e for that
    of both exponentials, e + k (e + 1) for a ratio, and (k + 1)^2 (e + 1) for a weight. The distance of two
    distributions is at most the sum of the errors of the weights over the sum of the weights of either, here 2^SCALE or
    more.
    """
    (ratio, first), (step, second) = _exp(1 / (2 * variance)), _exp(1 / variance)
    weight = 1 << SCALE
    weights = [weight]
    for _ in range(last):
        weight = weight * ratio >> SCALE
        ratio = ratio * step >> SCALE
        weights.append(weight)
    return weights, Fraction((2 * last + 1) * (last + 1) ** 2 * (max(first, second) + 1), 1 << SCALE)


def _skellam_weights(variance: Fraction, last: int) -> tuple[list[int], Fraction]:
    """Return numbers proportional to the Bessel functions I_k(v), k = 0 .. last, and a bound on their distance.

    P(X = k) = exp(-v) I_k(v). Miller's backward recurrence: f_(k-1) = f_(k+1) + (2k / v) f_k from f_(last+1) = 0. Its
    exact solution is a multiple of I_k -+ I_(last+1) K_k / K_(last+1), and K_k <= K_(last+1): it is off by at most
    P(X = last + 1) at each k, which is counted with the tails. All terms are positive. So rounding down makes each f_k
    smaller by a share of at most last / (the smallest f), and so the distance.
    """
    above, weight = 0, 1 << START
    weights = [weight]
    for k in range(last, 0, -1):
        above, weight = weight, above + 2 * k * variance.denominator * weight // variance.numerator
        weights.append(weight)
    weights.reverse()
    return weights, Fraction(last, min(weights))


class ExactSampler:
    """Draws single integers without any error, in Python's integers: the oracle of `TableSampler`.

    A discrete Gaussian draw takes some 20 us, a Skellam draw about 3 us for each unit of variance.
    """

    def __init__(self, rng: SecretRng) -> None:
        self._rng = rng
        self._bits, self._count = 0, 0

    def discrete_gaussian(self, variance: float | Fraction) -> int:
        """Return a draw by rejection from the discrete Laplace distribution (Canonne et al. 2020, algorithm 3)."""
        v, w = Fraction(variance).as_integer_ratio()
        scale = math.isqrt(v // w) + 1
        while True:
            found = self._discrete_laplace(scale)
            off = abs(found) * scale * w - v  # accepted with exp(-(|found| - variance / scale)^2 / (2 variance))
            if self._bernoulli_exp(off * off, 2 * v * w * scale * scale):
                return found

    def skellam(self, variance: float | Fraction) -> int:
        """Return the difference of two Poisson draws, each of half the variance as mean."""
        mean = Fraction(variance) / 2
        return self.poisson(mean) - self.poisson(mean)

    def poisson(self, mean: Fraction) -> int:
        """Return a Poisson draw: the sum of draws of mean 1, the last one thinned to what is left of the mean."""
        whole, rest = divmod(mean, 1)
        thinned = sum(self._bernoulli(rest.numerator, rest.denominator) for _ in range(self._poisson_of_one()))
        return sum(self._poisson_of_one() for _ in range(whole)) + thinned

    def _poisson_of_one(self) -> int:
        """Propose k with 2^-(k+1), and accept it with 2^(k-1) / k!: so P(k) is proportional to 1 / k!."""
        while True:
            found = 0
            while self._below(2):
                found += 1
            if self._bernoulli(2**found, 2 * math.factorial(found)):
                return found

    def _discrete_laplace(self, scale: int) -> int:
        """Return x with a probability proportional to exp(-|x| / scale) (algorithm 2)."""
        while True:
            rest = self._below(scale)
            if not self._bernoulli_exp(rest, scale):
                continue
            whole = 0
            while self._bernoulli_exp(1, 1):
                whole += 1
            found, negative = rest + scale * whole, self._below(2)
            if found or not negative:  # else 0 would have twice its probability
                return -found if negative else found

    def _bernoulli_exp(self, numerator: int, denominator: int) -> bool:
        """Return True with the probability exp(-numerator / denominator), of a fraction >= 0 (algorithm 1)."""
        while numerator > denominator:
            if not self._bernoulli_exp(1, 1):
                return False
            numerator -= denominator
        trials = 1
        while self._bernoulli(numerator, denominator * trials):
            trials += 1
        return trials % 2 == 1

    def _bernoulli(self, numerator: int, denominator: int) -> bool:
        return self._below(denominator) < numerator

    def _below(self, bound: int) -> int:
        """Return a uniform number of 0 .. bound - 1: bits are drawn again until they are one."""
        need = (bound - 1).bit_length()
        while True:
            while self._count < need:
                fresh = np.empty(CHUNK // 64, np.uint8)
                self._rng.fill(fresh)
                self._bits |= int.from_bytes(fresh.tobytes(), "little") << self._count
                self._count += 8 * fresh.size
            found = self._bits & ((1 << need) - 1)
            self._bits >>= need
            self._count -= need
            if found < bound:
                return found
