"""identity: nothing is lost and nothing is saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from thinwire.aggregation.codec import Kind, Scales, Symbols, Unbiased
from thinwire.aggregation.methods.quantizer import Whole
from thinwire.aggregation.vectors import finite
from thinwire.core.errors import BadPayload
from thinwire.core.types import Vector


@dataclass(frozen=True)
class Identity(Whole):
    """Sends every value as float32: nothing is lost and nothing is saved."""

    examples: ClassVar[tuple[str, ...]] = ("identity",)
    spec: ClassVar[str] = "identity"
    symbols_dtype: ClassVar[np.dtype[Any]] = np.dtype("<f4")
    bits: ClassVar[int] = 32

    def kind(self) -> Kind:
        return Unbiased(0.0)

    def scales_count(self, size: int) -> int:
        return 0

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        return values, np.zeros(0, np.float32)

    def dequantize(self, symbols: Symbols, scales: Scales, span: slice, word: int) -> Vector:
        return symbols[span]

    def check(self, symbols: Symbols, scales: Scales) -> None:
        if not finite(symbols):
            raise BadPayload("a value that is not finite")
