"""`natural`: natural compression, which rounds every value at random to a power of two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from thinwire.compression.base import BUCKET, ErrorBound, FusedQuantizer, Scales, Symbols, Unbiased, buckets
from thinwire.compression.codecs.pack import encode_in_parts
from thinwire.compression.native import add_in_parts, write_in_parts
from thinwire.compression.vector_ops import blocks, maxima
from thinwire.core.errors import BadPayload
from thinwire.core.prng import uniform

if TYPE_CHECKING:
    from thinwire.compression.feedback import Memory
    from thinwire.core.types import Vector

STEPS = 127  # powers of two below a bucket's largest
TOP, LEAST = 127, -100  # limits of a bucket's exponent: float32's largest power, and the smallest one that is sent


@dataclass(frozen=True)
class Natural(FusedQuantizer):
    """Sends every value as a signed power of two in 8 bits, rounded up or down at random so that the mean is exact.

    Natural compression (Horvath et al. 2019): omega = 1/8. A symbol counts the powers below the bucket's largest one,
    whose exponent is sent as a byte. A value below 2^-126 of it becomes 0 or that power, with an exact mean too.
    """

    examples: ClassVar[tuple[str, ...]] = ("natural",)
    paper: ClassVar[str] = "Horvath et al. 2019"
    spec: ClassVar[str] = "natural"
    bits: ClassVar[int] = 8
    scales_dtype: ClassVar[np.dtype[Any]] = np.dtype(np.int8)

    def kind(self) -> ErrorBound:
        return Unbiased(1 / 8 + 2.0**-20)

    def _encode(
        self, values: Vector, memory: Memory | None, word: int, symbols: NDArray[np.uint8], scales: Scales
    ) -> None:
        if memory is None:
            _write(values, word, symbols, scales)
            return

        def write(part: Vector, packed: NDArray[np.uint8], own: Scales, first: int) -> Symbols:
            _write(part, word, packed, own, first)
            return packed.view(np.int8)

        encode_in_parts(self, write, values, memory, symbols, scales)

    def add(
        self, symbols: Symbols, scales: Scales, span: slice, word: int, factor: np.float32, adds: bool, into: Vector
    ) -> bool:
        """Add or replace decoded values with a fused kernel, as `FusedQuantizer.add` does."""
        return add_in_parts("natural_add", (symbols, scales), span, factor, adds, into)

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        if self.fused:
            found, exponents = np.empty(values.size, np.int8), np.empty(buckets(values.size), np.int8)
            _write(values, word, found.view(np.uint8), exponents)
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
        found = symbols[span].astype(np.int32)
        first = span.start // BUCKET
        each = np.repeat(scales[first : buckets(span.stop)].astype(np.int32), BUCKET)[span.start - first * BUCKET :]
        values = np.ldexp(np.float32(1), each[: found.size] - STEPS + np.abs(found)).astype(np.float32)
        values *= np.sign(found)
        return values

    def check(self, symbols: Symbols, scales: Scales) -> None:
        if scales.size and (scales.min() < LEAST or scales.max() > TOP):
            raise BadPayload("an exponent that natural never makes", why=f"they lie in {LEAST}..{TOP}")
        if symbols.size and symbols.min() < -STEPS:
            raise BadPayload(f"a symbol outside -{STEPS}..{STEPS}")


def _write(values: Vector, word: int, symbols: NDArray[np.uint8], tops: Scales, first: int = 0) -> None:
    """Write symbols and exponents by the kernel; `first` is the index of the first value, which is hashed."""
    t, q = tops.ctypes.data, symbols.ctypes.data
    write_in_parts("natural", values, None, lambda a: (first + a, word, t + a // BUCKET, q + a))


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
