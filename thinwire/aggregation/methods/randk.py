"""randk(r): places drawn by the key."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.codec import Contractive, Indices, Kind, Role
from thinwire.aggregation.hashing import lowbias32
from thinwire.aggregation.methods.arguments import read_ratio
from thinwire.aggregation.methods.topk import share
from thinwire.core.types import Vector

ROUNDS = 4
GOLDEN = 0x9E3779B9


@dataclass(frozen=True)
class RandK:
    """Sends the share r of values at places that the key draws: no place travels, only the key's word.

    Contractive with delta = r in expectation (Stich et al. 2018). Not scaled by 1/r: that would be unbiased, and
    inside a residual it diverges. The places are the first k of a permutation of all (Feistel network with four
    rounds on the next larger even number of bits, walked until it comes back into the range; Black and Rogaway 2002).
    """

    role: ClassVar[Role] = "sparsifier"
    examples: ClassVar[tuple[str, ...]] = ("randk(0.1)", "randk(0.5) > int8")
    fixed: ClassVar[bool] = True
    seeded: ClassVar[bool] = True
    looks: ClassVar[bool] = False
    ratio: Decimal

    @classmethod
    def read(cls, argument: str | None) -> RandK:
        return cls(read_ratio("randk", argument))

    @property
    def spec(self) -> str:
        return f"randk({self.ratio:f})"

    def kind(self) -> Kind:
        return Contractive(float(self.ratio))

    def count(self, size: int) -> int:
        return share(self.ratio, size)

    def select(self, values: Vector, word: int) -> tuple[Indices, Vector]:
        places = self.places(values.size, word)
        return places, values[places]

    def places(self, size: int, word: int) -> Indices:
        half = max(1, -(-max(size - 1, 1).bit_length() // 2))
        found = _permuted(np.arange(self.count(size), dtype=np.uint32), half, word)
        while (out := found >= size).any():
            found[out] = _permuted(found[out], half, word)
        return np.sort(found).astype(np.int64)


def _permuted(numbers: NDArray[np.uint32], half: int, word: int) -> NDArray[np.uint32]:
    """A permutation of 0 .. 4^half - 1."""
    bits, mask = np.uint32(half), np.uint32((1 << half) - 1)
    left, right = numbers >> bits, numbers & mask
    for number in range(1, ROUNDS + 1):
        salt = np.uint32((word + number * GOLDEN) & 0xFFFFFFFF)
        left, right = right, left ^ (lowbias32(right ^ salt) & mask)
    return left << bits | right
