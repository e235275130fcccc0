"""int8: eight bits a value, rounded at random, a scale for each bucket of 4096.

The bits are final: u = (lowbias32(i ^ word) >> 8) / 2^24 for value i, symbol = floor(x * (1 / scale) + u), all in
float32, each operation rounded by itself. Golden files hold them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from thinwire.aggregation.buckets import BUCKET, buckets, maxima, scaled
from thinwire.aggregation.codec import Kind, Scales, Symbols, Unbiased, blocks
from thinwire.aggregation.hashing import uniform
from thinwire.aggregation.methods.quantizer import Whole
from thinwire.core.errors import BadPayload
from thinwire.core.types import Vector

LEVELS = 127
LEAST = np.float32(2.0**-110)  # scales below this would make 1/scale overflow: such buckets are sent as zeros
MOST = np.nextafter(np.float32(np.finfo(np.float32).max / LEVELS), np.float32(0))  # 127 times it is finite


@dataclass(frozen=True)
class Int8(Whole):
    """Sends every value as 8 bits, rounded at random so that the mean is exact, with a scale for each 4096 values.

    Integers from -127 to 127 times max|x|/127 of the bucket. Unbiased (QSGD, Alistarh et al. 2017, with the bucket's
    maximum as norm): the variance is at most scale^2/4 a value, so omega = 4096 / (4 * 127^2) = 0.064 < 1, and
    feedback around it contracts. Rounding draws from a hash of the index: bits depend on the key, not on the order.
    """

    examples: ClassVar[tuple[str, ...]] = ("int8",)
    spec: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8

    def kind(self) -> Kind:
        return Unbiased(BUCKET / (4 * LEVELS**2))

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

    def dequantize(self, symbols: Symbols, scales: Scales, span: slice, word: int) -> Vector:
        return scaled(symbols[span], scales, span.start)

    def check(self, symbols: Symbols, scales: Scales) -> None:
        if scales.size and not np.all((scales == 0) | ((scales >= LEAST) & (scales <= MOST))):
            raise BadPayload("a scale that int8 never makes", why="it is negative, not finite or out of range")
        if symbols.size and symbols.min() < -LEVELS:
            raise BadPayload(f"a symbol outside -{LEVELS}..{LEVELS}")
