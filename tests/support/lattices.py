"""Lattices of small runs, and the points of clients that draw from keys."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.scripted_rng import ScriptedRng
from thinwire.aggregation.lattice import Lattice, LatticeTerms, Points
from thinwire.aggregation.lattice_window import Lanes
from thinwire.core import Key
from thinwire.core.prng import lowbias32, word32
from thinwire.core.types import Vector

TERMS = LatticeTerms(10_000, bits=8, support=1.0, rotate=4096, selected=10, weight_max=1, clip=1.0)
KINDS = [  # rotate, support, bits: no window, windows, incomplete blocks; lanes of 16 and 32 bits
    (0, 1.0, 8), (0, 0.3, 4), (65536, 1.0, 8), (65536, 0.1, 16), (64, 0.5, 2), (1024, 1.0, 14),
]  # fmt: skip


def bound(size: int = 10_000, **changes: Any) -> Lattice:
    return Lattice(dataclasses.replace(TERMS, size=size, **changes), Key(7))


def of_kind(kind: tuple[int, float, int], size: int, **changes: Any) -> Lattice:
    return bound(size, rotate=kind[0], support=kind[1], bits=kind[2], **changes)


def drawn(size: int, seed: int = 1, norm: float = 1.0) -> Vector:
    x = np.random.default_rng(seed).normal(size=size).astype(np.float32)
    return np.asarray(x * np.float32(norm / np.linalg.norm(x)), np.float32)


def encoded(lattice: Lattice, x: Vector, seed: int = 1, weight: int = 1, window: int = 0) -> Points:
    return lattice.encode(x, weight, window, Key(11), KeyedRng(Key(seed)))


class KeyedRng(ScriptedRng):
    """Draws words that a key decides, by which golden files were written.

    The i-th word is the same however many are taken at once.
    """

    def __init__(self, key: Key) -> None:
        super().__init__(0)
        self._words, self._taken = (word32(key, "rounding", 0), word32(key, "rounding", 1)), 0

    def fill(self, out: NDArray[np.uint8] | NDArray[np.uint32]) -> None:
        drawn = np.arange(self._taken, self._taken + out.size, dtype=np.uint64).astype(np.uint32)
        for word in self._words:
            drawn ^= np.uint32(word)
            lowbias32(drawn)
        out[:] = drawn
        self._taken += out.size


def summed(points: list[Points]) -> Lanes:
    total = np.zeros_like(points[0].lanes)
    for each in points:
        total += each.lanes
    return total
