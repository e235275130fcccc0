"""Quantizers that round at random within a bucket: `int8` and `qsgd` to even steps, `natural` to powers of two."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from thinwire.compression.base import (
    BUCKET,
    Contractive,
    ErrorBound,
    FusedQuantizer,
    Scales,
    Symbols,
    Unbiased,
    buckets,
)
from thinwire.compression.codecs import read_whole
from thinwire.compression.native import (
    NUMPY,
    add_in_parts,
    chosen,
    each,
    kernel,
    require_kernel,
    stored,
)
from thinwire.compression.vector_ops import Memory, blocks, bucket_sums, encode_in_parts, maxima, scaled, write_in_parts
from thinwire.core.errors import BadPayload, CodecError, NonFiniteUpdate
from thinwire.core.prng import uniform

if TYPE_CHECKING:
    from thinwire.core.types import Vector


@dataclass(frozen=True)
class UniformQuantizer(FusedQuantizer):
    """The base class of uniform quantizers: 2^bits - 1 levels between -max|x| and max|x| of the bucket.

    See `Quantizer` for the methods.
    """

    @property
    def levels(self) -> int:
        """Return the number of levels on either side of 0."""
        return int(2 ** (self.bits - 1) - 1)

    def drawn(self, word: int) -> int | None:
        """Return the seed of stochastic rounding, or None to round to nearest."""
        return word

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        if kernel("levels_encode") is not None:
            symbols, scales = np.empty(values.size, np.int8), np.empty(buckets(values.size), np.float32)
            self._levels(values, None, word, 8, symbols.view(np.uint8), scales)
            return symbols, scales
        scales = usable(maxima(values) / np.float32(self.levels), self.levels)
        return rounded(values, scales, self.levels, self.drawn(word)), scales

    def _encode(
        self, values: Vector, memory: Memory | None, word: int, symbols: NDArray[np.uint8], scales: Scales
    ) -> None:
        self._levels(values, memory, word, self.bits, symbols, scales)

    def _levels(
        self, values: Vector, memory: Memory | None, word: int, bits: int, symbols: NDArray[np.uint8], scales: Scales
    ) -> None:
        """Write symbols of `bits` bits each, and scales: a bucket's largest magnitude over the number of levels."""
        s, q, drawn = scales.ctypes.data, symbols.ctypes.data, self.drawn(word)
        args = self.levels, max_scale(self.levels), drawn is None
        write_in_parts(
            "levels", values, memory, lambda a: (*args, a, drawn or 0, bits, s + a // BUCKET * 4, q + a * bits // 8)
        )

    def dequantize(self, symbols: Symbols, scales: Scales, span: slice, word: int) -> Vector:
        return scaled(symbols[span], scales, span.start)

    def add(
        self, symbols: Symbols, scales: Scales, span: slice, word: int, factor: np.float32, adds: bool, into: Vector
    ) -> bool:
        """Add or replace decoded values with a fused kernel, as `FusedQuantizer.add` does."""
        return levels_add(symbols, scales, span, factor, adds, into)

    def check(self, symbols: Symbols, scales: Scales) -> None:
        check(self.spec, symbols, scales, self.levels)


LEAST = np.float32(2.0**-110)  # 1/scale would overflow for smaller scales: such buckets are sent as zeros


def max_scale(levels: int) -> np.float32:
    """Return the largest scale for which `levels` times the scale is finite."""
    return np.float32(np.nextafter(np.float32(np.finfo(np.float32).max / np.float32(levels)), np.float32(0)))


def usable(scales: NDArray[np.floating], levels: int) -> Vector:
    """Return scales as they are sent: at most `max_scale`, and 0 if their inverse would overflow."""
    with np.errstate(over="ignore"):
        sent: Vector = np.minimum(scales.astype(np.float32), max_scale(levels))
    sent[sent < LEAST] = 0
    return sent


def levels_add(
    symbols: Symbols, scales: Vector, span: slice, factor: np.float32, adds: bool, into: Vector,
    starts: tuple[int, ...] = (0,),
) -> bool:  # fmt: skip
    """Add or replace decoded values as `add_in_parts` does; buckets begin again at each of `starts`."""
    scales = np.require(scales, np.float32, ["C", "A"])  # scales in a frame may begin at any byte
    edges = np.array([*starts, symbols.size], np.int64)
    return add_in_parts("levels_add", (*stored(symbols), scales, edges), span, factor, adds, into)


def write_rounded(
    values: Vector, scales: Vector, levels: int, word: int | None, bits: int, symbols: NDArray[np.uint8], first: int = 0
) -> None:
    """Write symbols of `bits` bits each for given scales by the kernel of `rounded`."""
    run = require_kernel("levels_round")
    x, s, q = values.ctypes.data, scales.ctypes.data, symbols.ctypes.data

    def part(a: int, b: int) -> None:
        at = s + a // BUCKET * 4, levels, word is None, first + a, word or 0, bits, q + a * bits // 8
        run(x + 4 * a, b - a, *at)

    each(0, values.size, part)


def rounded(values: Vector, scales: Vector, levels: int, word: int | None, first: int = 0) -> NDArray[np.int8]:
    """Return floor(x * (1 / scale) + u), with u from a hash of index and word.

    Without a word, round to nearest, ties to even. `first` is the index of the first value, if the vector is a part of
    another one.
    """
    symbols = np.empty(values.size, np.int8)
    if chosen() != NUMPY:
        write_rounded(values, scales, levels, word, 8, symbols.view(np.uint8), first)
        return symbols
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
    for start, stop in blocks(values.size):
        place = scaled(values[start:stop], inverse, start)
        if word is None:
            np.rint(place, out=place)
        else:
            place += uniform(first + start, first + stop, word)
            np.floor(place, out=place)
        symbols[start:stop] = np.clip(place, -levels, levels, out=place)
    return symbols


def check(name: str, symbols: Symbols, scales: Scales, levels: int) -> None:
    """Raise BadPayload for symbols or scales that no encoder with `levels` levels a side makes."""
    if scales.size and not np.all((scales == 0) | ((scales >= LEAST) & (scales <= max_scale(levels)))):
        raise BadPayload(f"a scale that {name} never makes", why="it is negative, not finite or out of range")
    if symbols.size and symbols.min() < -levels:
        raise BadPayload(f"a symbol outside -{levels}..{levels}")


@dataclass(frozen=True)
class Int8(UniformQuantizer):
    """Sends every value as 8 bits, rounded at random so that the mean is exact, with a scale for each 4096 values.

    Integers from -127 to 127 times max|x|/127 of the bucket. Unbiased (QSGD, Alistarh et al. 2017, with the bucket's
    maximum as norm): the variance is at most scale^2/4 a value. So omega = 4096 / (4 * 127^2) = 0.064 < 1, and feedback
    around it contracts. Rounding draws from a hash of the index: bits depend on the key, not on the order of work.
    """

    examples: ClassVar[tuple[str, ...]] = ("int8",)
    paper: ClassVar[str] = "Alistarh et al. 2017"
    spec: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8

    def kind(self) -> ErrorBound:
        return Unbiased(BUCKET / (4 * self.levels**2))


@dataclass(frozen=True)
class Qsgd(UniformQuantizer):
    """Sends every value as one of 2^b - 1 levels between -scale and scale of its bucket, rounded at random.

    QSGD (Alistarh et al. 2017) with s = 2^(b-1) - 1 levels a side and the bucket's maximum as norm; `qsgd(b, l2)` takes
    its Euclidean norm, as the paper does. Symbols have b bits each. The paper's Elias code is not implemented; `> rice`
    or `> zstd` after it does that work.

    Unbiased: a value's variance is at most (scale/s)^2 / 4. So with the maximum omega = 4096 / (4 s^2), and with the
    Euclidean norm min(4096 / s^2, 64 / s), the paper's bound.

    Inside error feedback it rounds to nearest, ties to even, on the maximum. No error is larger than its value and the
    largest value is exact, so delta is at least 1/4096 for every b, where random rounding would diverge.
    """

    examples: ClassVar[tuple[str, ...]] = ("qsgd(4)", "qsgd(2)", "qsgd(4, l2)", "qsgd(7)", "qsgd(8)")
    paper: ClassVar[str] = "Alistarh et al. 2017"
    width: int = 4
    euclidean: bool = False
    nearest: bool = False

    @classmethod
    def read(cls, argument: str | None) -> Qsgd:
        """Make the codec from its argument: the bits a value, and `l2` for the Euclidean norm."""
        width, comma, norm = (argument or "").partition(",")
        if comma and norm.strip() != "l2":
            raise CodecError(f"qsgd({argument}) is not valid", why="its norm is the maximum, or l2", hint="qsgd(4, l2)")
        try:
            return cls(read_whole("qsgd", width, 2, 8, 4), bool(comma))
        except CodecError as error:
            hint = error.hint.replace(")", ", l2)") if comma else error.hint
            raise CodecError(f"qsgd({argument or ''}) is not valid", why=error.why, hint=hint) from None

    @property
    def spec(self) -> str:
        return f"qsgd({self.width}, l2)" if self.euclidean else f"qsgd({self.width})"

    @property
    def bits(self) -> int:
        return self.width

    def kind(self) -> ErrorBound:
        s = self.levels
        if self.nearest:
            return Contractive(max(1 / BUCKET, 1 - BUCKET / (4 * s * s)))
        return Unbiased(min(BUCKET / s**2, BUCKET**0.5 / s) if self.euclidean else BUCKET / (4 * s * s))

    def under_feedback(self) -> Qsgd:
        """Return the quantizer that rounds to nearest."""
        return replace(self, nearest=True)

    def drawn(self, word: int) -> int | None:
        return None if self.nearest else word

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        if not self.euclidean or self.nearest:
            return super().quantize(values, word)
        scales = self._norms(bucket_sums(values, 2))
        return rounded(values, scales, self.levels, word), scales

    def _encode(
        self, values: Vector, memory: Memory | None, word: int, symbols: NDArray[np.uint8], scales: Scales
    ) -> None:
        if not self.euclidean or self.nearest:
            super()._encode(values, memory, word, symbols, scales)
            return
        assert memory is None, "inside error feedback it rounds to nearest: see `under_feedback`"
        squares = bucket_sums(values, 2)
        if not np.isfinite(squares).all():
            raise NonFiniteUpdate
        scales[:] = self._norms(squares)
        write_rounded(values, scales, self.levels, word, self.bits, symbols)

    def _norms(self, squares: NDArray[np.float64]) -> Vector:
        return usable(np.sqrt(squares) / self.levels, self.levels)


STEPS = 127  # powers of two below a bucket's largest
TOP, BOTTOM = 127, -100  # limits of a bucket's exponent: float32's largest power, and the smallest one that is sent


@dataclass(frozen=True)
class Natural(FusedQuantizer):
    """Sends every value as a signed power of two in 8 bits, rounded up or down at random so that the mean is exact.

    Natural compression (Horvath et al. 2019): omega = 1/8. A symbol counts the powers below the bucket's largest one,
    whose exponent is sent as a byte. A value below 2^-126 of it becomes 0 or that power, with an exact mean too.
    """

    examples: ClassVar[tuple[str, ...]] = ("natural",)
    paper: ClassVar[str] = "Horvath et al. 2019"
    spec: ClassVar[str] = "natural"
    bits: ClassVar[int] = 8
    scales_dtype: ClassVar[np.dtype[Any]] = np.dtype(np.int8)

    def kind(self) -> ErrorBound:
        return Unbiased(1 / 8 + 2.0**-20)

    def _encode(
        self, values: Vector, memory: Memory | None, word: int, symbols: NDArray[np.uint8], scales: Scales
    ) -> None:
        if memory is None:
            _write_powers(values, word, symbols, scales)
            return

        def write(part: Vector, packed: NDArray[np.uint8], own: Scales, first: int) -> Symbols:
            _write_powers(part, word, packed, own, first)
            return packed.view(np.int8)

        encode_in_parts(self, write, values, memory, symbols, scales)

    def add(
        self, symbols: Symbols, scales: Scales, span: slice, word: int, factor: np.float32, adds: bool, into: Vector
    ) -> bool:
        """Add or replace decoded values with a fused kernel, as `FusedQuantizer.add` does."""
        return add_in_parts("natural_add", (symbols, scales), span, factor, adds, into)

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        if self.fused:
            found, exponents = np.empty(values.size, np.int8), np.empty(buckets(values.size), np.int8)
            _write_powers(values, word, found.view(np.uint8), exponents)
            return found, exponents
        largest = maxima(values)
        tops = np.clip(np.frexp(largest)[1], BOTTOM, TOP)  # 2^top is above the largest value: rounding up may reach it
        tops[largest == 0] = BOTTOM
        symbols = np.zeros(values.size, np.int8)
        for start, stop in blocks(values.size):
            place = np.repeat(tops[start // BUCKET : buckets(stop)], BUCKET)[: stop - start]
            symbols[start:stop] = _powers(values[start:stop], place, uniform(start, stop, word))
        return symbols, tops.astype(np.int8)

    def dequantize(self, symbols: Symbols, scales: Scales, span: slice, word: int) -> Vector:
        found = symbols[span].astype(np.int32)
        first = span.start // BUCKET
        tops = np.repeat(scales[first : buckets(span.stop)].astype(np.int32), BUCKET)[span.start - first * BUCKET :]
        values = np.ldexp(np.float32(1), tops[: found.size] - STEPS + np.abs(found)).astype(np.float32)
        values *= np.sign(found)
        return values

    def check(self, symbols: Symbols, scales: Scales) -> None:
        if scales.size and (scales.min() < BOTTOM or scales.max() > TOP):
            raise BadPayload("an exponent that natural never makes", why=f"they lie in {BOTTOM}..{TOP}")
        if symbols.size and symbols.min() < -STEPS:
            raise BadPayload(f"a symbol outside -{STEPS}..{STEPS}")


def _write_powers(values: Vector, word: int, symbols: NDArray[np.uint8], tops: Scales, first: int = 0) -> None:
    """Write symbols and exponents by the kernel; `first` is the index of the first value, which is hashed."""
    t, q = tops.ctypes.data, symbols.ctypes.data
    write_in_parts("natural", values, None, lambda a: (first + a, word, t + a // BUCKET, q + a))


def _powers(values: Vector, tops: NDArray[np.int32], drawn: Vector) -> Symbols:
    """Return the symbols of values, rounded up or down at random.

    The probability of rounding up is the fraction above the power below: u < x / 2^e - 1.
    """
    fraction, exponent = np.frexp(np.abs(values))  # |x| = fraction * 2^exponent, fraction in [0.5, 1)
    up = drawn < fraction * np.float32(2) - np.float32(1)
    steps = exponent - 1 + up - (tops - STEPS)
    # Below the smallest power p a value becomes p with probability x / p, else 0.
    with np.errstate(over="ignore", under="ignore"):
        chance = np.ldexp(np.abs(values), STEPS - 1 - tops)
    steps = np.where(steps < 1, drawn < chance, np.minimum(steps, STEPS))
    steps[values == 0] = 0
    return np.where(np.signbit(values), -steps, steps).astype(np.int8)
