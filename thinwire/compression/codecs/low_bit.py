"""Quantizers of one or two bits a value: `sign`, `ternary` and `twobit`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from thinwire.compression.base import (
    BUCKET,
    Contractive,
    ErrorBound,
    NoGuarantee,
    Scales,
    Symbols,
    buckets,
    not_finite,
    read_number,
)
from thinwire.compression.codecs import uniform
from thinwire.compression.codecs.uniform import QuantizerBase
from thinwire.compression.memory import Memory
from thinwire.compression.native import kernel
from thinwire.compression.native import quantize as held_native
from thinwire.compression.native import quantize as levels_native
from thinwire.compression.native import quantize as native
from thinwire.compression.vector_ops import blocks, bucket_sums, maxima, rms, root_of, scaled
from thinwire.core.errors import BadPayload, CodecError
from thinwire.core.types import Vector


@dataclass(frozen=True)
class Sign(QuantizerBase):
    """Sends the sign of every value, and for each 4096 values the mean of the positive and of the negative ones.

    1-bit SGD (Seide et al. 2014), whose receiver replaces each side's values by the side's mean. `sign(scaled)` sends
    one mean magnitude instead of two means (Karimireddy et al. 2019). The loss is the variance within a side, so delta
    >= 1/4096 in a bucket; on normal values it is about 0.64. Needs feedback: without it the error is a bias.
    """

    examples: ClassVar[tuple[str, ...]] = ("sign", "sign(scaled)")
    bits: ClassVar[int] = 1
    scaled: bool = False

    @classmethod
    def read(cls, argument: str | None) -> Sign:
        """Make the codec from its argument, `scaled` or none."""
        if argument is not None and argument.strip() != "scaled":
            hint = "sign(scaled)" if argument.strip() else "sign"
            raise CodecError(f"sign({argument}) cannot be", why="it sends two means, or one", hint=hint)
        return cls(argument is not None)

    @property
    def spec(self) -> str:
        """Return the canonical spec."""
        return "sign(scaled)" if self.scaled else "sign"

    def kind(self) -> ErrorBound:
        """Return the error bound."""
        return Contractive(1 / BUCKET)

    def scales_count(self, size: int) -> int:
        """Return the number of scales of `size` values."""
        return buckets(size) * (1 if self.scaled else 2)

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        """Return symbols and scales of a float32 vector."""
        negative = values < 0
        symbols: Symbols = np.negative(negative.view(np.int8))  # 0 or -1: packed in one bit, this is the sign
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
        """Return True if the active path has a fused encode kernel."""
        return kernel("sign_encode") is not None

    def write(self, values: Vector, word: int, symbols: NDArray[np.uint8], scales: Scales, first: int = 0) -> None:
        """Write packed symbols and scales into a frame; raise NonFiniteUpdate for NaN and infinity."""
        means = np.empty(2 * scales.size, np.float32) if self.scaled else scales
        native.sign_write(values, symbols, means)
        if self.scaled:
            scales[:] = mean_magnitudes(values)

    @property
    def feeds(self) -> bool:
        """Return True if the active path has a fused kernel for error feedback."""
        return self.writes and not self.scaled

    def write_held(self, values: Vector, held: Memory, word: int, symbols: NDArray[np.uint8], scales: Scales) -> None:
        """Encode `values` compensated by `held`, and overwrite `values` with the updated memory."""
        held_native.sign_write_held(values, held, symbols, scales)

    def add(
        self, symbols: Symbols, scales: Scales, span: slice, word: int, factor: np.float32, adds: bool, into: Vector
    ) -> bool:
        """Add or replace decoded values with a fused kernel, as `FusedDecoder.add` does."""
        return native.sign_add(symbols, self._pairs(scales), span, factor, adds, into)

    def _pairs(self, scales: Scales) -> Vector:
        """Return two means for each bucket, of the values that are not negative and of the negative ones."""
        return np.repeat(scales, 2) if self.scaled else scales

    def dequantize(self, symbols: Symbols, scales: Scales, span: slice, word: int) -> Vector:
        """Return the values of the symbols in `span`."""
        out = np.empty(span.stop - span.start, np.float32)
        pairs = self._pairs(scales).reshape(-1, 2)
        for start, stop in blocks(span.stop, span.start):
            first = start // BUCKET
            each = np.repeat(pairs[first : buckets(stop)], BUCKET, axis=0)[start - first * BUCKET :][: stop - start]
            negative = symbols[start:stop] < 0
            out[start - span.start : stop - span.start] = np.where(negative, -each[:, 1], each[:, 0])
        return out

    def check(self, symbols: Symbols, scales: Scales) -> None:
        """Raise BadPayload for symbols or scales that no encoder makes."""
        if not (np.isfinite(scales) & (scales >= 0)).all():
            raise BadPayload("a mean that sign never makes", why="it is negative or not finite")


def sizes(values: int) -> NDArray[np.int64]:
    """Return the number of values of each bucket."""
    return np.diff(np.minimum(np.arange(buckets(values) + 1) * BUCKET, values))


def mean_magnitudes(values: Vector) -> Vector:
    """Return the mean magnitude of each bucket."""
    return (bucket_sums(values) / sizes(values.size)).astype(np.float32)


SIGMAS = 2.5  # root mean squares at which a tensor is clipped


@dataclass(frozen=True)
class Ternary(QuantizerBase):
    """Sends every value as -1, 0 or 1 times the largest magnitude of its tensor, clipped at 2.5 sigma, at random.

    TernGrad (Wen et al. 2017): not 0 with probability |x| / scale. Sigma is the root mean square, as if the mean were
    0. Each device has its own scale, while the paper's workers share the largest.

    The mean is exact except for the clip, which keeps the noise small and moves larger values, so there is no bound for
    a single call. The frame repeats the scale for each 4096 values of a tensor. Inside error feedback each of these
    buckets has its own maximum and rounds to nearest, with delta >= 1/4096.
    """

    examples: ClassVar[tuple[str, ...]] = ("ternary",)
    spec: ClassVar[str] = "ternary"
    bits: ClassVar[int] = 2
    apart: ClassVar[bool] = False
    nearest: bool = False
    starts: tuple[int, ...] = (0,)  # offsets of the tensors

    def kind(self) -> ErrorBound:
        """Return the error bound."""
        return Contractive(1 / BUCKET) if self.nearest else NoGuarantee()

    def under_feedback(self) -> Ternary:
        """Return the quantizer that rounds to nearest, with a maximum for each bucket."""
        return replace(self, nearest=True)

    def over(self, starts: tuple[int, ...]) -> Ternary:
        """Return a quantizer that begins its scales again at each of `starts`."""
        return replace(self, starts=starts)

    def scales_count(self, size: int) -> int:
        """Return the number of scales of `size` values."""
        return sum(buckets(stop - start) for start, stop, _ in self._tensors(size))

    def _tensors(self, size: int) -> Iterator[tuple[int, int, int]]:
        """Yield (start, stop, index of the first scale) of each tensor."""
        scale = 0
        for start, stop in zip(self.starts, (*self.starts[1:], size), strict=True):
            yield start, stop, scale
            scale += buckets(stop - start)

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        """Return symbols and scales of a float32 vector."""
        symbols, scales = np.empty(values.size, np.int8), np.empty(self.scales_count(values.size), np.float32)
        if self.writes:
            self._write(values, word, 8, symbols.view(np.uint8), scales)
            return symbols, scales
        for start, stop, first in self._tensors(values.size):
            tensor = values[start:stop]
            largest = maxima(tensor)
            if not self.nearest and tensor.size:
                largest[:] = min(float(largest.max()), SIGMAS * rms(tensor))
            own = scales[first : first + largest.size] = uniform.usable(largest, 1)
            symbols[start:stop] = uniform.rounded(tensor, own, 1, None if self.nearest else word, start)
        return symbols, scales

    @property
    def writes(self) -> bool:
        """Return True if the active path has a fused encode kernel."""
        return levels_native.levels_checks_finite()

    def write(self, values: Vector, word: int, symbols: NDArray[np.uint8], scales: Scales, first: int = 0) -> None:
        """Write packed symbols and scales into a frame; raise NonFiniteUpdate for NaN and infinity."""
        self._write(values, word, self.bits, symbols, scales)

    def _write(self, values: Vector, word: int, bits: int, out: NDArray[np.uint8], scales: Scales) -> None:
        drawn = None if self.nearest else word
        native.ternary_write(values, self.starts, SIGMAS, uniform.max_scale(1), drawn, bits, out, scales)

    @property
    def feeds(self) -> bool:
        """Return True if the active path has a fused kernel for error feedback."""
        return self.writes and self.nearest

    def write_held(self, values: Vector, held: Memory, word: int, symbols: NDArray[np.uint8], scales: Scales) -> None:
        """Encode `values` compensated by `held`, and overwrite `values` with the updated memory."""
        held_native.ternary_write_held(values, held, self.starts, uniform.max_scale(1), self.bits, symbols, scales)

    def add(
        self, symbols: Symbols, scales: Scales, span: slice, word: int, factor: np.float32, adds: bool, into: Vector
    ) -> bool:
        """Add or replace decoded values with a fused kernel, as `FusedDecoder.add` does."""
        return levels_native.levels_add(symbols, scales, span, factor, adds, into, self.starts)

    def dequantize(self, symbols: Symbols, scales: Scales, span: slice, word: int) -> Vector:
        """Return the values of the symbols in `span`."""
        out = np.empty(span.stop - span.start, np.float32)
        for start, stop, first in self._tensors(symbols.size):
            a, b = max(start, span.start), min(stop, span.stop)
            if a < b:
                out[a - span.start : b - span.start] = scaled(symbols[a:b], scales[first:], a - start)
        return out

    def check(self, symbols: Symbols, scales: Scales) -> None:
        """Raise BadPayload for symbols or scales that no encoder makes."""
        uniform.check(self.spec, symbols, scales, 1)


@dataclass(frozen=True)
class TwoBit(QuantizerBase):
    """Sends t where a value is at least t, -t where it is at most -t, and 0 elsewhere; t in root mean squares.

    MXNet's 2-bit scheme (Apache MXNet 1.x, `2bit`) after Strom (2015), whose threshold is an absolute number that the
    user has to know; here it is relative to the values. There is no bound for a single call: a value below t waits in
    the residual until it has grown.
    """

    examples: ClassVar[tuple[str, ...]] = ("twobit(1)", "twobit(0.5)")
    bits: ClassVar[int] = 2
    apart: ClassVar[bool] = False
    threshold: Decimal = Decimal(1)

    @classmethod
    def read(cls, argument: str | None) -> TwoBit:
        """Make the codec from its argument, the threshold in root mean squares."""
        return cls(read_number("twobit", argument, Decimal(2), "1"))

    @property
    def spec(self) -> str:
        """Return the canonical spec."""
        return f"twobit({self.threshold:f})"

    def kind(self) -> ErrorBound:
        """Return the error bound."""
        return NoGuarantee()

    def scales_count(self, size: int) -> int:
        """Return the number of scales of `size` values."""
        return 1 if size else 0

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        """Return symbols and scales of a float32 vector."""
        scales = self._scales(rms(values), values.size)
        step = scales[0] if values.size else np.float32(0)
        symbols = (values >= step).astype(np.int8)
        symbols -= values <= -step
        return symbols if step else np.zeros_like(symbols), scales

    def _scales(self, root: float, size: int) -> Vector:
        return uniform.usable(np.array([float(self.threshold) * root] if size else []), 1)

    @property
    def writes(self) -> bool:
        """Return True if the active path has a fused encode kernel."""
        return levels_native.levels_checks_finite()

    def write(self, values: Vector, word: int, symbols: NDArray[np.uint8], scales: Scales, first: int = 0) -> None:
        """Write packed symbols and scales into a frame; raise NonFiniteUpdate for NaN and infinity."""
        root = rms(values)
        if not np.isfinite(root):
            raise not_finite()
        scales[:] = self._scales(root, values.size)
        if scales.any():
            native.steps_write(values, scales[0], self.bits, symbols)
        else:
            symbols[:] = 0

    @property
    def feeds(self) -> bool:
        """Return True if the active path has a fused kernel for error feedback."""
        return self.writes

    def write_held(self, values: Vector, held: Memory, word: int, symbols: NDArray[np.uint8], scales: Scales) -> None:
        """Encode `values` compensated by `held`, and overwrite `values` with the updated memory."""
        scales[:] = self._scales(root_of(held_native.squares_held(values, held), values.size), values.size)
        if scales.any():
            held_native.steps_write_held(values, held, scales[0], self.bits, symbols)
        else:
            symbols[:] = 0
            held.after(values)

    def add(
        self, symbols: Symbols, scales: Scales, span: slice, word: int, factor: np.float32, adds: bool, into: Vector
    ) -> bool:
        """Add or replace decoded values with a fused kernel, as `FusedDecoder.add` does."""
        each = np.broadcast_to(scales, buckets(symbols.size))
        return levels_native.levels_add(symbols, each, span, factor, adds, into)

    def dequantize(self, symbols: Symbols, scales: Scales, span: slice, word: int) -> Vector:
        """Return the values of the symbols in `span`."""
        values: Vector = symbols[span] * scales[0]
        return values

    def check(self, symbols: Symbols, scales: Scales) -> None:
        """Raise BadPayload for symbols or scales that no encoder makes."""
        uniform.check(self.spec, symbols, scales, 1)
