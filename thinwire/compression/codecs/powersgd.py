"""Low-rank compression (`powersgd`): matrices become thin factors, which travel with all other values as one vector.

`LowRank` is the codec of a chain that begins with a low rank. `PowerSgd` is its stage: one step of the power method for
each matrix. `Product` adds a matrix that is known by its factors to a vector in part, without multiplying it out as a
whole.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from thinwire.compression import frame
from thinwire.compression.base import BLOCK, ErrorBound, Everything, NoGuarantee, Role, Step, Support
from thinwire.compression.chain import Chain, SegmentedCodec, TensorGroup
from thinwire.compression.codecs import read_whole
from thinwire.compression.codecs.identity_fp16_bf16 import Identity
from thinwire.compression.frame import DecodedStreams, Stream
from thinwire.compression.native import add_in_parts
from thinwire.compression.vector_ops import Memory, maxima, require_finite, write_scaled
from thinwire.core.errors import BadPayload, NonFiniteUpdate
from thinwire.core.prng import Key, lowbias32
from thinwire.core.types import Vector

if TYPE_CHECKING:
    from thinwire.core.layout import Layout, Slice
    from thinwire.core.types import State

WHOLE = Chain(Identity())


@dataclass(frozen=True)
class Piece:
    """A tensor, or a slice of one, at offset `at` of the vector: a matrix, or a single row if it is none."""

    name: str
    at: int
    rows: int
    cols: int

    @property
    def stop(self) -> int:
        """Return the offset behind the piece."""
        return self.at + self.rows * self.cols


@dataclass(frozen=True)
class Factored:
    """The values that travel: all P, then all Q, then all values that are sent as they are."""

    values: Vector

    def apart_from(self, x: Vector) -> Factored:
        """Return this object: it never shares memory with `x`."""
        return self


@dataclass(frozen=True)
class LowRank:
    """A chain that begins with a low rank, with the methods of `Chain`. Its state holds each matrix's Q.

    Factors pass through `inner`: a cast or nothing, and coders.
    """

    step: PowerSgd
    inner: Chain = WHOLE
    pieces: tuple[Piece, ...] = ()

    @property
    def spec(self) -> str:
        """Return the canonical spec."""
        inner = self.inner.spec
        return self.step.spec if inner == WHOLE.spec else f"{self.step.spec} > {inner.removeprefix('identity > ')}"

    def bind(self, layout: Layout) -> SegmentedCodec:
        """Return this codec for the segments of a layout, with all tensors of a segment in one group."""
        return SegmentedCodec(self.spec, layout, [[TensorGroup(self.placed(s.slices))] for s in layout.segments])

    def placed(self, slices: Sequence[Slice]) -> LowRank:
        """Return this chain for a vector that holds these slices of tensors one after the other."""
        pieces, at = list[Piece](), 0
        for piece in slices:
            row = piece.tensor.row if len(piece.tensor.shape) > 1 else 0
            rows = piece.size // row if row and piece.size and piece.size % row == 0 else 1
            pieces.append(Piece(f"{piece.tensor.name}@{piece.start}", at, rows, piece.size // rows))
            at += piece.size
        return replace(self, pieces=tuple(pieces))

    def under_feedback(self) -> LowRank:
        """Return this codec: it encodes inside error feedback in the same way."""
        return self

    @property
    def kind(self) -> ErrorBound:
        """Return `NoGuarantee`: there is no bound for a single call."""
        return NoGuarantee()

    @property
    def rejects_non_finite(self) -> bool:
        """Return True: factoring a matrix finds NaN and infinity."""
        return True

    def init(self) -> State:
        """Return the first Q of each matrix."""
        return {self._name(piece): self.step.begin(piece.cols) for piece in self._low}

    def _name(self, piece: Piece) -> str:
        return f"{self.step.spec} {piece.name}"

    @cached_property
    def _low(self) -> list[Piece]:
        """Return the pieces that are sent as factors."""
        return [piece for piece in self.pieces if self._saves(piece)]

    def _saves(self, piece: Piece) -> bool:
        return self.step.saves(piece.rows, piece.cols)

    @cached_property
    def _parts(self) -> list[int]:
        """Return the number of values in all P, in all Q, and in the rest, without those that are 0.

        Each part passes through `inner` separately: P has entries of size 1, the others of the update's size.
        """
        rest = sum(piece.rows * piece.cols for piece in self.pieces if not self._saves(piece))
        factors = [self.step.rank * sum(p.rows for p in self._low), self.step.rank * sum(p.cols for p in self._low)]
        return [size for size in (*factors, rest) if size]

    def encode_fused(
        self, x: Vector, memory: Memory | None, state: State, key: Key, segment: int, bound: bytes
    ) -> bytes | None:
        """Return the frame of `x`, matrix by matrix, if factors are sent as they are; see `Chain.encode_fused`."""
        if self.inner != WHOLE:
            return None
        parts = list[Vector | Product]()
        for piece in self.pieces:
            span = slice(piece.at, piece.stop)
            if memory is None:
                parts.append(self._part(piece, x[span], state))
                continue
            memory.compensate(x, span)
            parts.append(self._part(piece, x[span] if self._saves(piece) else x[span].copy(), state))
            memory.restart(x, span)
            add_part(parts[-1], piece.at, piece.stop, np.float32(memory.weight), True, x[span])
            memory.require_finite(x, span)
        return frame.pack(bound, self._sent(parts, key, segment, 0)[0])

    def write(
        self, x: Vector, key: Key, segment: int, group: int = 0, state: State | None = None
    ) -> tuple[list[Stream], Support, Factored]:
        """Encode one vector as `Chain.write` does; read each matrix's Q in `state` and replace it by the next one."""
        known: State = {} if state is None else state
        parts = [self._part(piece, x[piece.at : piece.stop], known) for piece in self.pieces]
        streams, reads = self._sent(parts, key, segment, group)
        return streams, Everything.SENT, Factored(self._decoded_parts(reads))

    def _part(self, piece: Piece, values: Vector, state: State) -> Vector | Product:
        if not self._saves(piece):
            require_finite(values)
            return values
        before = state.get(self._name(piece))
        first = self.step.begin(piece.cols) if before is None else before
        left, right = self.step.factors(values.reshape(piece.rows, piece.cols), first)
        state[self._name(piece)] = self.step.warm(right)
        return Product(self.step, piece.at, left, np.ascontiguousarray(right.T))

    def _sent(
        self, parts: Sequence[Vector | Product], key: Key, segment: int, group: int
    ) -> tuple[list[Stream], list[DecodedStreams]]:
        products = [part for part in parts if isinstance(part, Product)]
        streams, reads = list[Stream](), list[DecodedStreams]()
        for part in (
            [product.left.reshape(-1) for product in products],
            [product.turned.T.reshape(-1) for product in products],
            [part for part in parts if not isinstance(part, Product)],
        ):
            if sum(values.size for values in part):
                written, _, read = self.inner.write(np.concatenate(part), key, segment, group)
                streams += written
                reads.append(read)
        return streams, reads

    def _decoded_parts(self, reads: Sequence[DecodedStreams]) -> Vector:
        values: Vector = np.zeros(sum(self._parts), np.float32)
        at = 0
        for part, read in zip(self._parts, reads, strict=True):
            self.inner.add(read, None, values[at : at + part], 0, part)
            at += part
        return values

    def streams(self, size: int) -> int:
        """Return the number of streams of a vector of `size`."""
        return sum(self.inner.streams(part) for part in self._parts)

    def max_bytes(self, size: int) -> int:
        """Return the largest number of bytes of the streams of a vector of `size`."""
        return sum(self.inner.max_bytes(part) for part in self._parts)

    def read(self, streams: list[Stream], size: int) -> Factored:
        """Return the checked factors; raise BadPayload if an entry is too large.

        Only the values that are sent as they are have been allocated at their full size.
        """
        rest, reads = iter(streams), list[DecodedStreams]()
        for part in self._parts:
            reads.append(self.inner.read([next(rest) for _ in range(self.inner.streams(part))], part))
        values = self._decoded_parts(reads)
        end = self.step.rank * sum(piece.rows for piece in self._low)
        stop = end + self.step.rank * sum(piece.cols for piece in self._low)
        if not ((np.abs(values[:end]) <= ROOM).all() and (np.abs(values[end:stop]) <= MAX_FACTOR).all()):
            raise BadPayload(f"a factor that {self.step.spec} never makes", why="it is too large")
        return Factored(values)

    def add(self, read: Factored, weight: float | None, into: Vector, start: int, stop: int, shift: int = 0) -> None:
        """Add the decoded values in start .. stop to `into`, as `Chain.add` does, in work proportional to the span."""
        factor, adds = np.float32(1 if weight is None else weight), weight is not None
        for first, last, part in self._decoded(read.values, start, stop):
            add_part(part, first, last, factor, adds, into[first - shift : last - shift])

    def _decoded(self, values: Vector, start: int, stop: int) -> Iterator[tuple[int, int, Vector | Product]]:
        """Yield (first, last, decoded part) of start .. stop, tensor by tensor."""
        rank = self.step.rank
        left_at, right_at = 0, rank * sum(piece.rows for piece in self._low)
        dense_at = right_at + rank * sum(piece.cols for piece in self._low)
        for piece in self.pieces:
            first, last = max(start, piece.at), min(stop, piece.stop)
            if not self._saves(piece):
                if first < last:
                    yield first, last, values[dense_at + first - piece.at : dense_at + last - piece.at]
                dense_at += piece.rows * piece.cols
                continue
            left = values[left_at : left_at + rank * piece.rows].reshape(piece.rows, rank)
            right = values[right_at : right_at + rank * piece.cols].reshape(piece.cols, rank)
            left_at, right_at = left_at + left.size, right_at + right.size
            if first < last:
                yield first, last, Product(self.step, piece.at, left, np.ascontiguousarray(right.T))


@dataclass(frozen=True)
class Product:
    """A matrix at offset `at` of the vector, as its factors; `turned` is Q transposed."""

    step: PowerSgd
    at: int
    left: Matrix
    turned: Matrix

    def added(self, first: int, last: int, factor: np.float32, adds: bool, into: Vector) -> bool:
        """Write the vector's first .. last times `factor` to `into` with a kernel, as `FusedQuantizer.add` does."""
        rank, cols = self.turned.shape
        span = slice(first - self.at, last - self.at)
        return add_in_parts("lowrank_add", (self.left, self.turned, cols, rank), span, factor, adds, into)

    def blocks(self, first: int, last: int) -> Iterator[tuple[int, Vector]]:
        """Yield (offset from `first`, values) of the vector's first .. last, some rows at a time."""
        cols = self.turned.shape[1]
        rows = max(1, BLOCK // cols)
        for row in range((first - self.at) // cols, -(-(last - self.at) // cols), rows):
            at = self.at + row * cols
            block = self.step.product(self.left[row : row + rows], self.turned.T)
            a, b = max(first, at), min(last, at + block.size)
            yield a - first, block[a - at : b - at]


def add_part(part: Vector | Product, first: int, last: int, factor: np.float32, adds: bool, into: Vector) -> None:
    """Write the vector's first .. last times `factor` to into[0 ..], added if `adds`, else in place of its values.

    `part` holds these values: a `Product` that contains them, or the values themselves.
    """
    if isinstance(part, Product) and part.added(first, last, factor, adds, into):
        return
    for at, values in part.blocks(first, last) if isinstance(part, Product) else [(0, part)]:
        write_scaled(values, factor, adds, into, slice(at, at + values.size))


Matrix = NDArray[np.float32]
MAX_RANK = 32
MAX_FACTOR = np.float32(2.0**120)  # largest entry of Q: the sum of 32 products with entries of at most ROOM is finite
ROOM = np.float32(1.01)  # the largest entry of P: at most 1 in an orthonormal column, plus rounding
DEPENDENT = 1e-6  # a column that keeps less than this share of its norm is rounding error (float32 has 6e-8)


@dataclass(frozen=True)
class PowerSgd(Step):
    """Sends P and Q for each matrix: P = orthonormal(M Q_before), Q = M^T P, and P Q^T is decoded.

    PowerSGD (Vogels et al. 2019): a warm start from the last call's Q makes a single power step enough. There all
    workers average P, then Q, in the middle of a step, and have one subspace together. Here each device has its own,
    and the products are averaged.

    A tensor is a matrix of its first dimension by all others; one on which two factors save nothing is sent as it is.
    There is no bound for a single call, so it needs feedback. BLAS computes the factors, so their bits depend on the
    machine: this codec never carries the downlink. The decoded values are the same everywhere.
    """

    role: ClassVar[Role] = "lowrank"
    examples: ClassVar[tuple[str, ...]] = ("powersgd(4)", "powersgd(2) > fp16 > zstd")
    paper: ClassVar[str] = "Vogels et al. 2019"
    rank: int

    @classmethod
    def read(cls, argument: str | None) -> PowerSgd:
        """Make the stage from its argument, the rank."""
        return cls(read_whole("powersgd", argument, 1, MAX_RANK, 4))

    @property
    def spec(self) -> str:
        return f"powersgd({self.rank})"

    def saves(self, rows: int, cols: int) -> bool:
        """Return True if two factors are smaller than the matrix.

        >>> PowerSgd(4).saves(64, 64), PowerSgd(4).saves(8, 8), PowerSgd(4).saves(1, 1000)
        (True, False, False)
        """
        return (rows + cols) * self.rank < rows * cols

    def begin(self, cols: int) -> Matrix:
        """Return the first Q, from a hash: any matrix will do that has a part in every direction."""
        return _drawn(cols, self.rank).copy()

    def factors(self, matrix: Matrix, before: Matrix) -> tuple[Matrix, Matrix]:
        """Return (P, Q) of a matrix; P is orthonormal, except for columns of zeros if the matrix has a lower rank.

        Raise NonFiniteUpdate for NaN and infinity, which the search for the largest value finds.
        """
        largest = maxima(matrix.reshape(-1)).max()
        if not np.isfinite(largest):
            raise NonFiniteUpdate
        down = np.float32(2.0 ** -np.clip(np.frexp(largest)[1], -120, 120))  # so that no product overflows
        left = orthonormal(matrix @ np.asfortranarray(before * down))
        with np.errstate(over="ignore", invalid="ignore"):
            right = (left.T @ matrix).T  # not matrix.T @ left: here BLAS reads the rows in memory order
            if not float(largest) * matrix.shape[0] <= MAX_FACTOR:
                right = np.clip(np.nan_to_num(right, nan=0.0), -MAX_FACTOR, MAX_FACTOR)
        return left, right

    def warm(self, right: Matrix) -> Matrix:
        """Return the next call's Q_before: this Q with columns of norm 1.

        A column of norm 0 becomes that of the first Q.
        """
        wide = right.astype(np.float64)
        norms = np.sqrt(np.einsum("ij,ij->j", wide, wide))
        found = (wide / np.where(norms > 0, norms, 1)).astype(np.float32, order="C")
        if not norms.all():
            found[:, norms == 0] = self.begin(right.shape[0])[:, norms == 0]
        return found

    def product(self, left: Matrix, right: Matrix) -> Vector:
        """Return P Q^T row by row, summed term by term, so that its bits are the same on every machine."""
        out = left[:, :1] * right[:, 0]
        for k in range(1, self.rank):
            out += left[:, k : k + 1] * right[:, k]
        flat: Vector = out.reshape(-1)
        return flat


@functools.cache
def _drawn(cols: int, rank: int) -> Matrix:
    drawn = lowbias32(np.arange(1, cols * rank + 1, dtype=np.uint32)) >> np.uint32(8)
    first: Matrix = (drawn.astype(np.float32) * np.float32(2.0**-23) - np.float32(1)).reshape(cols, rank)
    return first


def orthonormal(columns: Matrix) -> Matrix:
    """Return the columns made orthonormal by Gram-Schmidt, twice; a column that depends on earlier ones becomes 0.

    >>> orthonormal(np.float32([[3, 0], [4, 0]])).tolist() == np.float32([[0.6, 0], [0.8, 0]]).tolist()
    True
    """
    done = columns.T.astype(np.float64, order="C")  # columns are rows here, so that their values are contiguous
    for k, column in enumerate(done):
        norm = math.sqrt(column @ column)
        for _ in range(2 if k else 0):
            column -= (done[:k] @ column) @ done[:k]
        left = math.sqrt(column @ column) if k else norm
        column *= 1 / left if left > DEPENDENT * norm else 0
    return done.T.astype(np.float32, order="C")
