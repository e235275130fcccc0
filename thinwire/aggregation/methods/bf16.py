"""bf16: the upper half of a float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.codec import Contractive, Kind, Scales, Symbols
from thinwire.aggregation.held import Held
from thinwire.aggregation.methods.quantizer import Whole
from thinwire.aggregation.native import half as native
from thinwire.aggregation.native import held as held_native
from thinwire.aggregation.native import kernel, parts
from thinwire.aggregation.vectors import blocks
from thinwire.core.errors import BadPayload
from thinwire.core.types import Vector

INFINITE, LARGEST = np.uint16(0x7F80), np.uint16(0x7F7F)


@dataclass(frozen=True)
class Bf16(Whole):
    """Sends every value as bfloat16, rounded to nearest, ties to even.

    It has eight bits, so a value loses at most 2^-8 of itself, and delta = 1 - 2^-16; float32's very largest values
    become bfloat16's largest finite one instead of infinity.
    """

    examples: ClassVar[tuple[str, ...]] = ("bf16",)
    spec: ClassVar[str] = "bf16"
    symbols_dtype: ClassVar[np.dtype[Any]] = np.dtype("<u2")
    bits: ClassVar[int] = 16

    def kind(self) -> Kind:
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
            over = (rounded & INFINITE) == INFINITE
            rounded[over] = (rounded[over] & np.uint16(0x8000)) | LARGEST
            symbols[start:stop] = rounded
        return symbols, np.zeros(0, np.float32)

    @property
    def writes(self) -> bool:
        return kernel("bf16_encode") is not None

    def write(self, values: Vector, word: int, symbols: NDArray[np.uint8], scales: Scales, first: int = 0) -> None:
        native.bf16_write(values, symbols)

    @property
    def feeds(self) -> bool:
        return self.writes

    def write_held(self, values: Vector, held: Held, word: int, symbols: NDArray[np.uint8], scales: Scales) -> None:
        held_native.bf16(values, held, symbols)

    def add(
        self, symbols: Symbols, scales: Scales, span: slice, word: int, factor: np.float32, adds: bool, into: Vector
    ) -> bool:
        return parts.add("bf16_add", (symbols,), span, factor, adds, into)

    def dequantize(self, symbols: Symbols, scales: Scales, span: slice, word: int) -> Vector:
        wide = symbols[span].astype(np.uint32)
        wide <<= np.uint32(16)
        values: Vector = wide.view(np.float32)
        return values

    def check(self, symbols: Symbols, scales: Scales) -> None:
        looked = native.finite(symbols, int(INFINITE))
        if looked is False or (looked is None and ((symbols & INFINITE) == INFINITE).any()):
            raise BadPayload("a bfloat16 value that is not finite")
