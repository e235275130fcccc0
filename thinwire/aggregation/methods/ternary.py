"""ternary: -1, 0 or 1."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.buckets import maxima, scaled
from thinwire.aggregation.codec import BUCKET, Contractive, Kind, ResidualOnly, Scales, Symbols, buckets
from thinwire.aggregation.held import Held
from thinwire.aggregation.methods import levels
from thinwire.aggregation.methods.quantizer import Whole
from thinwire.aggregation.native import held as held_native
from thinwire.aggregation.native import levels as levels_native
from thinwire.aggregation.native import ternary as native
from thinwire.aggregation.sums import rms
from thinwire.core.types import Vector

SIGMAS = 2.5  # root mean squares: beyond, a tensor is clipped


@dataclass(frozen=True)
class Ternary(Whole):
    """Sends every value as -1, 0 or 1 times the largest magnitude of its tensor, clipped at 2.5 sigma, at random.

    TernGrad (Wen et al. 2017): not 0 with probability |x| / scale. Sigma is the root of the mean square, as if the mean
    were 0, and each device has its own scale where the paper's workers share the largest. Its mean is exact but for the
    clip, which keeps the noise small and moves what lies beyond, so nothing is promised of one call. The frame repeats
    the scale for each 4096 values of a tensor: inside a residual each of those has its own maximum and rounds to
    nearest, delta >= 1/4096.
    """

    examples: ClassVar[tuple[str, ...]] = ("ternary",)
    spec: ClassVar[str] = "ternary"
    bits: ClassVar[int] = 2
    apart: ClassVar[bool] = False
    nearest: bool = False
    starts: tuple[int, ...] = (0,)  # of the tensors

    def kind(self) -> Kind:
        return Contractive(1 / BUCKET) if self.nearest else ResidualOnly()

    def under_feedback(self) -> Ternary:
        return replace(self, nearest=True)

    def over(self, starts: tuple[int, ...]) -> Ternary:
        return replace(self, starts=starts)

    def scales_count(self, size: int) -> int:
        return sum(buckets(stop - start) for start, stop, _ in self._tensors(size))

    def _tensors(self, size: int) -> Iterator[tuple[int, int, int]]:
        """(start, stop, the first one's number among the scales) of each tensor."""
        scale = 0
        for start, stop in zip(self.starts, (*self.starts[1:], size), strict=True):
            yield start, stop, scale
            scale += buckets(stop - start)

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        symbols, scales = np.empty(values.size, np.int8), np.empty(self.scales_count(values.size), np.float32)
        if self.writes:
            self._write(values, word, 8, symbols.view(np.uint8), scales)
            return symbols, scales
        for start, stop, first in self._tensors(values.size):
            tensor = values[start:stop]
            largest = maxima(tensor)
            if not self.nearest and tensor.size:
                largest[:] = min(float(largest.max()), SIGMAS * rms(tensor))
            own = scales[first : first + largest.size] = levels.usable(largest, 1)
            symbols[start:stop] = levels.rounded(tensor, own, 1, None if self.nearest else word, start)
        return symbols, scales

    @property
    def writes(self) -> bool:
        return levels_native.looks()

    def write(self, values: Vector, word: int, symbols: NDArray[np.uint8], scales: Scales, first: int = 0) -> None:
        self._write(values, word, self.bits, symbols, scales)

    def _write(self, values: Vector, word: int, bits: int, out: NDArray[np.uint8], scales: Scales) -> None:
        drawn = None if self.nearest else word
        native.write(values, self.starts, SIGMAS, levels.most(1), drawn, bits, out, scales)

    @property
    def feeds(self) -> bool:
        return self.writes and self.nearest

    def write_held(self, values: Vector, held: Held, word: int, symbols: NDArray[np.uint8], scales: Scales) -> None:
        held_native.ternary(values, held, self.starts, levels.most(1), self.bits, symbols, scales)

    def add(
        self, symbols: Symbols, scales: Scales, span: slice, word: int, factor: np.float32, adds: bool, into: Vector
    ) -> bool:
        return levels_native.add(symbols, scales, span, factor, adds, into, self.starts)

    def dequantize(self, symbols: Symbols, scales: Scales, span: slice, word: int) -> Vector:
        out = np.empty(span.stop - span.start, np.float32)
        for start, stop, first in self._tensors(symbols.size):
            a, b = max(start, span.start), min(stop, span.stop)
            if a < b:
                out[a - span.start : b - span.start] = scaled(symbols[a:b], scales[first:], a - start)
        return out

    def check(self, symbols: Symbols, scales: Scales) -> None:
        levels.check(self.spec, symbols, scales, 1)
