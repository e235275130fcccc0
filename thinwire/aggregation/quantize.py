"""Quantizers: each value as a small symbol, each bucket of 4096 values with one scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.codec import BLOCK, BUCKET, Kind, Scales, Symbols, Unbiased, blocks, finite
from thinwire.core.errors import BadPayload
from thinwire.core.types import Vector

LEAST = np.float32(2.0**-110)  # scales below this would make 1/scale overflow: such buckets are sent as zeros


@dataclass(frozen=True)
class Int8:
    """Integers from -127 to 127 times max|x|/127 of the bucket, rounded at random so that the mean is exact.

    Unbiased (QSGD, Alistarh et al. 2017, with the bucket's maximum as norm): the variance is at most scale^2/4 a value,
    so omega = 4096 / (4 * 127^2) = 0.064 < 1, and feedback around it contracts. Rounding is floor(x / scale + u)
    with u from a hash of the index, so the bits depend on the key and not on the order of work.
    """

    name: str = "int8"

    def kind(self) -> Kind:
        return Unbiased(BUCKET / (4 * 127**2))

    def symbols_dtype(self) -> np.dtype[Any]:
        return np.dtype(np.int8)

    def scales_dtype(self) -> np.dtype[Any]:
        return np.dtype(np.float32)

    def scales_count(self, size: int) -> int:
        return -(-size // BUCKET)

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        scales = bucket_maxima(values) / np.float32(127)
        scales[scales < LEAST] = 0
        inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
        symbols = np.empty(values.size, np.int8)
        for start, stop in blocks(values.size):
            scaled = values[start:stop] * per_value(inverse, start, stop)
            scaled += uniform(start, stop, word)
            np.floor(scaled, out=scaled)
            symbols[start:stop] = np.clip(scaled, -127, 127, out=scaled)
        return symbols, scales

    def dequantize(self, symbols: Symbols, scales: Scales, span: slice) -> Vector:
        out: Vector = symbols[span].astype(np.float32)
        out *= per_value(scales, span.start, span.stop)
        return out

    def check(self, symbols: Symbols, scales: Scales) -> None:
        if not finite(scales) or np.any(scales < 0) or np.any(scales > np.finfo(np.float32).max / 127):
            raise BadPayload("a scale that is negative or not finite")
        if symbols.size and symbols.min() < -127:
            raise BadPayload("a symbol outside -127..127")


def bucket_maxima(values: Vector) -> NDArray[np.float32]:
    """The largest magnitude of each bucket."""
    starts = np.arange(0, values.size, BUCKET)
    if not starts.size:
        return np.zeros(0, np.float32)
    high, low = np.maximum.reduceat(values, starts), np.minimum.reduceat(values, starts)
    return np.maximum(high, -low).astype(np.float32) + np.float32(0)  # + 0 makes of -0 a 0


def per_value(scales: NDArray[Any], start: int, stop: int) -> NDArray[Any]:
    """The bucket's scale for each value from `start` to `stop`."""
    first, last = start // BUCKET, -(-stop // BUCKET)
    return np.repeat(scales[first:last], BUCKET)[start - first * BUCKET : stop - first * BUCKET]


def uniform(start: int, stop: int, word: int) -> NDArray[np.float32]:
    """U in [0, 1) for each index: the upper 24 bits of lowbias32(index ^ word) / 2^24."""
    mixed = np.arange(start, stop, dtype=np.uint32) ^ np.uint32(word)
    return (lowbias32(mixed) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def lowbias32(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """A two-multiply hash of 32 bits with very low bias (Wellons 2018, "Prospecting for Hash Functions")."""
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x


assert BLOCK % BUCKET == 0, "a block must hold whole buckets"
