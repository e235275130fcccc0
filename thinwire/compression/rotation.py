"""The random rotation of `drive`, `eden(b)` and the lattice, and facts about the normal values that it makes.

A vector is cut into blocks of 2^16, then into the powers of two of the rest, down to 64; a tail of fewer than 64 values
is not rotated. The rotation is D, signs drawn from the seed, then H, a Hadamard transform. A rotated block is nearly
normal whatever it was (Ailon and Chazelle 2009).

Invariant: the bits are final. Butterflies have the distances 1, 2, 4, .., each an addition and a subtraction in
float32, without scaling. So `rotate` multiplies norms by the root of the block's size, and `rotate_back` of `rotate`
multiplies by the size itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from thinwire.core.prng import lowbias32

if TYPE_CHECKING:
    from thinwire.core.types import Vector

MAX_BLOCK, MIN_BLOCK = 1 << 16, 1 << 6


def rotated_blocks(size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each rotated block.

    >>> [stop - start for start, stop in rotated_blocks(2 * MAX_BLOCK + 200)]
    [65536, 65536, 128, 64]
    """
    start = 0
    while size - start >= MIN_BLOCK:
        length = min(MAX_BLOCK, 1 << (size - start).bit_length() - 1)
        yield start, start + length
        start += length


def block_sizes(size: int) -> list[int]:
    """Return the size of each rotated block."""
    return [stop - start for start, stop in rotated_blocks(size)]


def rotated_size(size: int) -> int:
    """Return how many of `size` values are rotated; the rest is the tail."""
    return sum(block_sizes(size))


def signs(start: int, stop: int, word: int) -> NDArray[np.uint32]:
    """Return the random sign bit of each index."""
    mixed = np.arange(start, stop, dtype=np.uint32)
    mixed ^= np.uint32(word)
    return lowbias32(mixed) & np.uint32(0x80000000)


def rotate(values: Vector, drawn: NDArray[np.uint32]) -> Vector:
    """Return H D x of one block."""
    return hadamard((values.view(np.uint32) ^ drawn).view(np.float32))


def rotate_back(values: Vector, drawn: NDArray[np.uint32]) -> Vector:
    """Return D H x of one block; the transform is its own inverse except for a factor of the block's size."""
    back: Vector = (hadamard(values).view(np.uint32) ^ drawn).view(np.float32)
    return back


def hadamard(values: Vector) -> Vector:
    """Return the unscaled Walsh-Hadamard transform of a power of two values.

    >>> hadamard(np.float32([1, 2, 3, 4])).tolist()
    [10.0, -2.0, -4.0, 0.0]
    """
    size = values.size
    near = 1 << (size.bit_length() - 1) // 2  # half of the bits: their butterflies run along a transposed copy
    wide = np.ascontiguousarray(values.reshape(-1, near).T)
    wide = np.ascontiguousarray(_butterflies(wide).T)
    return _butterflies(wide).reshape(-1)


def _butterflies(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the rows after butterflies of all distances along the first axis."""
    distance, width = 1, rows.shape[1]
    while distance < rows.shape[0]:
        pairs = rows.reshape(-1, 2, distance, width)
        out = np.empty_like(pairs)
        np.add(pairs[:, 0], pairs[:, 1], out=out[:, 0])
        np.subtract(pairs[:, 0], pairs[:, 1], out=out[:, 1])
        rows = out.reshape(rows.shape)
        distance *= 2
    return rows


def share_beyond(t: float) -> float:
    """Return the share of normal values whose magnitude is at least `t` standard deviations."""
    return math.erfc(t / math.sqrt(2))


def bits_beyond(t: float) -> float:
    """Return the entropy in bits a value of which normal values are beyond `t`, and of their signs.

    >>> round(bits_beyond(2.5), 3)
    0.109
    """
    p = share_beyond(t)
    return p - p * math.log2(p) - (1 - p) * math.log1p(-p) / math.log(2)


def variance_beyond(t: float) -> float:
    """Return E||y - x||^2 / ||x||^2 for normal x, if y has the signs of x beyond `t`, and <x, y> = ||x||^2.

    >>> round(variance_beyond(2.5), 2)
    9.11
    """
    density = math.exp(-t * t / 2) / math.sqrt(2 * math.pi)
    return share_beyond(t) / (4 * density**2) - 1


@functools.cache
def threshold(rate: Decimal) -> float:
    """Return the threshold t at which normal values take `rate` bits each, the nearest multiple of 1/4096.

    So coarse a grid gives each machine the same t, whatever the last bits of its exponentials are.

    >>> threshold(Decimal("0.109"))
    2.49951171875
    """
    low, high = 0.6, 6.0  # bits fall from 1.54 to 7e-8
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if bits_beyond(middle) > rate else (low, middle)
    return round(low * 4096) / 4096
