"""Quantizers: each value as a small symbol, each bucket of 4096 values with one scale.

The bits are final: u = (lowbias32(i ^ word) >> 8) / 2^24 for value i, symbol = floor(x * (1 / scale) + u), all in
float32, each operation rounded by itself. Golden files hold them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.buckets import BUCKET, buckets, maxima, scaled
from thinwire.aggregation.codec import Kind, Role, Scales, Symbols, Unbiased, blocks
from thinwire.core.errors import BadPayload
from thinwire.core.types import Vector

LEVELS = 127
LEAST = np.float32(2.0**-110)  # scales below this would make 1/scale overflow: such buckets are sent as zeros
MOST = np.nextafter(np.float32(np.finfo(np.float32).max / LEVELS), np.float32(0))  # 127 times it is finite


@dataclass(frozen=True)
class Int8:
    """Sends every value as 8 bits, rounded at random so that the mean is exact, with a scale for each 4096 values.

    Integers from -127 to 127 times max|x|/127 of the bucket. Unbiased (QSGD, Alistarh et al. 2017, with the bucket's
    maximum as norm): the variance is at most scale^2/4 a value, so omega = 4096 / (4 * 127^2) = 0.064 < 1, and
    feedback around it contracts. Rounding draws from a hash of the index: bits depend on the key, not on the order.
    """

    role: ClassVar[Role] = "quantizer"
    examples: ClassVar[tuple[str, ...]] = ("int8",)
    spec: ClassVar[str] = "int8"

    @classmethod
    def read(cls, argument: str | None) -> Int8:
        del argument
        return cls()

    def kind(self) -> Kind:
        return Unbiased(BUCKET / (4 * LEVELS**2))

    def symbols_dtype(self) -> np.dtype[Any]:
        return np.dtype(np.int8)

    def scales_dtype(self) -> np.dtype[Any]:
        return np.dtype("<f4")

    def scales_count(self, size: int) -> int:
        return buckets(size)

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        scales = np.minimum(maxima(values) / np.float32(LEVELS), MOST)
        scales[scales < LEAST] = 0
        inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
        symbols = np.empty(values.size, np.int8)
        for start, stop in blocks(values.size):
            place = scaled(values[start:stop], inverse, start)
            place += uniform(start, stop, word)
            np.floor(place, out=place)
            symbols[start:stop] = np.clip(place, -LEVELS, LEVELS, out=place)
        return symbols, scales

    def dequantize(self, symbols: Symbols, scales: Scales, span: slice) -> Vector:
        return scaled(symbols[span], scales, span.start)

    def check(self, symbols: Symbols, scales: Scales) -> None:
        if scales.size and not np.all((scales == 0) | ((scales >= LEAST) & (scales <= MOST))):
            raise BadPayload("a scale that int8 never makes", why="it is negative, not finite or out of range")
        if symbols.size and symbols.min() < -LEVELS:
            raise BadPayload(f"a symbol outside -{LEVELS}..{LEVELS}")


def uniform(start: int, stop: int, word: int) -> Vector:
    """U in [0, 1) for each index: the upper 24 bits of lowbias32(index ^ word) / 2^24."""
    mixed = np.arange(start, stop, dtype=np.uint32)
    mixed ^= np.uint32(word)
    lowbias32(mixed)
    mixed >>= np.uint32(8)
    drawn = mixed.astype(np.float32)
    drawn *= np.float32(2.0**-24)
    return drawn


def lowbias32(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """A two-multiply hash of 32 bits with very low bias, in place (Wellons 2018, "Prospecting for Hash Functions").

    >>> int(lowbias32(np.uint32([1]))[0])
    1753845952
    """
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x
