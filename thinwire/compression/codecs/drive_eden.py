"""`eden(b)` and `drive`: a random rotation, then the best quantization levels for normal values.

A vector is rotated in blocks (thinwire/compression/rotation.py). A rotated block is nearly normal whatever it was, so
one table of levels fits all.

A new codec that rotates uses `rotated_blocks`, `signs`, `rotate` and `rotate_back` of that file. Without a kernel it is
a subclass of `Quantizer`; `Eden` is a `FusedQuantizer`, which needs kernels. tests/compression/test_new_codec.py holds
an example. If it draws again after the rotation, it draws from `second_word(word)`, because `signs` has the bits of
`word` (see thinwire/core/prng.py).

The scales are a float32 for each rotated block, then the tail as fp16: a byte for its exponent and two bytes for each
value. Without a tail there is no exponent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import numpy as np
from numpy.typing import NDArray

from thinwire.compression.base import ErrorBound, FusedQuantizer, Scales, Symbols, Unbiased, shrinkage, shrunk
from thinwire.compression.codecs import read_number, read_whole
from thinwire.compression.codecs.identity_fp16_bf16 import Fp16
from thinwire.compression.codecs.pack_zstd import SparseSymbols, nonzero
from thinwire.compression.native import GRAIN, each, kernel, require_kernel, stored
from thinwire.compression.normal_values import ERRORS, LEVELS, share_beyond, threshold, variance_beyond
from thinwire.compression.rotation import block_sizes, rotate, rotate_back, rotated_blocks, rotated_size, signs
from thinwire.compression.vector_ops import Memory, in_order, partial_sums, require_finite, write_in_parts
from thinwire.core.errors import BadPayload, CodecError, NonFiniteUpdate

if TYPE_CHECKING:
    from thinwire.core.types import Vector


@dataclass(frozen=True)
class Eden(FusedQuantizer):
    """Rotates at random and sends b bits a value, up to 1.5 also in parts: the nearest level, and one scale a block.

    EDEN (Vargaftik et al. 2022), with levels for normal values; `SparseEden` is the form for parts of a bit. The scale
    ||x||^2 / <rotated, levels> makes the mean exact over uniform rotations; omega = e / (1 - e) with e the levels' mean
    squared error. Hadamard rotations come near that on dense data of 1024 values and more. Inside error feedback the
    scale is divided by 1 + omega, which makes a contraction with delta = 1 / (1 + omega). A tail of fewer than 64
    values is sent as fp16.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "eden(2)",
        "eden(1)",
        "eden(3)",
        "eden(0.1)",
        "eden(0.6)",
        "eden(1.3)",
        "topk(0.3) > eden(4)",
    )
    paper: ClassVar[str] = "Vargaftik et al. 2022"
    rotates: ClassVar[bool] = True
    seeded: ClassVar[bool] = True
    scales_dtype: ClassVar[np.dtype[Any]] = np.dtype(np.uint8)
    width: int = 4
    fed_back: bool = False

    @classmethod
    def read(cls, argument: str | None) -> Eden:
        """Make the codec from its argument, the bits a value: a whole number, or another one up to 1.5."""
        said = (argument or "").strip()
        why = f"it takes a whole number from 1 to {max(LEVELS)}, or any from {FEWEST_BITS} to {MAX_BITS}"
        if said.startswith(("0.", ".", "1.")):
            rate = read_number("eden", argument, MAX_BITS, "0.1")
            if rate == 1:
                return cls(1)
            if rate >= FEWEST_BITS:
                return SparseEden(rate=rate)
            raise CodecError(f"eden({said}) is not valid", why=why, hint=f"eden({FEWEST_BITS})")
        try:
            return cls(read_whole("eden", argument, 1, max(LEVELS), 2))
        except CodecError as error:
            hint = f"eden({said.replace(',', '.')})" if said.startswith("0,") else error.hint
            raise CodecError(error.what, why=why, hint=hint) from None

    @property
    def spec(self) -> str:
        return f"eden({self.width})"

    @property
    def bits(self) -> int:
        return self.width

    @property
    def omega(self) -> float:
        """Return the bound on the variance, e / (1 - e) with e the levels' mean squared error."""
        return ERRORS[self.width] / (1 - ERRORS[self.width])

    def kind(self) -> ErrorBound:
        return shrunk(Unbiased(self.omega), self.divisor)

    def under_feedback(self) -> Self:
        """Return the quantizer whose scale is divided by 1 + omega."""
        return replace(self, fed_back=True)

    def scales_count(self, size: int) -> int:
        """Return the number of bytes of the scales, see `count`."""
        return count(size)

    @property
    def levels(self) -> Vector:
        """Return the positive levels."""
        return np.array(LEVELS[self.width], np.float32)

    @property
    def borders(self) -> Vector:
        """Return the magnitudes, in root mean squares, from which on the next level is the nearest."""
        levels = self.levels
        return (levels[1:] + levels[:-1]) * np.float32(0.5)

    @property
    def divisor(self) -> float:
        """Return the divisor of the scale."""
        return shrinkage(Unbiased(self.omega), 0.0) if self.fed_back else 1.0

    def _encode(
        self, values: Vector, memory: Memory | None, word: int, symbols: NDArray[np.uint8], scales: Scales
    ) -> None:
        self._eden(values, memory, word, self.bits, symbols, scales)
        tail = slice(rotated_size(values.size), values.size)
        if memory is None:
            write_tail(values[tail], scales)
            return
        symbols[tail.start * self.bits // 8 :] = 0
        memory.compensate(values, tail)
        write_tail(values[tail], scales)
        memory.restart(values, tail)
        if values[tail].size:
            values[tail] += tail_of(scales, values.size) * np.float32(memory.weight)
        memory.require_finite(values, tail)

    def _eden(
        self, values: Vector, memory: Memory | None, word: int, bits: int, symbols: NDArray[np.uint8], scales: Scales
    ) -> None:
        """Write symbols of `bits` bits each, and the bytes of a float32 for each block, except for the tail."""
        table = np.concatenate([self.levels, self.borders])
        q, factors = symbols.ctypes.data, scales.ctypes.data
        args = word, self.width, bits, table.ctypes.data, self.divisor, MAX_SCALE
        write_in_parts(
            "eden", values, memory, lambda a: (a, *args, _room(), factors + a // GRAIN * 4, q + a * bits // 8)
        )

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        if self.fused:
            symbols, scales = np.empty(values.size, np.int8), np.empty(self.scales_count(values.size), np.uint8)
            self._eden(values, None, word, 8, symbols.view(np.uint8), scales)
            write_tail(values[rotated_size(values.size) :], scales)
            return symbols, scales
        return self._quantize(values, word)

    def _quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        symbols, factors, rotated = np.zeros(values.size, np.int8), list[float](), 0
        for start, rotated in rotated_blocks(values.size):
            symbols[start:rotated], factor = self._block(values[start:rotated], signs(start, rotated, word))
            factors.append(factor)
        return symbols, joined(factors, values[rotated:])

    def _block(self, values: Vector, drawn: NDArray[np.uint32]) -> tuple[Symbols, float]:
        _, exponent = np.frexp(np.abs(values).max())  # scaled to about 1, so that no sum overflows
        near: Vector = np.ldexp(values, -exponent).astype(np.float32)
        square = in_order(partial_sums(near.astype(np.float64) ** 2))
        if square == 0:
            return np.zeros(values.size, np.int8), 0.0
        turned = rotate(near, drawn)
        magnitudes = np.abs(turned)
        levels = self.levels
        places = magnitudes * np.float32(1 / np.sqrt(square))
        borders = self.borders if levels[0] else np.minimum(self.borders, places.max())
        found = np.searchsorted(borders, places, side="right").astype(np.int8)
        along = in_order(partial_sums(magnitudes.astype(np.float64) * levels[found].astype(np.float64)))
        scale = square / along / self.divisor
        negative = (turned < 0) & (levels[found] > 0)
        return np.where(negative, ~found, found), min(float(np.ldexp(scale, exponent)), float(MAX_SCALE))

    def dequantize(self, symbols: Symbols, scales: Scales, span: slice, word: int) -> Vector:
        out = np.empty(span.stop - span.start, np.float32)
        levels = self.levels
        rotated = 0
        factors = factors_of(scales, symbols.size)
        for (start, rotated), factor in zip(rotated_blocks(symbols.size), factors, strict=True):
            a, b = max(start, span.start), min(rotated, span.stop)
            if a < b:
                found = symbols[start:rotated]
                level = np.where(found < 0, -levels[~found * (found < 0)], levels[found * (found >= 0)])
                back = rotate_back(level, signs(start, rotated, word))[a - start : b - start]
                out[a - span.start : b - span.start] = back * factor
        if rotated < span.stop:
            first = max(rotated, span.start)
            out[first - span.start :] = tail_of(scales, symbols.size)[first - rotated : span.stop - rotated]
        return out

    def add(
        self, symbols: Symbols, scales: Scales, span: slice, word: int, factor: np.float32, adds: bool, into: Vector
    ) -> bool:
        """Add or replace decoded values with a fused kernel, as `FusedQuantizer.add` does."""
        run = kernel("eden_add")
        if run is None:
            return False
        size, start, factors, table, to = symbols.size, span.start, scales.ctypes.data, self.levels, into.ctypes.data
        args, levels = (*stored(symbols), factors, size), (word, self.width, table.ctypes.data, factor, adds)
        each(start, span.stop, lambda a, b: run(*args, a, b, *levels, _room(), to + 4 * (a - start)))
        add_tail(scales, size, span, factor, adds, into)
        return True

    def check(self, symbols: Symbols, scales: Scales) -> None:
        check_scales(self.spec, scales, symbols.size)
        if symbols[rotated_size(symbols.size) : symbols.size].any():
            raise BadPayload("a symbol in the tail", why="the tail is sent as fp16")


@dataclass(frozen=True)
class Drive(Eden):
    """Rotates at random and sends the signs and one scale a block.

    DRIVE (Vargaftik et al. 2021): eden with one bit. omega = pi/2 - 1.
    """

    examples: ClassVar[tuple[str, ...]] = ("drive", "topk(0.1) > drive")
    paper: ClassVar[str] = "Vargaftik et al. 2021"
    width: int = 1

    @classmethod
    def read(cls, argument: str | None) -> Self:
        del argument
        return cls()

    @property
    def spec(self) -> str:
        return "drive"


FEWEST_BITS, MAX_BITS = Decimal("0.001"), Decimal("1.5")
MAX_SHARE = 1 / 8  # of values that are sent: a place and its symbol take as much memory as nine symbols
SPACE, AT_LEAST = 4096, 4  # places more than normal values need, and that csrc/eden_sparse.hpp may write over
NO_SPACE, NOT_FINITE = -1, -2  # what the kernel returns


@dataclass(frozen=True)
class SparseEden(Eden):
    """Rotates at random and sends the signs of the largest values and one scale a block: `eden(b)`, b up to 1.5.

    A rotated value is sent if its magnitude is at least t root mean squares of its block (`threshold`); the largest
    one of a block always is. The symbols are 0, 1 and ~1 for the levels 0, 1 and -1, and an entropy coder writes them:
    h(p) + p bits a value, p being the share that is sent. The scale is that of `eden`, ||x||^2 / <rotated, levels>, so
    the mean is exact over uniform rotations, and for normal values omega = p / (4 phi(t)^2) - 1. On blocks of fewer
    than about 1 / p values more is sent than b says.

    There is no state. A client's residual was measured to lose accuracy (docs/explain/codecs.md), so feedback refuses
    it. On the downlink, where every version is sent, the scale is divided by 1 + omega as that of `Eden` is.
    """

    width: int = 2
    rate: Decimal = Decimal("0.1")
    entropy_coded: ClassVar[bool] = True
    gains_by_residual: ClassVar[bool] = False
    rejects_non_finite: ClassVar[bool] = True

    @property
    def spec(self) -> str:
        return f"eden({self.rate:f})"

    @property
    def levels(self) -> Vector:
        return np.array([0, 1], np.float32)

    @property
    def borders(self) -> Vector:
        return np.array([threshold(self.rate)], np.float32)

    @property
    def omega(self) -> float:
        """Return the variance on normal values, p / (4 phi(t)^2) - 1."""
        return variance_beyond(threshold(self.rate))

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        if not self.fused:
            require_finite(values)
        elif found := self._sparse(values, word):
            return found
        return super().quantize(values, word)

    def _sparse(self, values: Vector, word: int) -> tuple[Symbols, Scales] | None:
        """Return the places of the symbols and these; None if more than MAX_SHARE are expected, or space is short."""
        if (share := share_beyond(threshold(self.rate))) > MAX_SHARE:
            return None
        run, scales = require_kernel("eden_sparse_encode"), np.empty(self.scales_count(values.size), np.uint8)
        x, factors, border = values.ctypes.data, scales.ctypes.data, float(self.borders[0])

        def part(a: int, b: int) -> tuple[int, NDArray[np.int64], NDArray[np.int8]]:
            space = min(b - a, int(1.2 * share * (b - a)) + SPACE)
            places, symbols = np.empty(space + AT_LEAST, np.int64), np.empty(space + AT_LEAST, np.int8)
            out = factors + a // GRAIN * 4, places.ctypes.data, symbols.ctypes.data
            sent = run(x + 4 * a, b - a, a, word, border, self.divisor, MAX_SCALE, _room(), space, *out)
            return sent, places[: max(0, sent)], symbols[: max(0, sent)]

        parts = each(0, values.size, part)
        least, places, symbols = min(sent for sent, _, _ in parts), *parts[0][1:]
        if least == NOT_FINITE:
            raise NonFiniteUpdate
        if least == NO_SPACE:
            return None
        if len(parts) > 1:
            places, symbols = np.concatenate([part[1] for part in parts]), np.concatenate([part[2] for part in parts])
        write_tail(values[rotated_size(values.size) :], scales)
        return cast("Symbols", SparseSymbols(places, symbols, values.size)), scales

    def check(self, symbols: Symbols, scales: Scales) -> None:
        super().check(symbols, scales)
        if (nonzero(symbols)[1] == -1).any():
            raise BadPayload(f"a symbol that {self.spec} never makes", why="its symbols are 0, 1 and -2")

    def add(
        self, symbols: Symbols, scales: Scales, span: slice, word: int, factor: np.float32, adds: bool, into: Vector
    ) -> bool:
        """Add or replace decoded values with a fused kernel, as `FusedQuantizer.add` does."""
        run = kernel("eden_sparse_add")
        if run is None:
            return False
        places, values = nonzero(symbols)
        size, start, to = symbols.size, span.start, into.ctypes.data
        args = places.ctypes.data, values.ctypes.data, places.size, scales.ctypes.data, size
        each(start, span.stop, lambda a, b: run(*args, a, b, word, factor, adds, _room(), to + 4 * (a - start)))
        add_tail(scales, size, span, factor, adds, into)
        return True


def _room() -> object:
    """Return the working memory of one thread, for one block, as an argument of a kernel."""
    return np.empty(require_kernel("eden_room")(), np.float32).ctypes


MAX_SCALE = np.float32(2.0**108)  # the sum of 2^16 levels of at most 2.74, times this, is finite
TAIL = Fp16()


def count(size: int) -> int:
    """Return the number of bytes of the scales of `size` values.

    >>> count(64), count(65)
    (4, 7)
    """
    tail = size - rotated_size(size)
    return 4 * len(block_sizes(size)) + (1 + 2 * tail) * (tail > 0)


def factors_of(scales: Scales, size: int) -> Vector:
    """Return the scale of each block, as a view."""
    found: Vector = scales[: 4 * len(block_sizes(size))].view("<f4")
    return found


def joined(factors: Sequence[float], tail: Vector) -> Scales:
    """Return the bytes of the scales: one float32 a block, then the tail as fp16."""
    halves, exponents = TAIL.quantize(tail, 0)
    return np.concatenate([np.array(factors, "<f4").view(np.uint8), exponents.view(np.uint8), halves.view(np.uint8)])


def write_tail(tail: Vector, scales: Scales) -> None:
    """Write the tail to the end of `scales`, which has room for it."""
    if tail.size:
        halves, exponents = TAIL.quantize(tail, 0)
        scales[-1 - halves.nbytes] = exponents.view(np.uint8)[0]
        scales[-halves.nbytes :] = halves.view(np.uint8)


def tail_of(scales: Scales, size: int) -> Vector:
    """Return the tail as it was sent; requires that there is one."""
    at = 4 * len(block_sizes(size))
    halves = scales[at + 1 :].view("<f2")
    return TAIL.dequantize(halves, scales[at : at + 1].view(np.int8), slice(0, halves.size), 0)


def add_tail(scales: Scales, size: int, span: slice, factor: np.float32, adds: bool, into: Vector) -> None:
    """Add or replace the values of the tail that are in `span`, times `factor`."""
    rotated = rotated_size(size)
    first = max(rotated, span.start)
    if first < span.stop:
        tail = tail_of(scales, size)[first - rotated : span.stop - rotated] * factor
        into[first - span.start :] = into[first - span.start :] + tail if adds else tail


def check_scales(spec: str, scales: Scales, size: int) -> None:
    """Raise BadPayload for scales that no encoder makes."""
    factors = factors_of(scales, size)
    if not ((factors >= 0) & (factors <= MAX_SCALE)).all():
        raise BadPayload(f"a scale that {spec} never makes", why="it is negative, not finite or out of range")
    if rotated_size(size) < size:
        rest = scales[factors.nbytes :]
        TAIL.check(rest[1:].view("<f2"), rest[:1].view(np.int8))
