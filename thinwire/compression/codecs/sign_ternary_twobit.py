"""Quantizers of one or two bits a value: `sign`, `ternary` and `twobit`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from thinwire.compression.base import (
    BUCKET,
    Contractive,
    ErrorBound,
    FusedQuantizer,
    NoGuarantee,
    Scales,
    Symbols,
    buckets,
)
from thinwire.compression.codecs import int8_qsgd_natural as levels
from thinwire.compression.codecs import read_number
from thinwire.compression.codecs.pack_zstd import Packed
from thinwire.compression.native import (
    add_in_parts,
    each,
    each_of,
    parts_between,
    require_kernel,
    stored,
)
from thinwire.compression.vector_ops import (
    Memory,
    blocks,
    bucket_sums,
    encode_in_parts,
    maxima,
    rms,
    root_of,
    scaled,
    write_in_parts,
)
from thinwire.core.errors import BadPayload, CodecError, NonFiniteUpdate

if TYPE_CHECKING:
    from thinwire.core.types import Vector


@dataclass(frozen=True)
class Sign(FusedQuantizer):
    """Sends the sign of every value, and for each 4096 values the mean of the positive and of the negative ones.

    1-bit SGD (Seide et al. 2014), whose receiver replaces each side's values by the side's mean. `sign(scaled)` sends
    one mean magnitude instead of two means (Karimireddy et al. 2019). The loss is the variance within a side, so delta
    >= 1/4096 in a bucket; on normal values it is about 0.64. Needs feedback: without it the error is a bias.
    """

    examples: ClassVar[tuple[str, ...]] = ("sign", "sign(scaled)")
    paper: ClassVar[str] = "Seide et al. 2014; Karimireddy et al. 2019"
    bits: ClassVar[int] = 1
    scaled: bool = False

    @classmethod
    def read(cls, argument: str | None) -> Sign:
        """Make the codec from its argument, `scaled` or none."""
        if argument is not None and argument.strip() != "scaled":
            hint = "sign(scaled)" if argument.strip() else "sign"
            raise CodecError(f"sign({argument}) is not valid", why="it sends two means, or one", hint=hint)
        return cls(argument is not None)

    @property
    def spec(self) -> str:
        return "sign(scaled)" if self.scaled else "sign"

    def kind(self) -> ErrorBound:
        return Contractive(1 / BUCKET)

    def scales_count(self, size: int) -> int:
        return buckets(size) * (1 if self.scaled else 2)

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
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

    def _encode(
        self, values: Vector, memory: Memory | None, word: int, symbols: NDArray[np.uint8], scales: Scales
    ) -> None:
        if not self.scaled:
            self._signs(values, memory, symbols, scales)
            return
        if memory is None:
            self._signs(values, None, symbols, np.empty(2 * scales.size, np.float32))
            scales[:] = mean_magnitudes(values)
            return

        def write(part: Vector, packed: NDArray[np.uint8], own: Scales, first: int) -> Symbols:
            del first  # no index is hashed
            self._encode(part, None, word, packed, own)
            return cast("Symbols", Packed(packed, part.size, self.bits))  # as `FusedQuantizer.add` takes them

        encode_in_parts(self, write, values, memory, symbols, scales)

    def _signs(self, values: Vector, memory: Memory | None, symbols: NDArray[np.uint8], means: Vector) -> None:
        """Write a sign bit for each value and two means for each bucket."""
        m, q = means.ctypes.data, symbols.ctypes.data
        write_in_parts("sign", values, memory, lambda a: (m + a // BUCKET * 8, q + a // 8))

    def add(
        self, symbols: Symbols, scales: Scales, span: slice, word: int, factor: np.float32, adds: bool, into: Vector
    ) -> bool:
        """Add or replace decoded values with a fused kernel, as `FusedQuantizer.add` does."""
        means = np.require(self._pairs(scales), np.float32, ["C", "A"])  # those in a frame may begin at any byte
        return add_in_parts("sign_add", (*stored(symbols), means), span, factor, adds, into)

    def _pairs(self, scales: Scales) -> Vector:
        """Return two means for each bucket, of the values that are not negative and of the negative ones."""
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
    """Return the number of values of each bucket."""
    return np.diff(np.minimum(np.arange(buckets(values) + 1) * BUCKET, values))


def mean_magnitudes(values: Vector) -> Vector:
    """Return the mean magnitude of each bucket."""
    return (bucket_sums(values) / sizes(values.size)).astype(np.float32)


SIGMAS = 2.5  # root mean squares at which a tensor is clipped


@dataclass(frozen=True)
class Ternary(FusedQuantizer):
    """Sends every value as -1, 0 or 1 times the largest magnitude of its tensor, clipped at 2.5 sigma, at random.

    TernGrad (Wen et al. 2017): not 0 with probability |x| / scale. Sigma is the root mean square, as if the mean were
    0. Each device has its own scale, while the paper's workers share the largest.

    The mean is exact except for the clip, which keeps the noise small and moves larger values, so there is no bound for
    a single call. The frame repeats the scale for each 4096 values of a tensor. Inside error feedback each of these
    buckets has its own maximum and rounds to nearest, with delta >= 1/4096.
    """

    examples: ClassVar[tuple[str, ...]] = ("ternary",)
    paper: ClassVar[str] = "Wen et al. 2017"
    spec: ClassVar[str] = "ternary"
    bits: ClassVar[int] = 2
    leaves_zeros: ClassVar[bool] = True
    nearest: bool = False
    starts: tuple[int, ...] = (0,)  # offsets of the tensors

    def kind(self) -> ErrorBound:
        return Contractive(1 / BUCKET) if self.nearest else NoGuarantee()

    def under_feedback(self) -> Ternary:
        """Return the quantizer that rounds to nearest, with a maximum for each bucket."""
        return replace(self, nearest=True)

    def restart_scales_at(self, starts: tuple[int, ...]) -> Ternary:
        """Return a quantizer that begins its scales again at each of `starts`."""
        return replace(self, starts=starts)

    def scales_count(self, size: int) -> int:
        return sum(buckets(stop - start) for start, stop, _ in self._tensors(size))

    def _tensors(self, size: int) -> Iterator[tuple[int, int, int]]:
        """Yield (start, stop, index of the first scale) of each tensor."""
        scale = 0
        for start, stop in zip(self.starts, (*self.starts[1:], size), strict=True):
            yield start, stop, scale
            scale += buckets(stop - start)

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        symbols, scales = np.empty(values.size, np.int8), np.empty(self.scales_count(values.size), np.float32)
        if self.fused:
            self._ternary(values, None, word, 8, symbols.view(np.uint8), scales)
            return symbols, scales
        for start, stop, first in self._tensors(values.size):
            tensor = values[start:stop]
            largest = maxima(tensor)
            if not self.nearest and tensor.size:
                largest[:] = min(float(largest.max()), SIGMAS * rms(tensor))
            own = scales[first : first + largest.size] = levels.usable(largest, 1)
            symbols[start:stop] = levels.rounded(tensor, own, 1, None if self.nearest else word, start)
        return symbols, scales

    def _encode(
        self, values: Vector, memory: Memory | None, word: int, symbols: NDArray[np.uint8], scales: Scales
    ) -> None:
        self._ternary(values, memory, word, self.bits, symbols, scales)

    def _ternary(
        self, values: Vector, memory: Memory | None, word: int, bits: int, symbols: NDArray[np.uint8], scales: Scales
    ) -> None:
        """Write symbols of `bits` bits each, and scales, tensor by tensor."""
        edges = np.array([*self.starts, values.size], np.int64)
        firsts = [first for _, _, first in self._tensors(values.size)]  # each tensor's first scale
        x, e, s, q = (array.ctypes.data for array in (values, edges, scales, symbols))
        most, nearest = levels.max_scale(1), self.nearest
        assert nearest or memory is None, "inside error feedback it rounds to nearest: see `under_feedback`"

        def part(a: int, b: int) -> bool:
            at = s + firsts[a] * 4, q + int(edges[a]) * bits // 8
            if memory is None:
                return bool(run(x, e + 8 * a, b - a, SIGMAS, most, nearest, 0 if nearest else word, bits, *at))
            return bool(run(x, memory.vector.ctypes.data, memory.sign, e + 8 * a, b - a, most, bits, *at))

        run = require_kernel("ternary_encode" if memory is None else "ternary_compensate")
        if not all(each_of(parts_between(edges.tolist()), part)):
            raise NonFiniteUpdate

    def add(
        self, symbols: Symbols, scales: Scales, span: slice, word: int, factor: np.float32, adds: bool, into: Vector
    ) -> bool:
        """Add or replace decoded values with a fused kernel, as `FusedQuantizer.add` does."""
        return levels.levels_add(symbols, scales, span, factor, adds, into, self.starts)

    def dequantize(self, symbols: Symbols, scales: Scales, span: slice, word: int) -> Vector:
        out = np.empty(span.stop - span.start, np.float32)
        for start, stop, first in self._tensors(symbols.size):
            a, b = max(start, span.start), min(stop, span.stop)
            if a < b:
                out[a - span.start : b - span.start] = scaled(symbols[a:b], scales[first:], a - start)
        return out

    def check(self, symbols: Symbols, scales: Scales) -> None:
        levels.check(self.spec, symbols, scales, 1)


@dataclass(frozen=True)
class TwoBit(FusedQuantizer):
    """Sends t where a value is at least t, -t where it is at most -t, and 0 elsewhere; t in root mean squares.

    MXNet's 2-bit scheme (Apache MXNet 1.x, `2bit`) after Strom (2015), whose threshold is an absolute number that the
    user has to know; here it is relative to the values. There is no bound for a single call: a value below t waits in
    the residual until it has grown.
    """

    examples: ClassVar[tuple[str, ...]] = ("twobit(1)", "twobit(0.5)")
    paper: ClassVar[str] = "Strom 2015"
    leaves_zeros: ClassVar[bool] = True
    bits: ClassVar[int] = 2
    threshold: Decimal = Decimal(1)

    @classmethod
    def read(cls, argument: str | None) -> TwoBit:
        """Make the codec from its argument, the threshold in root mean squares."""
        return cls(read_number("twobit", argument, Decimal(2), "1"))

    @property
    def spec(self) -> str:
        return f"twobit({self.threshold:f})"

    def kind(self) -> ErrorBound:
        return NoGuarantee()

    def scales_count(self, size: int) -> int:
        return 1 if size else 0

    def quantize(self, values: Vector, word: int) -> tuple[Symbols, Scales]:
        scales = self._scales(rms(values), values.size)
        step = scales[0] if values.size else np.float32(0)
        symbols = (values >= step).astype(np.int8)
        symbols -= values <= -step
        return symbols if step else np.zeros_like(symbols), scales

    def _scales(self, root: float, size: int) -> Vector:
        return levels.usable(np.array([float(self.threshold) * root] if size else []), 1)

    def _encode(
        self, values: Vector, memory: Memory | None, word: int, symbols: NDArray[np.uint8], scales: Scales
    ) -> None:
        x, q, bits = values.ctypes.data, symbols.ctypes.data, self.bits
        root = rms(values) if memory is None else root_of(_squares(values, memory), values.size)
        if not np.isfinite(root):
            raise NonFiniteUpdate
        scales[:] = self._scales(root, values.size)
        if not scales.any():
            symbols[:] = 0
            if memory is not None:
                memory.restart(values)
        elif memory is None:
            run = require_kernel("steps_encode")
            each(0, values.size, lambda a, b: run(x + 4 * a, b - a, scales[0], bits, q + a * bits // 8))
        else:
            write_in_parts("steps", values, memory, lambda a: (scales[0], bits, q + a * bits // 8))

    def add(
        self, symbols: Symbols, scales: Scales, span: slice, word: int, factor: np.float32, adds: bool, into: Vector
    ) -> bool:
        """Add or replace decoded values with a fused kernel, as `FusedQuantizer.add` does."""
        each = np.broadcast_to(scales, buckets(symbols.size))
        return levels.levels_add(symbols, each, span, factor, adds, into)

    def dequantize(self, symbols: Symbols, scales: Scales, span: slice, word: int) -> Vector:
        values: Vector = symbols[span] * scales[0]
        return values

    def check(self, symbols: Symbols, scales: Scales) -> None:
        levels.check(self.spec, symbols, scales, 1)


def _squares(values: Vector, memory: Memory) -> NDArray[np.float64]:
    """Compensate `values` in place by the memory; return the sum of each bucket's squares."""
    run, sums = require_kernel("add_squares"), np.empty(buckets(values.size))
    x, r, to, sign = values.ctypes.data, memory.vector.ctypes.data, sums.ctypes.data, memory.sign
    if not all(each(0, values.size, lambda a, b: run(x + 4 * a, r + 4 * a, sign, b - a, to + a // BUCKET * 8))):
        raise NonFiniteUpdate
    return sums
