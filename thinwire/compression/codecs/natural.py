"""`natural`: natural compression, which rounds every value at random to a power of two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from thinwire.compression.base import BUCKET, ErrorBound, Scales, Symbols, Unbiased, buckets
from thinwire.compression.codecs.uniform import QuantizerBase
from thinwire.compression.native import kernel, threads
from thinwire.compression.native import quantize as native
from thinwire.compression.vector_ops import blocks, maxima
from thinwire.core.errors import BadPayload
from thinwire.core.prng import uniform
from thinwire.core.types import Vector

STEPS = 127  # powers of two below a bucket's largest
TOP, LEAST = 127, -100  # limits of a bucket's exponent: float32's largest power, and the smallest one that is sent


@dataclass(frozen=True)
class Natural(QuantizerBase):
    """Sends every value as a signed power of two in 8 bits, rounded up or down at random so that the mean is exact.

    Natural compression (Horvath et al. 2019): omega = 1/8. A symbol counts the powers below the bucket's largest one,
    whose exponent is sent as a byte. A value below 2^-126 of it becomes 0 or that power, with an exact mean too.
    """

    examples: ClassVar[tuple[str, ...]] = ("natural",)
    spec: ClassVar[str] = "natural"
    bits: ClassVar[int] = 8
    scales_dtype: ClassVar[np.dtype[Any]] = np.dtype(np.int8)

    def kind(self) -> ErrorBound:
        """Return the error bound."""
        return Unbiased(1 / 8 + 2.0**-20)

    @property
    def writes(self) -> bool:
        """Return True if the active path has a fused encode kernel."""
        return kernel("natural_encode") is not None

    def write(self, values: Vector, word: int, symbols: NDArray[np.uint8], scales: Scales, first: int = 0) -> None:
        """Write packed symbols and scales into a frame; raise NonFiniteUpdate for NaN and infinity."""
        native.natural_write(values, word, symbols, scales, first)

    def add(
        self, symbols: Symbols, scales: Scales, span: slice, word: int, factor: np.float32, adds: bool, into: Vector
    ) -> bool:
        """Add or replace decoded values with a fused kernel, as `FusedDecoder.add` does."""
        return threads.add_in_parts("natural_add", (symbols, scales), span, factor, adds, into)

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        """Return symbols and scales of a float32 vector."""
        if self.writes:
            found, exponents = np.empty(values.size, np.int8), np.empty(buckets(values.size), np.int8)
            native.natural_write(values, word, found.view(np.uint8), exponents, 0)
            return found, exponents
        largest = maxima(values)
        tops = np.clip(np.frexp(largest)[1], LEAST, TOP)  # 2^top is above the largest value: rounding up may reach it
        tops[largest == 0] = LEAST
        symbols = np.zeros(values.size, np.int8)
        for start, stop in blocks(values.size):
            place = np.repeat(tops[start // BUCKET : buckets(stop)], BUCKET)[: stop - start]
            symbols[start:stop] = _symbols(values[start:stop], place, uniform(start, stop, word))
        return symbols, tops.astype(np.int8)

    def dequantize(self, symbols: Symbols, scales: Scales, span: slice, word: int) -> Vector:
        """Return the values of the symbols in `span`."""
        found = symbols[span].astype(np.int32)
        first = span.start // BUCKET
        each = np.repeat(scales[first : buckets(span.stop)].astype(np.int32), BUCKET)[span.start - first * BUCKET :]
        values = np.ldexp(np.float32(1), each[: found.size] - STEPS + np.abs(found)).astype(np.float32)
        values *= np.sign(found)
        return values

    def check(self, symbols: Symbols, scales: Scales) -> None:
        """Raise BadPayload for symbols or scales that no encoder makes."""
        if scales.size and (scales.min() < LEAST or scales.max() > TOP):
            raise BadPayload("an exponent that natural never makes", why=f"they lie in {LEAST}..{TOP}")
        if symbols.size and symbols.min() < -STEPS:
            raise BadPayload(f"a symbol outside -{STEPS}..{STEPS}")


def _symbols(values: Vector, tops: NDArray[np.int32], drawn: Vector) -> Symbols:
    """Return the symbols of values, rounded up or down at random.

    The probability of rounding up is the fraction above the power below: u < x / 2^e - 1.
    """
    fraction, exponent = np.frexp(np.abs(values))  # |x| = fraction * 2^exponent, fraction in [0.5, 1)
    up = drawn < fraction * np.float32(2) - np.float32(1)
    steps = exponent - 1 + up - (tops - STEPS)
    # Below the smallest power p a value becomes p with probability x / p, else 0.
    with np.errstate(over="ignore", under="ignore"):
        chance = np.ldexp(np.abs(values), STEPS - 1 - tops)
    steps = np.where(steps < 1, drawn < chance, np.minimum(steps, STEPS))
    steps[values == 0] = 0
    return np.where(np.signbit(values), -steps, steps).astype(np.int8)
