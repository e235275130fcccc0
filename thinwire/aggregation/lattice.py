"""Lattice points: clients' vectors as integers on one common grid, whose sum modulo 2^w is the sum of their updates.

`encode` works in this order: weight, clip, rotate, round.

1. The coordinates of the round's window (`SupportWalk`) are multiplied by weight / weight_max.
2. If their L2 norm is above `clip`, they are scaled down to it.
3. In blocks of powers of two, a Hadamard transform with random signs makes the coordinates about equal in size. It is
   the rotation of `compression/rotation.py`, times 1 / sqrt(block). Zeros fill the last block.
4. Each coordinate becomes a whole number of grid steps, rounded up with the probability of its fraction, so the mean
   is exact to 2^-17 of a step. The integers are in [-A, A] with A = 2^(bits - 1) - 1. If one would be outside, the
   whole vector is scaled down once, so that its largest coordinate is A steps.

`CHECK_BITS` of lanes that are 1 follow. An honest sum of n vectors is in [-nA, nA], so w = 1 + ceil(log2(n A + 1))
bits hold it.

The step. All clients of a plan must have the same, so it depends on the plan only. Random signs make each rotated
coordinate a sum of independent terms, with a standard deviation of C / sqrt(D) if the D coordinates of a vector of
norm C have equal shares of it in each block. By Hoeffding's inequality, one exceeds tau standard deviations with a
probability of at most 2 exp(-tau^2 / 2), and any of D with at most `OUTSIDE` for tau = sqrt(2 ln(2 D / OUTSIDE)). So
the step is tau C / (A sqrt(D)): a larger one adds noise to every round, and a smaller one scales vectors down more
often. Without rotation nothing bounds a coordinate except C, and the step is C / A. That is coarse for many
coordinates.

The error. Rounding adds a variance of step^2 f (1 - f) for a fraction f. The mean over f is 1/6 if a coordinate's
standard deviation is half a step or more (`rounding_variance`), and always at most 1/4. A rotation keeps it. So the
weighted mean of n clients has a mean squared error a coordinate of step^2 / 6 * n (weight_max / sum of weights)^2.
With equal weights and norms C, over all d coordinates, that is tau^2 / (6 n A^2) * d / D of C^2.

Invariant: the bits do not depend on the processor, nor on the number of threads. Draws are taken from the source in
the order of lanes, two bytes each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from thinwire.aggregation.lattice_window import Lanes, SupportWalk, Window, padded_size, rotated_blocks, working_memory
from thinwire.compression.base import BLOCK
from thinwire.compression.native import each_of, require_writable, threads
from thinwire.compression.rotation import MAX_BLOCK, MIN_BLOCK
from thinwire.compression.vector_ops import require_finite
from thinwire.core.errors import NonFiniteUpdate
from thinwire.core.privacy_numbers import CLIP_RANGE
from thinwire.core.prng import Key, SecretRng, word32

if TYPE_CHECKING:
    from thinwire.core.types import Vector

OUTSIDE = 0.01  # probability that an evenly spread vector of norm `clip` has a coordinate outside the grid
CHECK_BITS = 64  # a sum with a wrong mask is found with a probability of 1 - 2^-64 by its check lanes
LARGEST_BITS = 16  # a coordinate that does not fit the grid is still below 2^31 steps
MAX_WIDTH = 32
TOLERANCE = 2.0**-20  # a coordinate so little outside the grid was inside it before float32 rounded; it becomes A
GROUP = 4  # blocks that a thread takes at once


class BadSum(ValueError):
    """The sum of lattice points is not one of what this many clients encoded; the model must not change."""


class Terms(Protocol):
    """Gives what a lattice needs to know: `LatticeTerms` without noise, `PrivateTerms` with noise."""

    @property
    def size(self) -> int:
        """Return the number of trained parameters."""

    @property
    def support(self) -> float:
        """Return the share of coordinates in a round."""

    @property
    def rotate(self) -> int:
        """Return the largest rotated block, 0 without rotation."""

    @property
    def selected(self) -> int:
        """Return the number of clients that a round selects."""

    @property
    def weight_max(self) -> int:
        """Return the largest weight of a client."""

    @property
    def clip(self) -> float:
        """Return the largest L2 norm of a weighted vector."""

    @property
    def most(self) -> int:
        """Return the largest integer of one client."""

    @property
    def width(self) -> int:
        """Return the bits of a lane."""


@dataclass(frozen=True)
class LatticeTerms:
    """Gives what all clients of a secure run must agree on about their lattice points; it is part of ctx0.

    `size` is the number of trained parameters, `bits` those of one client's coordinate (2 to 16), `support` the share
    of coordinates in a round, and `rotate` the largest rotated block (a power of two from 64 to 65536; 0 does not
    rotate). `selected` is the number of clients that a round selects, with over-selection, `weight_max` the largest
    weight, and `clip` the largest L2 norm of a weighted vector. ValueError names what is not valid.

    >>> LatticeTerms(1000, bits=8, support=1.0, rotate=0, selected=100, weight_max=1, clip=1.0).width
    15
    """

    size: int
    bits: int
    support: float
    rotate: int
    selected: int
    weight_max: int
    clip: float

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= LARGEST_BITS:
            raise ValueError(f"bits = {self.bits} is not in 2 .. {LARGEST_BITS}")
        if self.rotate and (self.rotate & (self.rotate - 1) or not MIN_BLOCK <= self.rotate <= MAX_BLOCK):
            raise ValueError(f"rotate = {self.rotate} is not 0 or a power of two from {MIN_BLOCK} to {MAX_BLOCK}")
        if self.selected < 1 or self.weight_max < 1 or self.selected * self.weight_max >= 1 << 63:
            raise ValueError(f"{self.selected} clients with weights up to {self.weight_max} do not fit 63 bits")
        if not CLIP_RANGE[0] <= self.clip <= CLIP_RANGE[1]:
            raise ValueError(f"clip = {self.clip} is not between 2^-60 and 2^60")
        if self.width > MAX_WIDTH:
            raise ValueError(f"a sum of {self.selected} numbers of {self.bits} bits needs {self.width} bits")

    @property
    def most(self) -> int:
        """Return A, the largest integer of one client: 2^(bits - 1) - 1."""
        return (1 << (self.bits - 1)) - 1

    @property
    def width(self) -> int:
        """Return w = 1 + ceil(log2(selected * A + 1)): sums are exact modulo 2^w."""
        return 1 + (self.selected * self.most).bit_length()


@dataclass(frozen=True)
class Points:
    """Holds one client's lattice points, and how its vector was made to fit.

    `lanes` holds each integer modulo 2^16 or 2^32; masks are added to a copy of it, for as long as the client may
    need `Lattice.represented`. `weight` is the weight that the client reports. `clipped` and `scaled` are the factors
    by which the vector was scaled down to the norm and to the grid; 1.0 if it fitted.
    """

    lanes: Lanes
    weight: int
    window: int
    rotation: Key
    clipped: float
    scaled: float


class Lattice:
    """Encodes vectors of one run as lattice points, and decodes their sum. `key` decides the walk of the support.

    Law: x and the residual are in the model's own unit, not in the weighted one. After `encode`, with r =
    `represented(points)`, each coordinate of x is what it was minus r, rounded once to float32; off the window r is 0
    and x does not change. So the residual holds all excess over clip and grid, and needs no rescaling if the client's
    weight changes. `decode_sum` returns the mean of the clients' r, weighted by `Points.weight`: the integers are
    exact, and float32 rounds in the rotation back.

    Besides x, `encode` needs two or four bytes a lane, the walk (1/16 byte a parameter) and 1 MB a thread.
    """

    def __init__(self, terms: Terms, key: Key) -> None:
        self.terms = terms
        self.walk = SupportWalk(terms.size, terms.support, key)
        self.width = terms.width
        self.dtype: np.dtype[Any] = np.dtype(np.uint16 if self.width <= 16 else np.uint32)
        self.coordinates = self.walk.largest
        self.padded, self.step = self._shape()
        self.lanes, self.grid = self.padded + -(-CHECK_BITS // self.width), ""

    def _shape(self) -> tuple[int, float]:
        """Return how many coordinates a window has with its padding, and the grid step."""
        terms = self.terms
        padded = padded_size(self.coordinates, terms.rotate) if terms.rotate else self.coordinates
        tau = math.sqrt(2 * math.log(2 * padded / OUTSIDE)) if terms.rotate else math.sqrt(padded)
        return padded, tau / math.sqrt(padded) * terms.clip / terms.most

    def mean_squared_error(self, survivors: int, weight_sum: int, norm: float | None = None) -> float:
        """Return the expected squared error that rounding adds to a coordinate of the mean of this many clients.

        `norm` is the L2 norm of a client's weighted and clipped vector, `clip` by default. The formula is exact for
        coordinates that are normally distributed, which a rotation makes nearly true. If the noise of one client, over
        all coordinates, is above clip^2, error feedback carries mostly noise: the plan needs more bits, or a rotation.

        >>> for rotate in (65536, 0):
        ...     lattice = Lattice(LatticeTerms(25_560_000, 8, 1.0, rotate, 100, 1, clip=1.0), Key(1))
        ...     round(lattice.coordinates * lattice.mean_squared_error(1, 1), 5)
        0.00046
        30.76265
        """
        size = self.terms.clip if norm is None else norm
        variance = rounding_variance(size / math.sqrt(self.padded) / self.step)
        return self.step**2 * variance * survivors * (self.terms.weight_max / weight_sum) ** 2

    def encode(self, x: Vector, weight: int, window: int, rotation: Key, secret: SecretRng) -> Points:
        """Return the lattice points of a window of x, a client's update and residual, and leave the residual in x.

        A weight above `weight_max` counts as that. ValueError for a weight below 1. NonFiniteUpdate for NaN and
        infinity anywhere in x, which then is unchanged.
        """
        require_writable(x, self.terms.size)
        if weight < 1:
            raise ValueError(f"a weight is at least 1, not {weight}")
        part = self._window(window)
        weight = min(weight, self.terms.weight_max)
        norm = math.sqrt(part.squares(x))
        if not math.isfinite(norm):  # squares of float32 and their sum are far below the largest float64
            raise NonFiniteUpdate
        if self.walk.windows > 1:
            require_finite(x)
        share = weight / self.terms.weight_max
        clipped = min(1.0, self.terms.clip / (norm * share)) if norm else 1.0
        exponent = min(max(math.frexp(norm)[1], -126), 126)  # scaled to about 1 first, so that no product overflows
        per_value = math.ldexp(share * clipped / self.step, exponent)
        lanes, near = np.zeros(self.lanes, self.dtype), np.float32(math.ldexp(1, -exponent))

        scaled = self._fit(
            lambda factor: self._round(part, x, near, per_value * factor, rotation, secret, lanes), lanes[: self.padded]
        )
        lanes[self.padded :] = 1
        self._add(lanes, window, rotation, -self._unit(weight), True, x)
        return Points(lanes, weight, window, rotation, clipped, scaled)

    def fits(self, points: Points, secret: SecretRng) -> int:
        """Return 1 if nothing of a client's vector was scaled down, else 0: what follows the automatic clip."""
        del secret
        return int(points.clipped == points.scaled == 1.0)

    def represented(self, points: Points) -> Vector:
        """Return what the sum holds of this client, as a vector of the whole model in the model's unit."""
        into = np.zeros(self.terms.size, np.float32)
        self._add(points.lanes, points.window, points.rotation, self._unit(points.weight), False, into)
        return into

    def restore(self, points: Points, x: Vector) -> None:
        """Add what these points represent to x: the residual gets back an update that no sum has."""
        require_writable(x, self.terms.size)
        self._add(points.lanes, points.window, points.rotation, self._unit(points.weight), True, x)

    def decode_sum(self, total: Lanes, survivors: int, weight_sum: int, window: int, rotation: Key) -> Vector:
        """Return the weighted mean of the survivors' updates, a vector of the whole model, 0 off the window.

        `total` is the sum of their lanes modulo 2^w; upper bits are ignored. BadSum if a check lane is not `survivors`,
        an integer is outside [-survivors * A, survivors * A], or the sum of weights is impossible. A mask that was not
        removed, or removed with another key, makes the check lanes random: all are right with a probability of at
        most 2^-64. A fault in other lanes alone is found by the range, with a probability of at least (2^w - 2
        survivors A - 1) / 2^w for each random lane. Neither check finds a client that lies about its update.
        """
        self._require_sum(total, survivors, weight_sum)
        into = np.zeros(self.terms.size, np.float32)
        largest = self._add(total, window, rotation, self.step * self.terms.weight_max / weight_sum, False, into)
        if largest > survivors * self.terms.most:
            raise BadSum(f"a coordinate is {largest}, above {survivors} times {self.terms.most}")
        return into

    def _require_sum(self, total: Lanes, survivors: int, weight_sum: int) -> None:
        """Raise BadSum for check lanes or weights that this many clients cannot have, ValueError for other lanes."""
        if total.dtype != self.dtype or total.shape != (self.lanes,) or not total.flags.c_contiguous:
            raise ValueError(f"expected {self.lanes} lanes of {self.dtype}, got {total.dtype} of shape {total.shape}")
        if not 1 <= survivors <= self.terms.selected:
            raise ValueError(f"{survivors} survivors of {self.terms.selected}")
        if not survivors <= weight_sum <= survivors * self.terms.weight_max:
            raise BadSum(f"{survivors} weights of 1 to {self.terms.weight_max} do not have the sum {weight_sum}")
        if ((total[self.padded :] & ((1 << self.width) - 1)) != survivors).any():
            raise BadSum(f"the check lanes are not {survivors}: a mask was not removed, or the bytes are damaged")

    def _unit(self, weight: int) -> float:
        """Return the grid step in the model's unit."""
        return self.step * self.terms.weight_max / weight

    def _fit(self, round_scaled: Callable[[float], float], lanes: Lanes) -> float:
        """Round until the lanes are on the grid, and return the factor by which the vector was scaled down for it.

        `round_scaled` rounds the vector times a factor, and returns its largest place.
        """
        most = self.terms.most
        if (largest := round_scaled(1.0)) <= most * (1 + TOLERANCE):
            return 1.0
        round_scaled(scaled := most / largest)
        return scaled

    def _window(self, window: int) -> Window:
        whole = self.walk.windows == 1 and not self.terms.rotate
        count = self.walk.coordinates(window)
        return Window(None if whole else self.walk.order(window), self.walk.block, count)

    @cached_property
    def _blocks(self) -> list[tuple[int, int]]:
        if self.terms.rotate:
            return list(rotated_blocks(self.padded, self.terms.rotate))
        return [(start, min(start + BLOCK, self.padded)) for start in range(0, self.padded, BLOCK)]

    def _factor(self, factor: float, block: tuple[int, int]) -> np.float32:
        """Return the factor of a block whose transform is not scaled."""
        return np.float32(factor / math.sqrt(block[1] - block[0]) if self.terms.rotate else factor)

    def _round(
        self, part: Window, x: Vector, near: np.float32, factor: float, rotation: Key, secret: SecretRng, lanes: Lanes
    ) -> float:
        """Write the lanes of a window, and return the largest place, in steps."""
        word, turned, largest = _word(rotation), bool(self.terms.rotate), np.uint32(0)
        together = GROUP * threads()
        draws = np.empty((together, BLOCK), np.uint16)

        def work(first: int, last: int) -> np.uint32:
            room = working_memory()
            found = [
                part.round(
                    x, block, near, self._factor(factor, block), turned, word, self.terms.most,
                    draws[number % together], room, lanes[slice(*block)],
                )
                for number, block in enumerate(self._blocks[first:last], first)
            ]  # fmt: skip
            return max(found)

        for at in range(0, len(self._blocks), together):
            group = self._blocks[at : at + together]
            for row, (start, stop) in zip(draws, group, strict=False):
                secret.fill(row[: stop - start + (stop - start) % 2].view(np.uint32))
            largest = max(largest, *each_of(_shares(at, at + len(group)), work))
        return float(largest.view(np.float32))

    def _add(self, lanes: Lanes, window: int, rotation: Key, factor: float, adds: bool, into: Vector) -> int:
        """Add the lanes, rotated back, times a factor; return the largest magnitude of an integer."""
        part, word, turned = self._window(window), _word(rotation), bool(self.terms.rotate)

        def work(first: int, last: int) -> int:
            room = working_memory()
            return max(
                part.add(
                    lanes[slice(*block)], self.width, block, self._factor(factor, block), turned, word, adds, room, into
                )
                for block in self._blocks[first:last]
            )  # fmt: skip

        return max(each_of(_shares(0, len(self._blocks)), work))


def rounding_variance(deviation: float) -> float:
    """Return the mean of f (1 - f) for the fraction f of a normal number with this standard deviation.

    f (1 - f) = 1/6 - sum of cos(2 pi k z) / (pi k)^2 over k >= 1; the mean of each cosine is exp(-2 (pi k
    deviation)^2).

    >>> round(rounding_variance(1.0), 6), round(rounding_variance(0.1), 3)
    (0.166667, 0.07)
    """
    k = np.pi * np.arange(1, 10_001)
    return float(1 / 6 - np.sum(np.exp(-2 * (k * deviation) ** 2) / k**2))


def _word(rotation: Key) -> int:
    return word32(rotation, "lattice", 0)


def _shares(first: int, last: int) -> list[tuple[int, int]]:
    """Return (first, last) of about equal shares of the blocks, one a thread."""
    count = max(1, min(threads(), (last - first) // GROUP))
    cuts = [first + (last - first) * i // count for i in range(count + 1)]
    return list(itertools.pairwise(cuts))
