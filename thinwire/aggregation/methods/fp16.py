"""fp16: half precision with a power of two for each bucket."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.buckets import maxima, scaled
from thinwire.aggregation.codec import BUCKET, Contractive, Kind, Scales, Symbols, buckets
from thinwire.aggregation.held import Held
from thinwire.aggregation.methods.quantizer import Whole
from thinwire.aggregation.native import half as native
from thinwire.aggregation.native import held as held_native
from thinwire.aggregation.native import kernel, parts
from thinwire.aggregation.vectors import blocks, finite
from thinwire.core.errors import BadPayload
from thinwire.core.types import Vector

TOP = 15  # a bucket's largest value is brought into [2^14, 2^15): it cannot round over half's 65504
LEAST, MOST = -126, 112  # exponents with which 2^e and 2^-e are normal float32, and no half becomes infinity
INFINITE = 0x7C00  # bits of half precision
LARGEST = 65504.0  # of half precision


@dataclass(frozen=True)
class Fp16(Whole):
    """Sends every value as float16, rounded to nearest, with a power of two for each 4096 values.

    The exponent is one signed byte. A value loses at most 2^-11 of itself, or 2^-39 of its bucket's largest, so
    delta = 1 - 2^-20 holds with room: small updates do not fall into the hole around half's zero.
    """

    examples: ClassVar[tuple[str, ...]] = ("fp16",)
    spec: ClassVar[str] = "fp16"
    symbols_dtype: ClassVar[np.dtype[Any]] = np.dtype("<f2")
    scales_dtype: ClassVar[np.dtype[Any]] = np.dtype(np.int8)
    bits: ClassVar[int] = 16

    def kind(self) -> Kind:
        return Contractive(1 - 2.0**-20)

    def scales_count(self, size: int) -> int:
        return buckets(size)

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        exponents = np.clip(np.frexp(maxima(values))[1] - TOP, LEAST, MOST).astype(np.int8)
        down, symbols = power(-exponents), np.empty(values.size, "<f2")
        for start, stop in blocks(values.size):
            place = scaled(values[start:stop], down, start)
            if exponents[start // BUCKET : buckets(stop)].max() == MOST:
                # Float32's very largest values come over 65504 here, by less than half's last place.
                np.clip(place, -LARGEST, LARGEST, out=place)
            symbols[start:stop] = place
        return symbols, exponents

    @property
    def writes(self) -> bool:
        return kernel("fp16_encode") is not None

    def write(self, values: Vector, word: int, symbols: NDArray[np.uint8], scales: Scales, first: int = 0) -> None:
        native.fp16_write(values, symbols, scales)

    @property
    def feeds(self) -> bool:
        return self.writes

    def write_held(self, values: Vector, held: Held, word: int, symbols: NDArray[np.uint8], scales: Scales) -> None:
        held_native.fp16(values, held, symbols, scales)

    def add(
        self, symbols: Symbols, scales: Scales, span: slice, word: int, factor: np.float32, adds: bool, into: Vector
    ) -> bool:
        return parts.add("fp16_add", (symbols, scales), span, factor, adds, into)

    def dequantize(self, symbols: Symbols, scales: Scales, span: slice, word: int) -> Vector:
        return scaled(symbols[span], power(scales), span.start)

    def check(self, symbols: Symbols, scales: Scales) -> None:
        looked = native.finite(symbols, INFINITE)
        if not (finite(symbols) if looked is None else looked):
            raise BadPayload("a half-precision value that is not finite")
        if scales.size and (scales.min() < LEAST or scales.max() > MOST):
            raise BadPayload("an exponent that fp16 never makes", why=f"they lie in {LEAST}..{MOST}")


def power(exponents: Scales) -> Vector:
    """Two to each of these."""
    return np.ldexp(np.float32(1), exponents.astype(np.int32)).astype(np.float32)
