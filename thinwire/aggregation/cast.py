"""Casts: every value in fewer bits, without a choice and without randomness."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from thinwire.aggregation.codec import BUCKET, Contractive, Kind, Scales, Symbols, blocks, finite
from thinwire.aggregation.quantize import bucket_maxima, per_value
from thinwire.core.errors import BadPayload
from thinwire.core.types import Vector

EXPONENT = 15  # the bucket's largest value is brought into [2^14, 2^15): far from fp16's end at 65504


@dataclass(frozen=True)
class Identity:
    """Plain little-endian float32: nothing is lost and nothing is saved."""

    name: str = "identity"

    def kind(self) -> Kind:
        return Contractive(1.0)

    def symbols_dtype(self) -> np.dtype[Any]:
        return np.dtype(np.float32)

    def scales_dtype(self) -> np.dtype[Any]:
        return np.dtype(np.float32)

    def scales_count(self, size: int) -> int:
        return 0

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        return values, np.zeros(0, np.float32)

    def dequantize(self, symbols: Symbols, scales: Scales, span: slice) -> Vector:
        return symbols[span]

    def check(self, symbols: Symbols, scales: Scales) -> None:
        if not finite(symbols):
            raise BadPayload("a value that is not finite")


@dataclass(frozen=True)
class Fp16:
    """Half precision, with a power of two for each 4096 values, so that neither large nor small ones are lost.

    Rounded to nearest: a value loses at most 2^-11 of itself, and values under 2^-29 of their bucket's largest lose
    at most 2^-40 of that, so delta = 1 - 2^-20 holds with room.
    """

    name: str = "fp16"

    def kind(self) -> Kind:
        return Contractive(1 - 2.0**-20)

    def symbols_dtype(self) -> np.dtype[Any]:
        return np.dtype(np.float16)

    def scales_dtype(self) -> np.dtype[Any]:
        return np.dtype(np.int16)

    def scales_count(self, size: int) -> int:
        return -(-size // BUCKET)

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        exponents = (np.frexp(bucket_maxima(values))[1] - EXPONENT).astype(np.int16)
        symbols = np.empty(values.size, np.float16)
        for start, stop in blocks(values.size):
            symbols[start:stop] = np.ldexp(values[start:stop], -per_value(exponents, start, stop).astype(np.int32))
        return symbols, exponents

    def dequantize(self, symbols: Symbols, scales: Scales, span: slice) -> Vector:
        exponents = per_value(scales, span.start, span.stop).astype(np.int32)
        return np.ldexp(symbols[span].astype(np.float32), exponents)

    def check(self, symbols: Symbols, scales: Scales) -> None:
        if not finite(symbols):
            raise BadPayload("a half-precision value that is not finite")
        if scales.size and (scales.min() < -200 or scales.max() > 112):
            raise BadPayload("an exponent that no float32 has")
