"""Casts: quantizers that send each value as float32 (`identity`), float16 (`fp16`) or bfloat16 (`bf16`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from thinwire.compression.base import (
    BUCKET,
    Contractive,
    ErrorBound,
    FusedQuantizer,
    Quantizer,
    Scales,
    Symbols,
    Unbiased,
    buckets,
)
from thinwire.compression.native import add_in_parts, each, kernel
from thinwire.compression.vector_ops import Memory, blocks, finite, maxima, scaled, write_in_parts
from thinwire.core.errors import BadPayload

if TYPE_CHECKING:
    from thinwire.core.types import Vector


@dataclass(frozen=True)
class Identity(Quantizer):
    """Sends every value as float32: lossless, without compression."""

    examples: ClassVar[tuple[str, ...]] = ("identity",)
    is_cast: ClassVar[bool] = True
    spec: ClassVar[str] = "identity"
    symbols_dtype: ClassVar[np.dtype[Any]] = np.dtype("<f4")
    bits: ClassVar[int] = 32

    def kind(self) -> ErrorBound:
        return Unbiased(0.0)

    def scales_count(self, size: int) -> int:
        return 0

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        """Return the vector itself as symbols, without scales."""
        return values, np.zeros(0, np.float32)

    def dequantize(self, symbols: Symbols, scales: Scales, span: slice, word: int) -> Vector:
        return symbols[span]

    def check(self, symbols: Symbols, scales: Scales) -> None:
        """Raise BadPayload for NaN and infinity."""
        if not finite(symbols):
            raise BadPayload("a value that is not finite")


TOP = 15  # a bucket's largest value is scaled into [2^14, 2^15), where it cannot round over float16's 65504
# Exponents e for which 2^e and 2^-e are normal float32, and no float16 becomes infinity.
MIN_EXPONENT, MAX_EXPONENT = -126, 112
INFINITE = 0x7C00  # the bits of float16's infinity
MAX_FLOAT16 = 65504.0  # float16's largest value


@dataclass(frozen=True)
class Fp16(FusedQuantizer):
    """Sends every value as float16, rounded to nearest, with a power of two for each 4096 values.

    The exponent is one signed byte. A value loses at most 2^-11 of itself, or 2^-39 of its bucket's largest value, so
    delta = 1 - 2^-20 holds with room: small updates do not become float16's zero.
    """

    examples: ClassVar[tuple[str, ...]] = ("fp16",)
    is_cast: ClassVar[bool] = True
    spec: ClassVar[str] = "fp16"
    symbols_dtype: ClassVar[np.dtype[Any]] = np.dtype("<f2")
    scales_dtype: ClassVar[np.dtype[Any]] = np.dtype(np.int8)
    bits: ClassVar[int] = 16

    def kind(self) -> ErrorBound:
        return Contractive(1 - 2.0**-20)

    def scales_count(self, size: int) -> int:
        return buckets(size)

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        exponents = np.clip(np.frexp(maxima(values))[1] - TOP, MIN_EXPONENT, MAX_EXPONENT).astype(np.int8)
        down, symbols = power(-exponents), np.empty(values.size, "<f2")
        for start, stop in blocks(values.size):
            place = scaled(values[start:stop], down, start)
            if exponents[start // BUCKET : buckets(stop)].max() == MAX_EXPONENT:
                # float32's largest values exceed 65504 here, by less than float16's last digit.
                np.clip(place, -MAX_FLOAT16, MAX_FLOAT16, out=place)
            symbols[start:stop] = place
        return symbols, exponents

    def _encode(
        self, values: Vector, memory: Memory | None, word: int, symbols: NDArray[np.uint8], scales: Scales
    ) -> None:
        e, h = scales.ctypes.data, symbols.ctypes.data
        write_in_parts("fp16", values, memory, lambda a: (e + a // BUCKET, h + 2 * a))

    def add(
        self, symbols: Symbols, scales: Scales, span: slice, word: int, factor: np.float32, adds: bool, into: Vector
    ) -> bool:
        """Add or replace decoded values with a fused kernel, as `FusedQuantizer.add` does."""
        return add_in_parts("fp16_add", (symbols, scales), span, factor, adds, into)

    def dequantize(self, symbols: Symbols, scales: Scales, span: slice, word: int) -> Vector:
        return scaled(symbols[span], power(scales), span.start)

    def check(self, symbols: Symbols, scales: Scales) -> None:
        if not halves_finite(symbols, INFINITE):
            raise BadPayload("a half-precision value that is not finite")
        if scales.size and (scales.min() < MIN_EXPONENT or scales.max() > MAX_EXPONENT):
            raise BadPayload("an exponent that fp16 never makes", why=f"they lie in {MIN_EXPONENT}..{MAX_EXPONENT}")


def halves_finite(halves: Symbols, exponent: int) -> bool:
    """Return True if no 16-bit float has all bits of `exponent` set."""
    run, at = kernel("halves_finite"), halves.ctypes.data
    if run is not None:
        return all(each(0, halves.size, lambda a, b: run(at + 2 * a, b - a, exponent)))
    bits = halves.view("<u2")
    return not any(bool((bits[a:b] & exponent == exponent).any()) for a, b in blocks(halves.size))


def power(exponents: Scales) -> Vector:
    """Return two to the power of each exponent."""
    return np.ldexp(np.float32(1), exponents.astype(np.int32)).astype(np.float32)


BF16_INFINITE, BF16_LARGEST = np.uint16(0x7F80), np.uint16(0x7F7F)


@dataclass(frozen=True)
class Bf16(FusedQuantizer):
    """Sends every value as bfloat16, the upper half of a float32, rounded to nearest, ties to even.

    It has eight significant bits, so a value loses at most 2^-8 of itself, and delta = 1 - 2^-16. The very largest
    float32 values become bfloat16's largest finite value instead of infinity.
    """

    examples: ClassVar[tuple[str, ...]] = ("bf16",)
    is_cast: ClassVar[bool] = True
    spec: ClassVar[str] = "bf16"
    symbols_dtype: ClassVar[np.dtype[Any]] = np.dtype("<u2")
    bits: ClassVar[int] = 16

    def kind(self) -> ErrorBound:
        return Contractive(1 - 2.0**-16)

    def scales_count(self, size: int) -> int:
        return 0

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        symbols = np.empty(values.size, "<u2")
        for start, stop in blocks(values.size):
            bits = values[start:stop].view(np.uint32)
            rounded = ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype(
                "<u2"
            )
            over = (rounded & BF16_INFINITE) == BF16_INFINITE
            rounded[over] = (rounded[over] & np.uint16(0x8000)) | BF16_LARGEST
            symbols[start:stop] = rounded
        return symbols, np.zeros(0, np.float32)

    def _encode(
        self, values: Vector, memory: Memory | None, word: int, symbols: NDArray[np.uint8], scales: Scales
    ) -> None:
        h = symbols.ctypes.data
        write_in_parts("bf16", values, memory, lambda a: (h + 2 * a,))

    def add(
        self, symbols: Symbols, scales: Scales, span: slice, word: int, factor: np.float32, adds: bool, into: Vector
    ) -> bool:
        """Add or replace decoded values with a fused kernel, as `FusedQuantizer.add` does."""
        return add_in_parts("bf16_add", (symbols,), span, factor, adds, into)

    def dequantize(self, symbols: Symbols, scales: Scales, span: slice, word: int) -> Vector:
        wide = symbols[span].astype(np.uint32)
        wide <<= np.uint32(16)
        values: Vector = wide.view(np.float32)
        return values

    def check(self, symbols: Symbols, scales: Scales) -> None:
        if not halves_finite(symbols, int(BF16_INFINITE)):
            raise BadPayload("a bfloat16 value that is not finite")
