"""The scales of eden and drive: a float32 for each rotated block, then what is too short to rotate, the tail, as fp16.

The tail is a byte for its exponent and two for each value; where there is no tail, there is no exponent.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thinwire.aggregation.codec import Scales
from thinwire.aggregation.methods.fp16 import Fp16
from thinwire.aggregation.rotation import block_sizes
from thinwire.core.errors import BadPayload
from thinwire.core.types import Vector

MOST = np.float32(2.0**108)  # 2^16 levels of at most 2.74, added up and times this, are finite
TAIL = Fp16()


def count(size: int) -> int:
    """Bytes of the scales of so many values.

    >>> count(64), count(65)
    (4, 7)
    """
    tail = size - rotated(size)
    return 4 * len(block_sizes(size)) + (1 + 2 * tail) * (tail > 0)


def rotated(size: int) -> int:
    """How many of so many values are rotated; the others are the tail."""
    return sum(block_sizes(size))


def factors_of(scales: Scales, size: int) -> Vector:
    """One a block; a view."""
    found: Vector = scales[: 4 * len(block_sizes(size))].view("<f4")
    return found


def joined(factors: Sequence[float], tail: Vector) -> Scales:
    halves, exponents = TAIL.quantize(tail, 0)
    return np.concatenate([np.array(factors, "<f4").view(np.uint8), exponents.view(np.uint8), halves.view(np.uint8)])


def write_tail(tail: Vector, scales: Scales) -> None:
    """Into the end of scales that have room for it."""
    if tail.size:
        halves, exponents = TAIL.quantize(tail, 0)
        scales[-1 - halves.nbytes] = exponents.view(np.uint8)[0]
        scales[-halves.nbytes :] = halves.view(np.uint8)


def tail_of(scales: Scales, size: int) -> Vector:
    """The tail as it was sent; only where there is one."""
    at = 4 * len(block_sizes(size))
    halves = scales[at + 1 :].view("<f2")
    return TAIL.dequantize(halves, scales[at : at + 1].view(np.int8), slice(0, halves.size), 0)


def check(spec: str, scales: Scales, size: int) -> None:
    """`BadPayload` for what no encoder makes."""
    factors = factors_of(scales, size)
    if not ((factors >= 0) & (factors <= MOST)).all():
        raise BadPayload(f"a scale that {spec} never makes", why="it is negative, not finite or out of range")
    if rotated(size) < size:
        rest = scales[factors.nbytes :]
        TAIL.check(rest[1:].view("<f2"), rest[:1].view(np.int8))
