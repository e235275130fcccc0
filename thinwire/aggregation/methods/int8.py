"""int8: eight bits a value, rounded at random, a scale for each bucket of 4096."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.buckets import scaled
from thinwire.aggregation.codec import Kind, Scales, Symbols, Unbiased
from thinwire.aggregation.held import Held
from thinwire.aggregation.methods import levels
from thinwire.aggregation.methods.quantizer import Whole
from thinwire.aggregation.native import held as held_native
from thinwire.aggregation.native import levels as native
from thinwire.aggregation.vectors import BUCKET
from thinwire.core.types import Vector

LEVELS = 127


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

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        return levels.encoded(values, LEVELS, word)

    @property
    def writes(self) -> bool:
        return native.looks()

    def write(self, values: Vector, word: int, symbols: NDArray[np.uint8], scales: Scales, first: int = 0) -> None:
        native.write(values, LEVELS, levels.most(LEVELS), word, self.bits, symbols, scales, first)

    def dequantize(self, symbols: Symbols, scales: Scales, span: slice, word: int) -> Vector:
        return scaled(symbols[span], scales, span.start)

    @property
    def feeds(self) -> bool:
        return self.writes

    def write_held(self, values: Vector, held: Held, word: int, symbols: NDArray[np.uint8], scales: Scales) -> None:
        held_native.levels(values, held, LEVELS, levels.most(LEVELS), word, self.bits, symbols, scales)

    def add(
        self, symbols: Symbols, scales: Scales, span: slice, word: int, factor: np.float32, adds: bool, into: Vector
    ) -> bool:
        return native.add(symbols, scales, span, factor, adds, into)

    def check(self, symbols: Symbols, scales: Scales) -> None:
        levels.check(self.spec, symbols, scales, LEVELS)
