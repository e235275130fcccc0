"""The random rotation of `drive`, `eden(b)` and the lattice: random signs, then a Hadamard transform.

A vector is cut into blocks of 2^16, then into the powers of two of the rest, down to 64; a tail of fewer than 64 values
is not rotated. The rotation is D, signs drawn from the seed, then H, a Hadamard transform. A rotated block is nearly
normal whatever it was (Ailon and Chazelle 2009).

Invariant: the bits are final. Butterflies have the distances 1, 2, 4, .., each an addition and a subtraction in
float32, without scaling. So `rotate` multiplies norms by the root of the block's size.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    """Return D H x of one block, without scaling: the caller divides by the block's size.

    `rotate_back(rotate(x, drawn), drawn)` is x times the number of values in the block, up to rounding.

    >>> drawn, x = signs(0, 64, word=1), np.arange(64, dtype=np.float32)
    >>> bool(np.array_equal(rotate_back(rotate(x, drawn), drawn) / 64, x))
    True
    """
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
