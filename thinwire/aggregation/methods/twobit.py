"""twobit(t): a step up, a step down, or none."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.codec import Kind, ResidualOnly, Scales, Symbols, buckets, not_finite
from thinwire.aggregation.held import Held
from thinwire.aggregation.methods import levels
from thinwire.aggregation.methods.arguments import read_number
from thinwire.aggregation.methods.quantizer import Whole
from thinwire.aggregation.native import held as held_native
from thinwire.aggregation.native import levels as levels_native
from thinwire.aggregation.native import ternary as native
from thinwire.aggregation.sums import rms, root_of
from thinwire.core.types import Vector


@dataclass(frozen=True)
class TwoBit(Whole):
    """Sends t where a value is at least t, -t where it is at most -t, and 0 elsewhere; t in root mean squares.

    MXNet's 2-bit scheme (Apache MXNet 1.x, `2bit`) after Strom (2015), whose threshold is a number that one has to
    know; here it follows the values. Nothing is promised of one call: what lies under t waits in the residual until it
    has grown.
    """

    examples: ClassVar[tuple[str, ...]] = ("twobit(1)", "twobit(0.5)")
    bits: ClassVar[int] = 2
    apart: ClassVar[bool] = False
    threshold: Decimal = Decimal(1)

    @classmethod
    def read(cls, argument: str | None) -> TwoBit:
        return cls(read_number("twobit", argument, Decimal(2), "1"))

    @property
    def spec(self) -> str:
        return f"twobit({self.threshold:f})"

    def kind(self) -> Kind:
        return ResidualOnly()

    def scales_count(self, size: int) -> int:
        return 1 if size else 0

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        scales = self._scales(rms(values), values.size)
        step = scales[0] if values.size else np.float32(0)
        symbols = (values >= step).astype(np.int8)
        symbols -= values <= -step
        return symbols if step else np.zeros_like(symbols), scales

    def _scales(self, root: float, size: int) -> Vector:
        return levels.usable(np.array([float(self.threshold) * root] if size else []), 1)

    @property
    def writes(self) -> bool:
        return levels_native.looks()

    def write(self, values: Vector, word: int, symbols: NDArray[np.uint8], scales: Scales, first: int = 0) -> None:
        root = rms(values)
        if not np.isfinite(root):
            raise not_finite()
        scales[:] = self._scales(root, values.size)
        if scales.any():
            native.write_steps(values, scales[0], self.bits, symbols)
        else:
            symbols[:] = 0

    @property
    def feeds(self) -> bool:
        return self.writes

    def write_held(self, values: Vector, held: Held, word: int, symbols: NDArray[np.uint8], scales: Scales) -> None:
        scales[:] = self._scales(root_of(held_native.squares(values, held), values.size), values.size)
        if scales.any():
            held_native.steps(values, held, scales[0], self.bits, symbols)
        else:
            symbols[:] = 0
            held.after(values)

    def add(
        self, symbols: Symbols, scales: Scales, span: slice, word: int, factor: np.float32, adds: bool, into: Vector
    ) -> bool:
        each = np.broadcast_to(scales, buckets(symbols.size))
        return levels_native.add(symbols, each, span, factor, adds, into)

    def dequantize(self, symbols: Symbols, scales: Scales, span: slice, word: int) -> Vector:
        values: Vector = symbols[span] * scales[0]
        return values

    def check(self, symbols: Symbols, scales: Scales) -> None:
        levels.check(self.spec, symbols, scales, 1)
