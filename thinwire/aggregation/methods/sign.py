"""sign: one bit a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.codec import BUCKET, Contractive, Kind, Scales, Symbols, buckets
from thinwire.aggregation.held import Held
from thinwire.aggregation.methods.quantizer import Whole
from thinwire.aggregation.native import held as held_native
from thinwire.aggregation.native import kernel
from thinwire.aggregation.native import sums as native
from thinwire.aggregation.sums import bucket_sums
from thinwire.aggregation.vectors import blocks
from thinwire.core.errors import BadPayload, CodecError
from thinwire.core.types import Vector


@dataclass(frozen=True)
class Sign(Whole):
    """Sends the sign of every value, and for each 4096 values the mean of either side.

    1-bit SGD (Seide et al. 2014), whose receiver puts each side's mean in place of its values; `sign(scaled)` sends
    one mean magnitude instead of two means (Karimireddy et al. 2019). What is lost is the variance inside a side, so
    delta >= 1/4096 in a bucket; on normal values it is about 0.64. Needs feedback: without it the error is a bias.
    """

    examples: ClassVar[tuple[str, ...]] = ("sign", "sign(scaled)")
    bits: ClassVar[int] = 1
    scaled: bool = False

    @classmethod
    def read(cls, argument: str | None) -> Sign:
        if argument is not None and argument.strip() != "scaled":
            hint = "sign(scaled)" if argument.strip() else "sign"
            raise CodecError(f"sign({argument}) cannot be", why="it sends two means, or one", hint=hint)
        return cls(argument is not None)

    @property
    def spec(self) -> str:
        return "sign(scaled)" if self.scaled else "sign"

    def kind(self) -> Kind:
        return Contractive(1 / BUCKET)

    def scales_count(self, size: int) -> int:
        return buckets(size) * (1 if self.scaled else 2)

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        negative = values < 0
        symbols: Symbols = np.negative(negative.view(np.int8))  # 0, or -1: in one bit the sign itself
        if self.scaled:
            return symbols, mean_magnitudes(values)
        counts = sizes(values.size)
        below = bucket_sums(np.where(negative, values, np.float32(0)))
        below_counts = np.add.reduceat(negative, np.arange(0, values.size, BUCKET), dtype=np.int64)
        above = bucket_sums(np.where(negative, np.float32(0), values))
        scales = np.stack([above / np.maximum(counts - below_counts, 1), below / np.maximum(below_counts, 1)], axis=1)
        return symbols, scales.astype(np.float32).reshape(-1)

    @property
    def writes(self) -> bool:
        return kernel("sign_encode") is not None

    def write(self, values: Vector, word: int, symbols: NDArray[np.uint8], scales: Scales, first: int = 0) -> None:
        means = np.empty(2 * scales.size, np.float32) if self.scaled else scales
        native.sign_write(values, symbols, means)
        if self.scaled:
            scales[:] = mean_magnitudes(values)

    @property
    def feeds(self) -> bool:
        return self.writes and not self.scaled

    def write_held(self, values: Vector, held: Held, word: int, symbols: NDArray[np.uint8], scales: Scales) -> None:
        held_native.sign(values, held, symbols, scales)

    def add(
        self, symbols: Symbols, scales: Scales, span: slice, word: int, factor: np.float32, adds: bool, into: Vector
    ) -> bool:
        return native.sign_add(symbols, self._pairs(scales), span, factor, adds, into)

    def _pairs(self, scales: Scales) -> Vector:
        """The means of either side."""
        return np.repeat(scales, 2) if self.scaled else scales

    def dequantize(self, symbols: Symbols, scales: Scales, span: slice, word: int) -> Vector:
        out = np.empty(span.stop - span.start, np.float32)
        pairs = self._pairs(scales).reshape(-1, 2)
        for start, stop in blocks(span.stop, span.start):
            first = start // BUCKET
            each = np.repeat(pairs[first : buckets(stop)], BUCKET, axis=0)[start - first * BUCKET :][: stop - start]
            negative = symbols[start:stop] < 0
            out[start - span.start : stop - span.start] = np.where(negative, -each[:, 1], each[:, 0])
        return out

    def check(self, symbols: Symbols, scales: Scales) -> None:
        if not (np.isfinite(scales) & (scales >= 0)).all():
            raise BadPayload("a mean that sign never makes", why="it is negative or not finite")


def sizes(values: int) -> NDArray[np.int64]:
    """How many values each bucket has."""
    return np.diff(np.minimum(np.arange(buckets(values) + 1) * BUCKET, values))


def mean_magnitudes(values: Vector) -> Vector:
    return (bucket_sums(values) / sizes(values.size)).astype(np.float32)
