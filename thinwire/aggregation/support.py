"""The support of secure aggregation: which coordinates a round sends, the same for the whole cohort.

The model's coordinates are cut into blocks of consecutive ones. A key fixes one permutation of the blocks for a run,
and consecutive parts of it are the windows. Step s sends window s mod `windows`, so `windows` steps visit each
coordinate exactly once (a walk without replacement).

Blocks, not single coordinates, are permuted: a block of 64 is four cache lines, so a window is read at memory speed,
and the permutation takes 1/64 of a model's memory. The cost: the coordinates of one block always travel together, so
a tensor with fewer than 64 coordinates is in one window. A window's share of a larger tensor is random, and even to
within a few blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from thinwire.core.prng import Key, lowbias32, word32

LARGEST_BLOCK = 64  # coordinates: four cache lines
BLOCKS_OF_A_WINDOW = 16  # at least so many if the model has them: small models have smaller blocks
MIN_VISITS = 10  # fewer visits of a coordinate in a run than these are worth a warning
LARGEST_SIZE = (1 << 32) - 1  # coordinates: block numbers and lane indices have 32 bits
ROUNDING = 1e-9  # 1 / share may be above a whole number by a rounding error


@dataclass(frozen=True)
class SupportWalk:
    """Gives the window of each step: its coordinates in the order in which they are sent.

    `size` is the number of the model's coordinates, `share` the part of them in one window, in (0, 1]. Windows differ
    by at most one block and the model's incomplete last block, which is the end of the last window. The permutation
    sorts the block numbers by a hash that maps 32-bit words one to one: any machine gets the same order.

    >>> walk = SupportWalk(1000, 0.25, Key(1))
    >>> walk.windows, walk.block, [walk.coordinates(window) for window in range(4)]
    (4, 8, [248, 248, 248, 256])
    >>> walk.visits(41)
    10
    """

    size: int
    share: float
    key: Key

    def __post_init__(self) -> None:
        if not 0 < self.size <= LARGEST_SIZE:
            raise ValueError(f"a support needs 1 to {LARGEST_SIZE} coordinates, not {self.size}")
        if not 0 < self.share <= 1:
            raise ValueError(f"support = {self.share} is not in (0, 1]")
        if self.windows > self.size:
            raise ValueError(f"support = {self.share} of {self.size} coordinates is less than one coordinate")

    @property
    def windows(self) -> int:
        """Return the number of windows, which is the number of steps between two visits of a coordinate."""
        return math.ceil(1 / self.share - ROUNDING)

    @property
    def block(self) -> int:
        """Return the number of consecutive coordinates that always travel together, a power of two."""
        block = LARGEST_BLOCK
        while block > 1 and self.size // block < BLOCKS_OF_A_WINDOW * self.windows:
            block //= 2
        return block

    def visits(self, steps: int) -> int:
        """Return how often the least visited coordinate is sent in this number of steps; below MIN_VISITS is few."""
        return steps // self.windows

    def coordinates(self, window: int) -> int:
        """Return the number of coordinates of a window."""
        first, last = self._cut(window), self._cut(window + 1)
        return (last - first) * self.block + (self.size % self.block) * (window == self.windows - 1)

    @property
    def largest(self) -> int:
        """Return the number of coordinates of the largest window."""
        blocks = self.size // self.block
        last = self.coordinates(self.windows - 1)
        return max(last, -(-blocks // self.windows) * self.block)

    def order(self, window: int) -> NDArray[np.uint32]:
        """Return the block numbers of a window, in the order in which their coordinates are sent, as a view.

        The number of the model's incomplete last block, if there is one, comes last in the last window.
        """
        end = self._cut(window + 1) + (window == self.windows - 1)  # a view ends where the permutation ends
        return self.permutation[self._cut(window) : end]

    def indices(self, window: int) -> NDArray[np.int64]:
        """Return the coordinates of a window as indices of the model, in order: eight bytes for each coordinate."""
        whole = self.order(window).astype(np.int64)[:, None] * self.block + np.arange(self.block)
        return whole.reshape(-1)[: self.coordinates(window)]

    @cached_property
    def permutation(self) -> NDArray[np.uint32]:
        """Return the numbers of all whole blocks in the order of the walk, then that of the incomplete last block."""
        blocks = self.size // self.block
        hashed = np.arange(blocks, dtype=np.uint32)
        for turn in range(2):  # each is one to one, so no two blocks have the same hash
            hashed ^= np.uint32(word32(self.key, "support", turn))
            lowbias32(hashed)
        found = np.argsort(hashed).astype(np.uint32)
        if self.size % self.block:
            found = np.append(found, np.uint32(blocks))
        found.flags.writeable = False
        return found

    def _cut(self, window: int) -> int:
        if not 0 <= window <= self.windows:
            raise ValueError(f"window {window} is not one of {self.windows}")
        return self.size // self.block * window // self.windows
