"""qsgd(b): b bits a value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.buckets import scaled
from thinwire.aggregation.codec import Contractive, Kind, Scales, Symbols, Unbiased
from thinwire.aggregation.held import Held
from thinwire.aggregation.methods import levels
from thinwire.aggregation.methods.arguments import read_whole
from thinwire.aggregation.methods.quantizer import Whole
from thinwire.aggregation.native import held as held_native
from thinwire.aggregation.native import levels as native
from thinwire.aggregation.sums import bucket_sums
from thinwire.aggregation.vectors import BUCKET, not_finite
from thinwire.core.errors import CodecError
from thinwire.core.types import Vector


@dataclass(frozen=True)
class Qsgd(Whole):
    """Sends every value as one of 2^b - 1 levels between -scale and scale of its bucket, rounded at random.

    QSGD (Alistarh et al. 2017) with s = 2^(b-1) - 1 levels a side and the bucket's maximum as norm; `qsgd(b, l2)` takes
    its Euclidean norm, as the paper does. Unbiased: a value's variance is at most (scale/s)^2 / 4, so with the maximum
    omega = 4096 / (4 s^2), and with the Euclidean norm min(4096 / s^2, 64 / s), the paper's bound. Inside a residual
    it rounds to nearest, ties to even, on the maximum: no error is larger than its value and the largest value is
    exact, so delta is at least 1/4096 for every b, where random rounding would diverge.
    """

    examples: ClassVar[tuple[str, ...]] = ("qsgd(2)", "qsgd(4)", "qsgd(4, l2)", "qsgd(7)", "qsgd(8)")
    width: int = 4
    euclidean: bool = False
    nearest: bool = False

    @classmethod
    def read(cls, argument: str | None) -> Qsgd:
        width, comma, norm = (argument or "").partition(",")
        if comma and norm.strip() != "l2":
            raise CodecError(f"qsgd({argument}) cannot be", why="its norm is the maximum, or l2", hint="qsgd(4, l2)")
        return cls(read_whole("qsgd", width, 2, 8, 4), bool(comma))

    @property
    def spec(self) -> str:
        return f"qsgd({self.width}, l2)" if self.euclidean else f"qsgd({self.width})"

    @property
    def bits(self) -> int:
        return self.width

    @property
    def levels(self) -> int:
        return int(2 ** (self.width - 1) - 1)

    def kind(self) -> Kind:
        s = self.levels
        if self.nearest:
            return Contractive(max(1 / BUCKET, 1 - BUCKET / (4 * s * s)))
        return Unbiased(min(BUCKET / s**2, BUCKET**0.5 / s) if self.euclidean else BUCKET / (4 * s * s))

    def under_feedback(self) -> Qsgd:
        return replace(self, nearest=True)

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        if not self.euclidean or self.nearest:
            return levels.encoded(values, self.levels, None if self.nearest else word)
        scales = self._norms(bucket_sums(values, 2))
        return levels.rounded(values, scales, self.levels, word), scales

    def _norms(self, squares: NDArray[np.float64]) -> Vector:
        return levels.usable(np.sqrt(squares) / self.levels, self.levels)

    @property
    def writes(self) -> bool:
        return native.looks()

    def write(self, values: Vector, word: int, symbols: NDArray[np.uint8], scales: Scales, first: int = 0) -> None:
        if self.euclidean and not self.nearest:
            squares = bucket_sums(values, 2)
            if not np.isfinite(squares).all():
                raise not_finite()
            scales[:] = self._norms(squares)
            native.write_rounded(values, scales, self.levels, word, self.bits, symbols, first)
            return
        drawn = None if self.nearest else word
        native.write(values, self.levels, levels.most(self.levels), drawn, self.bits, symbols, scales, first)

    def dequantize(self, symbols: Symbols, scales: Scales, span: slice, word: int) -> Vector:
        return scaled(symbols[span], scales, span.start)

    @property
    def feeds(self) -> bool:
        return self.writes

    def write_held(self, values: Vector, held: Held, word: int, symbols: NDArray[np.uint8], scales: Scales) -> None:
        drawn = None if self.nearest else word
        held_native.levels(values, held, self.levels, levels.most(self.levels), drawn, self.bits, symbols, scales)

    def add(
        self, symbols: Symbols, scales: Scales, span: slice, word: int, factor: np.float32, adds: bool, into: Vector
    ) -> bool:
        return native.add(symbols, scales, span, factor, adds, into)

    def check(self, symbols: Symbols, scales: Scales) -> None:
        levels.check(self.spec, symbols, scales, self.levels)
