"""Uniform quantizers, `int8` and `qsgd`: values as multiples of their bucket's scale, rounded at random or to nearest.

`QuantizerBase` holds what most quantizers have in common: no argument, a float32 scale for each bucket, and symbols of
a byte or less.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from thinwire.compression.base import (
    BUCKET,
    Contractive,
    ErrorBound,
    Role,
    Scales,
    Symbols,
    Unbiased,
    buckets,
    not_finite,
    read_whole,
)
from thinwire.compression.memory import Memory
from thinwire.compression.native import quantize as held_native
from thinwire.compression.native import quantize as native
from thinwire.compression.vector_ops import blocks, bucket_sums, maxima, scaled
from thinwire.core.errors import BadPayload, CodecError
from thinwire.core.prng import uniform
from thinwire.core.types import Vector


@dataclass(frozen=True)
class QuantizerBase:
    """The base class of quantizers that send every value; subclasses override what differs. See `Quantizer`."""

    role: ClassVar[Role] = "quantizer"
    symbols_dtype: ClassVar[np.dtype[Any]] = np.dtype(np.int8)
    scales_dtype: ClassVar[np.dtype[Any]] = np.dtype("<f4")
    seeded: ClassVar[bool] = False
    apart: ClassVar[bool] = True  # see `FusedEncoder`; without meaning if there is no fused kernel

    @classmethod
    def read(cls, argument: str | None) -> Self:
        """Make the quantizer; it has no argument."""
        del argument
        return cls()

    def under_feedback(self) -> Self:
        """Return this quantizer, which has no other form inside error feedback."""
        return self

    def over(self, starts: tuple[int, ...]) -> Self:
        """Return this quantizer: its buckets do not depend on tensors."""
        del starts
        return self

    def scales_count(self, size: int) -> int:
        """Return the number of scales of `size` values."""
        return buckets(size)


@dataclass(frozen=True)
class UniformQuantizer(QuantizerBase, ABC):
    """The base class of uniform quantizers: 2^bits - 1 levels between -max|x| and max|x| of the bucket.

    See `Quantizer` for the methods.
    """

    @property
    @abstractmethod
    def spec(self) -> str:
        """Return the canonical spec."""

    @property
    @abstractmethod
    def bits(self) -> int:
        """Return the bits of a symbol."""

    @property
    def levels(self) -> int:
        """Return the number of levels on either side of 0."""
        return int(2 ** (self.bits - 1) - 1)

    def drawn(self, word: int) -> int | None:
        """Return the seed of stochastic rounding, or None to round to nearest."""
        return word

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        """Return symbols and scales of a float32 vector."""
        return encoded(values, self.levels, self.drawn(word))

    @property
    def writes(self) -> bool:
        """Return True if the active path has a fused encode kernel."""
        return native.levels_checks_finite()

    def write(self, values: Vector, word: int, symbols: NDArray[np.uint8], scales: Scales, first: int = 0) -> None:
        """Write packed symbols and scales into a frame; raise NonFiniteUpdate for NaN and infinity."""
        most = max_scale(self.levels)
        native.levels_write(values, self.levels, most, self.drawn(word), self.bits, symbols, scales, first)

    @property
    def feeds(self) -> bool:
        """Return True if the active path has a fused kernel for error feedback."""
        return self.writes

    def write_held(self, values: Vector, held: Memory, word: int, symbols: NDArray[np.uint8], scales: Scales) -> None:
        """Encode `values` compensated by `held`, and overwrite `values` with the updated memory."""
        most = max_scale(self.levels)
        held_native.levels_write_held(values, held, self.levels, most, self.drawn(word), self.bits, symbols, scales)

    def dequantize(self, symbols: Symbols, scales: Scales, span: slice, word: int) -> Vector:
        """Return the values of the symbols in `span`."""
        return scaled(symbols[span], scales, span.start)

    def add(
        self, symbols: Symbols, scales: Scales, span: slice, word: int, factor: np.float32, adds: bool, into: Vector
    ) -> bool:
        """Add or replace decoded values with a fused kernel, as `FusedDecoder.add` does."""
        return native.levels_add(symbols, scales, span, factor, adds, into)

    def check(self, symbols: Symbols, scales: Scales) -> None:
        """Raise BadPayload for symbols or scales that no encoder makes."""
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


def encoded(values: Vector, levels: int, word: int | None) -> tuple[NDArray[np.int8], Vector]:
    """Return symbols and scales for `levels` levels a side; a scale is the bucket's largest magnitude over `levels`."""
    done = native.levels_encode(values, levels, max_scale(levels), word)
    if done is not None:
        return done
    scales = usable(maxima(values) / np.float32(levels), levels)
    return rounded(values, scales, levels, word), scales


def rounded(values: Vector, scales: Vector, levels: int, word: int | None, first: int = 0) -> NDArray[np.int8]:
    """Return floor(x * (1 / scale) + u), with u from a hash of index and word.

    Without a word, round to nearest, ties to even. `first` is the index of the first value, if the vector is a part of
    another one.
    """
    done = native.levels_round(values, scales, levels, word, first)
    if done is not None:
        return done
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
    symbols = np.empty(values.size, np.int8)
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
    spec: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8

    def kind(self) -> ErrorBound:
        """Return the error bound."""
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

    examples: ClassVar[tuple[str, ...]] = ("qsgd(2)", "qsgd(4)", "qsgd(4, l2)", "qsgd(7)", "qsgd(8)")
    width: int = 4
    euclidean: bool = False
    nearest: bool = False

    @classmethod
    def read(cls, argument: str | None) -> Qsgd:
        """Make the codec from its argument: the bits a value, and `l2` for the Euclidean norm."""
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
        """Return the canonical spec."""
        return f"qsgd({self.width}, l2)" if self.euclidean else f"qsgd({self.width})"

    @property
    def bits(self) -> int:
        """Return the bits of a symbol."""
        return self.width

    def kind(self) -> ErrorBound:
        """Return the error bound."""
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
        """Return symbols and scales of a float32 vector."""
        if not self.euclidean or self.nearest:
            return super().quantize(values, word)
        scales = self._norms(bucket_sums(values, 2))
        return rounded(values, scales, self.levels, word), scales

    def write(self, values: Vector, word: int, symbols: NDArray[np.uint8], scales: Scales, first: int = 0) -> None:
        """Write packed symbols and scales into a frame; raise NonFiniteUpdate for NaN and infinity."""
        if not self.euclidean or self.nearest:
            super().write(values, word, symbols, scales, first)
            return
        squares = bucket_sums(values, 2)
        if not np.isfinite(squares).all():
            raise not_finite()
        scales[:] = self._norms(squares)
        native.levels_write_rounded(values, scales, self.levels, word, self.bits, symbols, first)

    def _norms(self, squares: NDArray[np.float64]) -> Vector:
        return usable(np.sqrt(squares) / self.levels, self.levels)
