"""The windows of secure aggregation: which coordinates a round sends, and the kernels that round and add them.

The model's coordinates are cut into blocks of consecutive ones. A key fixes one permutation of the blocks for a run,
and consecutive parts of it are the windows. Step s sends window s mod `windows`, so `windows` steps visit each
coordinate exactly once (a walk without replacement).

Blocks, not single coordinates, are permuted: a block of 64 is four cache lines, so a window is read at memory speed,
and the permutation takes 1/64 of a model's memory. The cost: the coordinates of one block always travel together, so
a tensor with fewer than 64 coordinates is in one window. A window's share of a larger tensor is random, and even to
within a few blocks.

A lane is one coordinate of a window, in the window's order. `csrc/lattice.hpp` has the same two steps as
`Window.round` and `Window.add`, for one block of at most 2^16 lanes, and the numpy oracles are beside them here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from thinwire.compression.base import BLOCK, buckets
from thinwire.compression.native import kernel
from thinwire.compression.rotation import MIN_BLOCK, rotate, rotate_back, signs
from thinwire.compression.vector_ops import MAGNITUDE, bucket_sums, in_order, partial_sums

if TYPE_CHECKING:
    from thinwire.core.types import Vector
import math
from functools import cached_property

from thinwire.core.prng import Key, lowbias32, word32

PADDING_SHARE = 32  # rotation adds at most 1/32 of the coordinates, or 63
Lanes = NDArray[np.uint16] | NDArray[np.uint32]


@dataclass(frozen=True)
class Window:
    """Reads and writes the coordinates of one window, block by block, with kernels or their numpy oracles.

    `order` holds the numbers of blocks of `block` coordinates, or is None if the window is the vector itself. `count`
    is the number of coordinates; lanes after them are padding.
    """

    order: NDArray[np.uint32] | None
    block: int
    count: int

    def squares(self, x: Vector) -> float:
        """Return the sum of squares of a window; one of all coordinates is summed in the vector's own order."""
        run = kernel("lattice_squares")
        if self.count == x.size:
            sums = bucket_sums(x, 2)
        elif run is None:
            parts = [self._read(x, at, at + BLOCK)[: self.count - at] for at in range(0, self.count, BLOCK)]
            sums = np.concatenate([partial_sums(values.astype(np.float64) ** 2) for values in parts])
        else:
            sums = np.empty(buckets(self.count))
            run(x.ctypes.data, *self._order(), sums.ctypes.data)
        return in_order(sums)

    def round(
        self, x: Vector, span: tuple[int, int], near: np.float32, factor: np.float32, turned: bool, word: int,
        most: int, draws: NDArray[np.uint16], room: NDArray[np.float32], lanes: Lanes,
    ) -> np.uint32:  # fmt: skip
        """Write the lanes of one block, and return the bits of the largest place as a float32.

        A place is a coordinate times both factors, rotated if `turned`. `room` is `working_memory()`.
        """
        run = kernel("lattice_round")
        if run is not None:
            to = lanes.ctypes.data
            args = turned, word, most, draws.ctypes.data, room.ctypes.data, lanes.itemsize, to
            return np.uint32(run(x.ctypes.data, *self._order(), *span, near, factor, *args))
        places = self._read(x, *span) * near * factor
        if turned:
            places = rotate(places, signs(*span, word))
        below = np.floor(places)
        up = (draws[: places.size].astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-16) < places - below
        lanes[:] = np.clip(below.astype(np.int32) + up, -most, most).astype(np.int32).astype(lanes.dtype)
        found: np.uint32 = (places.view(np.uint32) & MAGNITUDE).max()
        return found

    def add(
        self, lanes: Lanes, width: int, span: tuple[int, int], factor: np.float32, turned: bool, word: int,
        adds: bool, room: NDArray[np.float32], into: Vector,
    ) -> int:  # fmt: skip
        """Add one block's integers, rotated back, times a factor, or write them; return the largest magnitude."""
        run = kernel("lattice_add")
        if run is not None:
            at, to = (lanes.ctypes.data, lanes.itemsize, width), (room.ctypes.data, into.ctypes.data)
            return int(run(*at, *self._order(), *span, turned, word, factor, adds, *to))
        integers = (lanes.astype(np.uint32) << np.uint32(32 - width)).view(np.int32) >> np.int32(32 - width)
        values = integers.astype(np.float32)
        values = (rotate_back(values, signs(*span, word)) if turned else values) * factor
        places = self._places(*span)
        into[places] = into[places] + values[: places.size] if adds else values[: places.size]
        return int(np.abs(integers.astype(np.int64)).max())

    def _order(self) -> tuple[int | None, int, int]:
        return (None if self.order is None else self.order.ctypes.data), self.block, self.count

    def _places(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the indices of positions start .. stop; there are none after the last coordinate."""
        at = np.arange(start, min(stop, self.count))
        if self.order is None:
            return at
        return self.order[at // self.block].astype(np.int64) * self.block + at % self.block

    def _read(self, x: Vector, start: int, stop: int) -> Vector:
        values = np.zeros(stop - start, np.float32)
        places = self._places(start, stop)
        values[: places.size] = x[places]
        return values


def padded_size(coordinates: int, largest: int) -> int:
    """Return how many lanes the rotation of these coordinates gives, whole blocks of at least 64 lanes.

    >>> padded_size(255_600, 65536), padded_size(300, 65536)
    (258048, 320)
    """
    smallest = min(max(MIN_BLOCK, _power_below(max(1, coordinates // PADDING_SHARE))), largest)
    return -(-coordinates // smallest) * smallest


def rotated_blocks(size: int, largest: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each rotated block: blocks of `largest`, then the powers of two of the rest.

    >>> list(rotated_blocks(320, 128))
    [(0, 128), (128, 256), (256, 320)]
    """
    start = 0
    while start < size:
        stop = start + min(largest, _power_below(size - start))
        yield start, stop
        start = stop


def working_memory() -> NDArray[np.float32]:
    """Return the working memory of one thread for one block; numpy needs none."""
    run = kernel("eden_room")
    return np.empty(run() if run is not None else 0, np.float32)


def _power_below(number: int) -> int:
    return 1 << number.bit_length() - 1


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
