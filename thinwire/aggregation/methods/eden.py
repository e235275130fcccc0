"""eden(b) and drive: a random rotation, then the best levels for normal values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.codec import Contractive, Kind, Scales, Symbols, Unbiased
from thinwire.aggregation.held import Held
from thinwire.aggregation.methods import eden_scales
from thinwire.aggregation.methods.arguments import read_whole
from thinwire.aggregation.methods.eden_scales import MOST
from thinwire.aggregation.methods.quantizer import Whole
from thinwire.aggregation.native import rotation as native
from thinwire.aggregation.native.path import NUMPY, chosen
from thinwire.aggregation.rotation import rotate, rotate_back, rotated_blocks, signs
from thinwire.aggregation.sums import in_order, lane_sums
from thinwire.core.errors import BadPayload
from thinwire.core.types import Vector

# Lloyd-Max levels of the standard normal distribution (Lloyd 1982; Max 1960), the positive half, to float32; and the
# mean squared error that they leave.
LEVELS = {
    1: (0.79788458,),
    2: (0.45278004, 1.51041758),
    3: (0.24509411, 0.75600529, 1.34390926, 2.15194559),
    4: (0.12839504, 0.38804829, 0.65675914, 0.94234043, 1.25623119, 1.61804640, 2.06901717, 2.73258948),
}
ERRORS = {1: 0.363380, 2: 0.117482, 3: 0.034548, 4: 0.009501}


@dataclass(frozen=True)
class Eden(Whole):
    """Rotates at random and sends b bits a value: the nearest of 2^b levels for normal values, and one scale a block.

    EDEN (Vargaftik et al. 2022). The scale ||x||^2 / <rotated, levels> makes the mean exact over uniform rotations;
    omega = e / (1 - e) with e the levels' mean squared error. Hadamard rotations come near that on dense data of 1024
    values and more. Inside a residual the scale is divided by 1 + omega: the contraction with delta = 1 / (1 + omega).
    A tail of under 64 values is sent as fp16.
    """

    examples: ClassVar[tuple[str, ...]] = ("eden(1)", "eden(2)", "eden(3)", "topk(0.3) > eden(4)")
    seeded: ClassVar[bool] = True
    scales_dtype: ClassVar[np.dtype[Any]] = np.dtype(np.uint8)
    width: int = 4
    shrunk: bool = False

    @classmethod
    def read(cls, argument: str | None) -> Self:
        return cls(read_whole("eden", argument, 1, max(LEVELS), 2))

    @property
    def spec(self) -> str:
        return f"eden({self.width})"

    @property
    def bits(self) -> int:
        return self.width

    @property
    def omega(self) -> float:
        return ERRORS[self.width] / (1 - ERRORS[self.width])

    def kind(self) -> Kind:
        return Contractive(1 / (1 + self.omega)) if self.shrunk else Unbiased(self.omega)

    def under_feedback(self) -> Self:
        return replace(self, shrunk=True)

    def scales_count(self, size: int) -> int:
        """Bytes of them, see eden_scales."""
        return eden_scales.count(size)

    @property
    def levels(self) -> Vector:
        return np.array(LEVELS[self.width], np.float32)

    @property
    def divisor(self) -> float:
        """What the scale is divided by."""
        return 1 + self.omega if self.shrunk else 1.0

    @property
    def writes(self) -> bool:
        return chosen() != NUMPY

    def write(self, values: Vector, word: int, symbols: NDArray[np.uint8], scales: Scales, first: int = 0) -> None:
        self._write(values, word, self.bits, symbols, scales, first)

    def _write(
        self, values: Vector, word: int, bits: int, symbols: NDArray[np.uint8], scales: Scales, first: int
    ) -> None:
        native.write(values, word, self.levels, self.divisor, MOST, bits, symbols, scales, first)
        eden_scales.write_tail(values[eden_scales.rotated(values.size) :], scales)

    @property
    def feeds(self) -> bool:
        return self.writes

    def write_held(self, values: Vector, held: Held, word: int, symbols: NDArray[np.uint8], scales: Scales) -> None:
        tail = slice(eden_scales.rotated(values.size), values.size)
        symbols[tail.start * self.bits // 8 :] = 0
        native.write_held(values, held, word, self.levels, self.divisor, MOST, self.bits, symbols, scales)
        held.before(values, tail)
        eden_scales.write_tail(values[tail], scales)
        held.after(values, tail)
        if values[tail].size:
            values[tail] += eden_scales.tail_of(scales, values.size) * np.float32(held.weight)
        held.settled(values, tail)

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        if self.writes:
            symbols, scales = np.empty(values.size, np.int8), np.empty(self.scales_count(values.size), np.uint8)
            self._write(values, word, 8, symbols.view(np.uint8), scales, 0)
            return symbols, scales
        return self._quantize(values, word)

    def _quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        symbols, factors, rotated = np.zeros(values.size, np.int8), list[float](), 0
        for start, rotated in rotated_blocks(values.size):
            symbols[start:rotated], factor = self._block(values[start:rotated], signs(start, rotated, word))
            factors.append(factor)
        return symbols, eden_scales.joined(factors, values[rotated:])

    def _block(self, values: Vector, drawn: NDArray[np.uint32]) -> tuple[Symbols, float]:
        _, exponent = np.frexp(np.abs(values).max())  # brought to about 1, so that no sum overflows
        near: Vector = np.ldexp(values, -exponent).astype(np.float32)
        square = _sum(near.astype(np.float64) ** 2)
        if square == 0:
            return np.zeros(values.size, np.int8), 0.0
        turned = rotate(near, drawn)
        magnitudes = np.abs(turned)
        levels = self.levels
        borders = (levels[1:] + levels[:-1]) * np.float32(0.5)
        found = np.searchsorted(borders, magnitudes * np.float32(1 / np.sqrt(square)), side="right").astype(np.int8)
        along = _sum(magnitudes.astype(np.float64) * levels[found].astype(np.float64))
        scale = square / along / self.divisor
        return np.where(turned < 0, ~found, found), min(float(np.ldexp(scale, exponent)), float(MOST))

    def dequantize(self, symbols: Symbols, scales: Scales, span: slice, word: int) -> Vector:
        out = np.empty(span.stop - span.start, np.float32)
        levels = self.levels
        rotated = 0
        factors = eden_scales.factors_of(scales, symbols.size)
        for (start, rotated), factor in zip(rotated_blocks(symbols.size), factors, strict=True):
            a, b = max(start, span.start), min(rotated, span.stop)
            if a < b:
                found = symbols[start:rotated]
                level = np.where(found < 0, -levels[~found * (found < 0)], levels[found * (found >= 0)])
                back = rotate_back(level, signs(start, rotated, word))[a - start : b - start]
                out[a - span.start : b - span.start] = back * factor
        if rotated < span.stop:
            first = max(rotated, span.start)
            out[first - span.start :] = eden_scales.tail_of(scales, symbols.size)[first - rotated : span.stop - rotated]
        return out

    def add(
        self, symbols: Symbols, scales: Scales, span: slice, word: int, factor: np.float32, adds: bool, into: Vector
    ) -> bool:
        if not native.add(symbols, scales, span, word, self.levels, factor, adds, into):
            return False
        rotated = eden_scales.rotated(symbols.size)
        first = max(rotated, span.start)
        if first < span.stop:
            tail = eden_scales.tail_of(scales, symbols.size)[first - rotated : span.stop - rotated] * factor
            into[first - span.start :] = into[first - span.start :] + tail if adds else tail
        return True

    def check(self, symbols: Symbols, scales: Scales) -> None:
        eden_scales.check(self.spec, scales, symbols.size)
        if symbols[eden_scales.rotated(symbols.size) : symbols.size].any():
            raise BadPayload("a symbol in the tail", why="the tail is sent as fp16")


@dataclass(frozen=True)
class Drive(Eden):
    """Rotates at random and sends the signs and one scale a block.

    DRIVE (Vargaftik et al. 2021): eden with one bit. omega = pi/2 - 1.
    """

    examples: ClassVar[tuple[str, ...]] = ("drive", "topk(0.1) > drive")
    width: int = 1

    @classmethod
    def read(cls, argument: str | None) -> Self:
        del argument
        return cls()

    @property
    def spec(self) -> str:
        return "drive"


def _sum(values: NDArray[np.float64]) -> float:
    return in_order(lane_sums(values))
