"""A codec of your own that rotates, in one file: 4 bits a parameter, unbiased, without a kernel.

Its class declares what the laws, the registry, the docs, the benchmark and the rules of plans read. README.md says how
to try it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from thinwire.compression.base import Quantizer, Scales, Symbols, Unbiased
from thinwire.compression.rotation import MAX_BLOCK, MIN_BLOCK, rotate, rotate_back, rotated_blocks, signs
from thinwire.core.errors import BadPayload
from thinwire.core.prng import second_word, uniform
from thinwire.core.types import Vector

LEVELS = 7  # on either side of 0
MAX_SCALE = np.float32(np.finfo(np.float32).max / MAX_BLOCK / LEVELS)  # a value sums up to MAX_BLOCK levels


def parts(size: int) -> list[tuple[int, int, int]]:
    """Return (start, stop, length) of each rotated block, and of the tail, which is not rotated: its length is 1."""
    blocks = [(start, stop, stop - start) for start, stop in rotated_blocks(size)]
    rotated = blocks[-1][1] if blocks else 0
    return blocks + [(rotated, size, 1)] * (rotated < size)


@dataclass(frozen=True)
class Spin(Quantizer):
    """Rotates at random and sends 15 levels, rounded at random, without a kernel."""

    examples: ClassVar[tuple[str, ...]] = ("spin", "topk(0.3) > spin")
    paper: ClassVar[str] = "Somebody et al. 2026"
    rotates: ClassVar[bool] = True
    seeded: ClassVar[bool] = True
    spec: ClassVar[str] = "spin"
    bits: ClassVar[int] = 4

    def kind(self) -> Unbiased:
        # A value's variance is at most scale^2 / 4. In the tail the largest value may hold all of the norm.
        return Unbiased(MIN_BLOCK / (4 * LEVELS**2))

    def scales_count(self, size: int) -> int:
        return len(parts(size))

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        symbols, scales = np.zeros(values.size, np.int8), np.zeros(self.scales_count(values.size), np.float32)
        for at, (start, stop, length) in enumerate(parts(values.size)):
            _, exponent = np.frexp(np.abs(values[start:stop]).max())  # scaled to about 1: no sum overflows
            near = np.ldexp(values[start:stop], -exponent).astype(np.float32)
            turned = rotate(near, signs(start, stop, word)) if length > 1 else near
            largest = np.abs(turned).max()
            if largest > 0:
                # The word has chosen the signs of the rotation: rounding draws from another one.
                place = turned * (np.float32(LEVELS) / largest) + uniform(start, stop, second_word(word))
                symbols[start:stop] = np.clip(np.floor(place), -LEVELS, LEVELS)
                scales[at] = min(float(np.ldexp(float(largest) / LEVELS / length, exponent)), float(MAX_SCALE))
        return symbols, scales

    def dequantize(self, symbols: Symbols, scales: Scales, span: slice, word: int) -> Vector:
        out = np.empty(span.stop - span.start, np.float32)
        for scale, (start, stop, length) in zip(scales, parts(symbols.size), strict=True):
            first, last = max(start, span.start), min(stop, span.stop)
            if first < last:
                back = symbols[start:stop].astype(np.float32)
                back = rotate_back(back, signs(start, stop, word)) if length > 1 else back
                out[first - span.start : last - span.start] = back[first - start : last - start] * scale
        return out

    def check(self, symbols: Symbols, scales: Scales) -> None:
        if not ((scales >= 0) & (scales <= MAX_SCALE)).all():
            raise BadPayload("a scale that spin never makes", why="it is negative, not finite or out of range")
        if symbols.size and symbols.min() < -LEVELS:
            raise BadPayload(f"a symbol outside -{LEVELS}..{LEVELS}")
