"""qsgd(b): b bits a value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.codec import BUCKET, Contractive, Kind, Scales, Symbols, Unbiased, not_finite
from thinwire.aggregation.methods import levels
from thinwire.aggregation.methods.arguments import read_whole
from thinwire.aggregation.methods.levelled import Levelled
from thinwire.aggregation.native import levels as native
from thinwire.aggregation.sums import bucket_sums
from thinwire.core.errors import CodecError
from thinwire.core.types import Vector


@dataclass(frozen=True)
class Qsgd(Levelled):
    """Sends every value as one of 2^b - 1 levels between -scale and scale of its bucket, rounded at random.

    QSGD (Alistarh et al. 2017) with s = 2^(b-1) - 1 levels a side and the bucket's maximum as norm; `qsgd(b, l2)` takes
    its Euclidean norm, as the paper does. Symbols have b bits each; the paper's Elias code is not here, `> rice` or
    `> zstd` behind it does that work. Unbiased: a value's variance is at most (scale/s)^2 / 4, so with the maximum
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
        try:
            return cls(read_whole("qsgd", width, 2, 8, 4), bool(comma))
        except CodecError as error:
            hint = error.hint.replace(")", ", l2)") if comma else error.hint
            raise CodecError(f"qsgd({argument or ''}) cannot be", why=error.why, hint=hint) from None

    @property
    def spec(self) -> str:
        return f"qsgd({self.width}, l2)" if self.euclidean else f"qsgd({self.width})"

    @property
    def bits(self) -> int:
        return self.width

    def kind(self) -> Kind:
        s = self.levels
        if self.nearest:
            return Contractive(max(1 / BUCKET, 1 - BUCKET / (4 * s * s)))
        return Unbiased(min(BUCKET / s**2, BUCKET**0.5 / s) if self.euclidean else BUCKET / (4 * s * s))

    def under_feedback(self) -> Qsgd:
        return replace(self, nearest=True)

    def drawn(self, word: int) -> int | None:
        return None if self.nearest else word

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        if not self.euclidean or self.nearest:
            return super().quantize(values, word)
        scales = self._norms(bucket_sums(values, 2))
        return levels.rounded(values, scales, self.levels, word), scales

    def write(self, values: Vector, word: int, symbols: NDArray[np.uint8], scales: Scales, first: int = 0) -> None:
        if not self.euclidean or self.nearest:
            super().write(values, word, symbols, scales, first)
            return
        squares = bucket_sums(values, 2)
        if not np.isfinite(squares).all():
            raise not_finite()
        scales[:] = self._norms(squares)
        native.write_rounded(values, scales, self.levels, word, self.bits, symbols, first)

    def _norms(self, squares: NDArray[np.float64]) -> Vector:
        return levels.usable(np.sqrt(squares) / self.levels, self.levels)
