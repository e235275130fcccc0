"""Casts: quantizers that send each value as float32 (`identity`), float16 (`fp16`) or bfloat16 (`bf16`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from thinwire.compression.base import BUCKET, Contractive, ErrorBound, Scales, Symbols, Unbiased, buckets
from thinwire.compression.codecs.uniform import QuantizerBase
from thinwire.compression.memory import Memory
from thinwire.compression.native import kernel, threads
from thinwire.compression.native import quantize as held_native
from thinwire.compression.native import quantize as native
from thinwire.compression.vector_ops import blocks, finite, maxima, scaled
from thinwire.core.errors import BadPayload
from thinwire.core.types import Vector


@dataclass(frozen=True)
class Identity(QuantizerBase):
    """Sends every value as float32: lossless, without compression."""

    examples: ClassVar[tuple[str, ...]] = ("identity",)
    spec: ClassVar[str] = "identity"
    symbols_dtype: ClassVar[np.dtype[Any]] = np.dtype("<f4")
    bits: ClassVar[int] = 32

    def kind(self) -> ErrorBound:
        """Return the error bound."""
        return Unbiased(0.0)

    def scales_count(self, size: int) -> int:
        """Return the number of scales of `size` values."""
        return 0

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        """Return the vector itself as symbols, without scales."""
        return values, np.zeros(0, np.float32)

    def dequantize(self, symbols: Symbols, scales: Scales, span: slice, word: int) -> Vector:
        """Return the values of the symbols in `span`."""
        return symbols[span]

    def check(self, symbols: Symbols, scales: Scales) -> None:
        """Raise BadPayload for NaN and infinity."""
        if not finite(symbols):
            raise BadPayload("a value that is not finite")


TOP = 15  # a bucket's largest value is scaled into [2^14, 2^15), where it cannot round over float16's 65504
LEAST, MOST = -126, 112  # exponents e for which 2^e and 2^-e are normal float32, and no float16 becomes infinity
INFINITE = 0x7C00  # the bits of float16's infinity
LARGEST = 65504.0  # float16's largest value


@dataclass(frozen=True)
class Fp16(QuantizerBase):
    """Sends every value as float16, rounded to nearest, with a power of two for each 4096 values.

    The exponent is one signed byte. A value loses at most 2^-11 of itself, or 2^-39 of its bucket's largest value, so
    delta = 1 - 2^-20 holds with room: small updates do not become float16's zero.
    """

    examples: ClassVar[tuple[str, ...]] = ("fp16",)
    spec: ClassVar[str] = "fp16"
    symbols_dtype: ClassVar[np.dtype[Any]] = np.dtype("<f2")
    scales_dtype: ClassVar[np.dtype[Any]] = np.dtype(np.int8)
    bits: ClassVar[int] = 16

    def kind(self) -> ErrorBound:
        """Return the error bound."""
        return Contractive(1 - 2.0**-20)

    def scales_count(self, size: int) -> int:
        """Return the number of scales of `size` values."""
        return buckets(size)

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        """Return symbols and scales of a float32 vector."""
        exponents = np.clip(np.frexp(maxima(values))[1] - TOP, LEAST, MOST).astype(np.int8)
        down, symbols = power(-exponents), np.empty(values.size, "<f2")
        for start, stop in blocks(values.size):
            place = scaled(values[start:stop], down, start)
            if exponents[start // BUCKET : buckets(stop)].max() == MOST:
                # float32's largest values exceed 65504 here, by less than float16's last digit.
                np.clip(place, -LARGEST, LARGEST, out=place)
            symbols[start:stop] = place
        return symbols, exponents

    @property
    def writes(self) -> bool:
        """Return True if the active path has a fused encode kernel."""
        return kernel("fp16_encode") is not None

    def write(self, values: Vector, word: int, symbols: NDArray[np.uint8], scales: Scales, first: int = 0) -> None:
        """Write packed symbols and scales into a frame; raise NonFiniteUpdate for NaN and infinity."""
        native.fp16_write(values, symbols, scales)

    @property
    def feeds(self) -> bool:
        """Return True if the active path has a fused kernel for error feedback."""
        return self.writes

    def write_held(self, values: Vector, held: Memory, word: int, symbols: NDArray[np.uint8], scales: Scales) -> None:
        """Encode `values` compensated by `held`, and overwrite `values` with the updated memory."""
        held_native.fp16_write_held(values, held, symbols, scales)

    def add(
        self, symbols: Symbols, scales: Scales, span: slice, word: int, factor: np.float32, adds: bool, into: Vector
    ) -> bool:
        """Add or replace decoded values with a fused kernel, as `FusedDecoder.add` does."""
        return threads.add_in_parts("fp16_add", (symbols, scales), span, factor, adds, into)

    def dequantize(self, symbols: Symbols, scales: Scales, span: slice, word: int) -> Vector:
        """Return the values of the symbols in `span`."""
        return scaled(symbols[span], power(scales), span.start)

    def check(self, symbols: Symbols, scales: Scales) -> None:
        """Raise BadPayload for symbols or scales that no encoder makes."""
        looked = native.halves_finite(symbols, INFINITE)
        if not (finite(symbols) if looked is None else looked):
            raise BadPayload("a half-precision value that is not finite")
        if scales.size and (scales.min() < LEAST or scales.max() > MOST):
            raise BadPayload("an exponent that fp16 never makes", why=f"they lie in {LEAST}..{MOST}")


def power(exponents: Scales) -> Vector:
    """Return two to the power of each exponent."""
    return np.ldexp(np.float32(1), exponents.astype(np.int32)).astype(np.float32)


BF16_INFINITE, BF16_LARGEST = np.uint16(0x7F80), np.uint16(0x7F7F)


@dataclass(frozen=True)
class Bf16(QuantizerBase):
    """Sends every value as bfloat16, the upper half of a float32, rounded to nearest, ties to even.

    It has eight significant bits, so a value loses at most 2^-8 of itself, and delta = 1 - 2^-16. The very largest
    float32 values become bfloat16's largest finite value instead of infinity.
    """

    examples: ClassVar[tuple[str, ...]] = ("bf16",)
    spec: ClassVar[str] = "bf16"
    symbols_dtype: ClassVar[np.dtype[Any]] = np.dtype("<u2")
    bits: ClassVar[int] = 16

    def kind(self) -> ErrorBound:
        """Return the error bound."""
        return Contractive(1 - 2.0**-16)

    def scales_count(self, size: int) -> int:
        """Return the number of scales of `size` values."""
        return 0

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        """Return symbols and scales of a float32 vector."""
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

    @property
    def writes(self) -> bool:
        """Return True if the active path has a fused encode kernel."""
        return kernel("bf16_encode") is not None

    def write(self, values: Vector, word: int, symbols: NDArray[np.uint8], scales: Scales, first: int = 0) -> None:
        """Write packed symbols and scales into a frame; raise NonFiniteUpdate for NaN and infinity."""
        native.bf16_write(values, symbols)

    @property
    def feeds(self) -> bool:
        """Return True if the active path has a fused kernel for error feedback."""
        return self.writes

    def write_held(self, values: Vector, held: Memory, word: int, symbols: NDArray[np.uint8], scales: Scales) -> None:
        """Encode `values` compensated by `held`, and overwrite `values` with the updated memory."""
        held_native.bf16_write_held(values, held, symbols)

    def add(
        self, symbols: Symbols, scales: Scales, span: slice, word: int, factor: np.float32, adds: bool, into: Vector
    ) -> bool:
        """Add or replace decoded values with a fused kernel, as `FusedDecoder.add` does."""
        return threads.add_in_parts("bf16_add", (symbols,), span, factor, adds, into)

    def dequantize(self, symbols: Symbols, scales: Scales, span: slice, word: int) -> Vector:
        """Return the values of the symbols in `span`."""
        wide = symbols[span].astype(np.uint32)
        wide <<= np.uint32(16)
        values: Vector = wide.view(np.float32)
        return values

    def check(self, symbols: Symbols, scales: Scales) -> None:
        """Raise BadPayload for symbols or scales that no encoder makes."""
        looked = native.halves_finite(symbols, int(BF16_INFINITE))
        if looked is False or (looked is None and ((symbols & BF16_INFINITE) == BF16_INFINITE).any()):
            raise BadPayload("a bfloat16 value that is not finite")
