"""Sums with differential privacy: clipped vectors as integers on a grid, whose sum gets noise before it is a float.

A sum is that of a round's updates (central), or it has one update alone, which its own client noises (local).

Sums of floats leak: their rounding depends on each update, and noise of floats has gaps (Mironov 2012, "On Significance
of the Least Significant Bits"; Casacuberta et al. 2022). So the norm is checked in exact integers, the sum is exact,
the noise is whole numbers, and only the noised sum is scaled to floats.

- `PrivateSum` is the sum of a round in central mode: the aggregator rounds each update, and adds noise once.
- `PrivateLattice` is the lattice of secure aggregation in distributed mode: each client rounds its update and adds its
  part of the noise before it masks the integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.lattice import Lattice, Points
from thinwire.core.errors import NonFiniteUpdate
from thinwire.core.privacy_numbers import CLIP_RANGE, padded_dimensions, squared_sensitivity

if TYPE_CHECKING:
    from thinwire.aggregation.lattice_window import Lanes
    from thinwire.core.prng import Key, SecretRng
    from thinwire.core.types import Vector
    from thinwire.privacy.noise_plan import NoisePlan

Draw = Callable[[NDArray[np.int32]], None]  # overwrites an array with independent draws of the noise
CHUNK = 1 << 18  # coordinates: the arrays of a chunk stay in the cache
ATTEMPTS = 100  # to round a vector within the bound; one fails with a probability of at most 0.61, so all with 1e-21
DRAW_BITS = 32


class NotRounded(ValueError):
    """No attempt rounded a vector within the bound: it is not sent."""


class PrivateSum:
    """A sum of updates that is noised once.

    `clip` is the largest L2 norm of an update, and `scale` the number of grid steps that it has. The mean is the noised
    sum divided by `clients`, a number that no data decide. An update within the clip adds `count` to the count that an
    adaptive clip follows, and another one subtracts it. Memory: 64 bits a coordinate, and one draw of noise.
    """

    def __init__(self, size: int, clip: float, scale: float, clients: float, rng: SecretRng, count: int = 0) -> None:
        self.clip, self.scale, self.clients, self._rng = clip, scale, clients, rng
        self.count, self._counted = count, 0
        self.share: float | None = None  # of the clients whose update was within the clip, with noise
        self.total: NDArray[np.int64] | None = np.zeros(size, np.int64)
        self._most = squared_sensitivity(scale, size)

    def add(self, vector: Vector) -> bool:
        """Add one update; return True if its norm was within the clip. NonFiniteUpdate for NaN or infinity."""
        if self.total is None:
            raise RuntimeError("the sum was released")
        norm = math.sqrt(sum(float(np.dot(part, part)) for _, part in _chunks(vector)))
        if not math.isfinite(norm):
            raise NonFiniteUpdate
        factor = self.scale / max(norm, self.clip)
        for _ in range(ATTEMPTS):
            points = np.empty(vector.size, np.int32)
            squares = 0
            for where, part in _chunks(vector):
                rounded = self._round(part * factor)
                points[where] = rounded
                squares += int(np.dot(rounded, rounded))
            if squares <= self._most:
                self.total += points
                self._counted += self.count if norm <= self.clip else -self.count
                return norm <= self.clip
        raise NotRounded(f"{ATTEMPTS} attempts to round an update")  # its norm is a fact that nobody may read

    def _round(self, places: NDArray[np.float64]) -> NDArray[np.int64]:
        """Round up with the probability of the fraction, to 2^-32."""
        words = np.empty(places.size, np.uint32)
        self._rng.fill(words)
        below = np.floor(places)
        up = words < (places - below) * 2.0**DRAW_BITS
        return below.astype(np.int64) + up

    def release(self, draw: Draw) -> Vector:
        """Return the mean with one draw of noise a coordinate; a sum is released once."""
        if self.total is None:
            raise RuntimeError("a second draw of noise on the same sum would be released")
        total, self.total = self.total, None
        noise, mean = np.empty(total.size, np.int32), np.empty(total.size, np.float32)
        draw(noise)
        total += noise
        if self.count:
            draw(noise[:1])
            self.share = fitted_share(self._counted + int(noise[0]), self.count, self.clients)
        unit = self.clip / self.scale / self.clients
        for start in range(0, total.size, CHUNK):
            mean[start : start + CHUNK] = total[start : start + CHUNK] * unit
        return mean


def fitted_share(total: int, count: int, clients: float) -> float:
    """Return the share of `clients` whose update was within the clip, from the noised sum of `count` and -`count`.

    A client that is not in the sum counts half, so that the share depends on no number of replies.

    >>> fitted_share(-30, 10, 4)
    0.125
    """
    return 0.5 + total / (2 * count * clients)


def clip_layers(vector: Vector, spans: Sequence[slice], clip: float) -> None:
    """Scale each of L parts of a vector down to a norm of clip / sqrt(L), so that the vector's is at most `clip`.

    Without it one tensor with large gradients takes the whole clip (McMahan et al. 2018, section 3.2). NaN and
    infinity stay, for the check that follows.
    """
    most = clip / math.sqrt(len(spans))
    for span in spans:
        part = vector[span]
        norm = math.sqrt(sum(float(np.dot(each, each)) for _, each in _chunks(part)))
        if norm > most and math.isfinite(norm):
            part *= np.float32(most / norm)


@dataclass(frozen=True)
class PrivateTerms:
    """Gives what all clients of a distributed run must agree on about their lattice points; it is part of ctx0.

    `size` is the number of trained parameters, `support` the share of coordinates in a round, `rotate` the largest
    rotated block, `selected` the number of clients that a round selects, and `clip` the largest L2 norm of an update.
    `noise` gives the grid, the noise of one client, and the bits of a lane.
    """

    size: int
    support: float
    rotate: int
    selected: int
    clip: float
    noise: NoisePlan
    weight_max: int = field(default=1, init=False)  # all clients count the same

    def __post_init__(self) -> None:
        if not CLIP_RANGE[0] <= self.clip <= CLIP_RANGE[1]:  # a quotient of denormals would be off by a third
            raise ValueError(f"clip = {self.clip} is not between 2^-60 and 2^60")

    @property
    def width(self) -> int:
        """Return the bits of a lane, by `core.privacy_numbers.width_for`."""
        return self.noise.width

    @property
    def most(self) -> int:
        """Return an integer that no coordinate reaches: the norm bounds the coordinates, and nothing is cut off.

        The squares of a chunk of such integers add up to less than 2^63, so their sum is exact.
        """
        return 1 << 22


class PrivateLattice(Lattice):
    """Encodes updates as lattice points with noise, and decodes their sum.

    As in every `Lattice`, the window of x is clipped, rotated and rounded; then

    - the squared norm of the integers is at most `squared_sensitivity`: they are rounded again until it is. This check
      alone bounds the sensitivity, whatever float32 did before it. It needs nothing of another client's update.
    - noise is added to all coordinates, also to those that fill the last block.

    Invariant: what `encode` leaves in x depends on the rounded point without its noise: noise never enters a residual.

    `decode_sum` divides by `selected`, a number that no data decide, and not by the clients whose updates are there.
    """

    def __init__(self, terms: PrivateTerms, key: Key) -> None:
        self.noise = terms.noise
        super().__init__(terms, key)
        self.most_squared = squared_sensitivity(terms.noise.scale, self.padded)
        self.grid = (
            f"{terms.noise.scale!r} {terms.noise.variance!r} {terms.noise.count} {terms.noise.release.distribution}"
        )

    def _shape(self) -> tuple[int, float]:
        padded, _ = padded_dimensions(self.coordinates, self.terms.rotate)
        return padded, self.terms.clip / self.noise.scale

    def encode(self, x: Vector, weight: int, window: int, rotation: Key, secret: SecretRng) -> Points:
        """Encode as `Lattice.encode` does, with noise; the weight counts as 1.

        NotRounded, after which x is unchanged, if no attempt keeps the bound.
        """
        points = super().encode(x, 1, window, rotation, secret)
        sampler, noise = self.noise.sampler, np.empty(min(CHUNK, self.padded), np.int32)
        for start in range(0, self.padded, CHUNK):
            lanes = points.lanes[start : min(start + CHUNK, self.padded)]
            sampler.fill(noise[: lanes.size], secret)
            lanes += noise[: lanes.size].astype(self.dtype)
        return points

    def fits(self, points: Points, secret: SecretRng) -> int:
        """Return what a client adds to the count that an adaptive clip follows, with its part of the noise."""
        noise = np.empty(1, np.int32)
        self.noise.sampler.fill(noise, secret)
        return (self.noise.count if super().fits(points, secret) else -self.noise.count) + int(noise[0])

    def _fit(self, round_scaled: Callable[[float], float], lanes: Lanes) -> float:
        for _ in range(ATTEMPTS):
            round_scaled(1.0)
            if _squared(lanes) <= self.most_squared:
                return 1.0
        raise NotRounded(f"{ATTEMPTS} attempts to round an update")

    def decode_sum(self, total: Lanes, survivors: int, weight_sum: int, window: int, rotation: Key) -> Vector:
        """Return the sum of the survivors' updates with its noise, divided by `selected`.

        BadSum as in `Lattice.decode_sum`, but that noise bounds no coordinate: its check lanes find a wrong mask.
        """
        self._require_sum(total, survivors, weight_sum)
        into = np.zeros(self.terms.size, np.float32)
        self._add(total, window, rotation, self.step / self.terms.selected, False, into)
        return into


def _squared(lanes: Lanes) -> int:
    """Return the squared norm of lanes as signed integers, exactly."""
    signed, squares = lanes.view(np.int16 if lanes.itemsize == 2 else np.int32), 0
    for start in range(0, signed.size, CHUNK):
        part = signed[start : start + CHUNK].astype(np.int64)
        squares += int(np.dot(part, part))
    return squares


def _chunks(vector: Vector) -> Iterator[tuple[slice, NDArray[np.float64]]]:
    for start in range(0, vector.size, CHUNK):
        where = slice(start, min(start + CHUNK, vector.size))
        yield where, vector[where].astype(np.float64)
