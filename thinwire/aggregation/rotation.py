"""Random rotations: signs drawn by the key, then a Hadamard transform, block by block.

A vector is cut into blocks of 2^16, then into the powers of two of what is left, down to 64; a tail of under 64 is not
rotated. A rotated block is nearly normal whatever it was (Ailon and Chazelle 2009), so one table of levels fits all.
The bits are final: butterflies of distance 1, 2, 4, .., each an addition and a subtraction in float32, and no scaling:
`rotate` multiplies norms by the root of the block's size, and `rotate_back` of `rotate` by the size itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.hashing import lowbias32
from thinwire.core.types import Vector

LARGEST, SMALLEST = 1 << 16, 1 << 6


def rotated_blocks(size: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of each block.

    >>> [stop - start for start, stop in rotated_blocks(2 * LARGEST + 200)]
    [65536, 65536, 128, 64]
    """
    start = 0
    while size - start >= SMALLEST:
        length = min(LARGEST, 1 << (size - start).bit_length() - 1)
        yield start, start + length
        start += length


def block_sizes(size: int) -> list[int]:
    return [stop - start for start, stop in rotated_blocks(size)]


def signs(start: int, stop: int, word: int) -> NDArray[np.uint32]:
    """The sign bit drawn for each index."""
    mixed = np.arange(start, stop, dtype=np.uint32)
    mixed ^= np.uint32(word)
    return lowbias32(mixed) & np.uint32(0x80000000)


def rotate(values: Vector, drawn: NDArray[np.uint32]) -> Vector:
    """H D x of one block."""
    return hadamard((values.view(np.uint32) ^ drawn).view(np.float32))


def rotate_back(values: Vector, drawn: NDArray[np.uint32]) -> Vector:
    """D H x: the transform is its own inverse, but for the block's size."""
    back: Vector = (hadamard(values).view(np.uint32) ^ drawn).view(np.float32)
    return back


def hadamard(values: Vector) -> Vector:
    """The Walsh-Hadamard transform of a power of two values, not scaled.

    >>> hadamard(np.float32([1, 2, 3, 4])).tolist()
    [10.0, -2.0, -4.0, 0.0]
    """
    size = values.size
    near = 1 << (size.bit_length() - 1) // 2  # half of the bits: those butterflies run along a transposed copy
    wide = np.ascontiguousarray(values.reshape(-1, near).T)
    wide = np.ascontiguousarray(_butterflies(wide).T)
    return _butterflies(wide).reshape(-1)


def _butterflies(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """All distances along the first axis."""
    distance, width = 1, rows.shape[1]
    while distance < rows.shape[0]:
        pairs = rows.reshape(-1, 2, distance, width)
        out = np.empty_like(pairs)
        np.add(pairs[:, 0], pairs[:, 1], out=out[:, 0])
        np.subtract(pairs[:, 0], pairs[:, 1], out=out[:, 1])
        rows = out.reshape(rows.shape)
        distance *= 2
    return rows
