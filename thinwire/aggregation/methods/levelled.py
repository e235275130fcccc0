"""Quantizers whose symbols are whole multiples of their bucket's scale: int8 and qsgd."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.buckets import scaled
from thinwire.aggregation.codec import Scales, Symbols
from thinwire.aggregation.held import Held
from thinwire.aggregation.methods import levels
from thinwire.aggregation.methods.quantizer import Whole
from thinwire.aggregation.native import held as held_native
from thinwire.aggregation.native import levels as native
from thinwire.core.types import Vector


@dataclass(frozen=True)
class Levelled(Whole, ABC):
    """2^bits - 1 levels between -max|x| and max|x| of the bucket; see `Quantizer` for what each method means."""

    @property
    @abstractmethod
    def spec(self) -> str: ...

    @property
    @abstractmethod
    def bits(self) -> int: ...

    @property
    def levels(self) -> int:
        """On either side of 0."""
        return int(2 ** (self.bits - 1) - 1)

    def drawn(self, word: int) -> int | None:
        """What rounding draws by; None: it rounds to nearest."""
        return word

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        return levels.encoded(values, self.levels, self.drawn(word))

    @property
    def writes(self) -> bool:
        return native.looks()

    def write(self, values: Vector, word: int, symbols: NDArray[np.uint8], scales: Scales, first: int = 0) -> None:
        most = levels.most(self.levels)
        native.write(values, self.levels, most, self.drawn(word), self.bits, symbols, scales, first)

    @property
    def feeds(self) -> bool:
        return self.writes

    def write_held(self, values: Vector, held: Held, word: int, symbols: NDArray[np.uint8], scales: Scales) -> None:
        most = levels.most(self.levels)
        held_native.levels(values, held, self.levels, most, self.drawn(word), self.bits, symbols, scales)

    def dequantize(self, symbols: Symbols, scales: Scales, span: slice, word: int) -> Vector:
        return scaled(symbols[span], scales, span.start)

    def add(
        self, symbols: Symbols, scales: Scales, span: slice, word: int, factor: np.float32, adds: bool, into: Vector
    ) -> bool:
        return native.add(symbols, scales, span, factor, adds, into)

    def check(self, symbols: Symbols, scales: Scales) -> None:
        levels.check(self.spec, symbols, scales, self.levels)
