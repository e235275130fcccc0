"""Sums with differential privacy: clipped updates as integers on a grid, whose sum gets noise before it is a float.

Sums of floats leak: their rounding depends on each update, and noise of floats has gaps (Mironov 2012, "On Significance
of the Least Significant Bits"; Casacuberta et al. 2022). So the norm is checked in exact integers, the sum is exact in
64 bits, the noise is whole numbers, and only the noised sum is scaled to floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from thinwire.core.errors import NonFiniteUpdate
from thinwire.core.privacy_numbers import squared_sensitivity

if TYPE_CHECKING:
    from thinwire.core.prng import SecretRng
    from thinwire.core.types import Vector

Draw = Callable[[NDArray[np.int32]], None]  # overwrites an array with independent draws of the noise
CHUNK = 1 << 18  # coordinates: the arrays of a chunk stay in the cache
ATTEMPTS = 100  # to round a vector within the bound; one fails with a probability of at most 0.61, so all with 1e-21
DRAW_BITS = 32


class NotRounded(ValueError):
    """No attempt rounded a vector within the bound: it is not sent."""


class PrivateSum:
    """The sum of the updates of one round, in central mode.

    `clip` is the largest L2 norm of an update, and `scale` the number of grid steps that it has. The mean is the noised
    sum divided by `clients`, a number that no data decide. Memory: 64 bits a coordinate, and one draw of noise.
    """

    def __init__(self, size: int, clip: float, scale: float, clients: int, rng: SecretRng) -> None:
        self.clip, self.scale, self.clients, self._rng = clip, scale, clients, rng
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
                return norm <= self.clip
        raise NotRounded(f"{ATTEMPTS} attempts to round a vector of norm {norm:g}")

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
        unit = self.clip / self.scale / self.clients
        for start in range(0, total.size, CHUNK):
            mean[start : start + CHUNK] = total[start : start + CHUNK] * unit
        return mean


def _chunks(vector: Vector) -> Iterator[tuple[slice, NDArray[np.float64]]]:
    for start in range(0, vector.size, CHUNK):
        where = slice(start, min(start + CHUNK, vector.size))
        yield where, vector[where].astype(np.float64)
