"""A chain that begins with low rank: matrices become factors, and those and all else travel as one vector."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from thinwire.aggregation import frame
from thinwire.aggregation.bound import Bound
from thinwire.aggregation.chain import Chain
from thinwire.aggregation.codec import Everything, Kind, ResidualOnly, Support
from thinwire.aggregation.frame import Stream
from thinwire.aggregation.group import Group
from thinwire.aggregation.held import Held
from thinwire.aggregation.methods.powersgd import MOST, ROOM, PowerSgd
from thinwire.aggregation.product import Product, add_part
from thinwire.aggregation.read import Read
from thinwire.aggregation.vectors import require_finite
from thinwire.core.errors import BadPayload
from thinwire.core.keys import Key
from thinwire.core.layout import Layout, Slice
from thinwire.core.types import State, Vector

WHOLE = Chain()


@dataclass(frozen=True)
class Piece:
    """A tensor, or a slice of one, at `at` of the vector: a matrix, or one row where it is none."""

    name: str
    at: int
    rows: int
    cols: int

    @property
    def stop(self) -> int:
        return self.at + self.rows * self.cols


@dataclass(frozen=True)
class Factored:
    """What travels: all P, then all Q, then all that is sent as it is."""

    values: Vector

    def apart_from(self, x: Vector) -> Factored:
        return self


@dataclass(frozen=True)
class LowRank:
    """As `Chain`: factors pass through `inner`, a cast or nothing, and its coders. The state holds each matrix's Q."""

    step: PowerSgd
    inner: Chain = WHOLE
    pieces: tuple[Piece, ...] = ()

    @property
    def spec(self) -> str:
        inner = self.inner.spec
        return self.step.spec if inner == WHOLE.spec else f"{self.step.spec} > {inner.removeprefix('identity > ')}"

    def bind(self, layout: Layout) -> Bound:
        return Bound(self.spec, layout, [[Group(self.placed(s.slices))] for s in layout.segments])

    def placed(self, slices: Sequence[Slice]) -> LowRank:
        """This chain for a vector in which these slices stand one after the other."""
        pieces, at = list[Piece](), 0
        for piece in slices:
            row = piece.tensor.row if len(piece.tensor.shape) > 1 else 0
            rows = piece.size // row if row and piece.size and piece.size % row == 0 else 1
            pieces.append(Piece(f"{piece.tensor.name}@{piece.start}", at, rows, piece.size // rows))
            at += piece.size
        return replace(self, pieces=tuple(pieces))

    def under_feedback(self) -> LowRank:
        return self

    @property
    def kind(self) -> Kind:
        return ResidualOnly()

    @property
    def looks(self) -> bool:
        return True

    @property
    def writes(self) -> bool:
        return False

    def init(self) -> State:
        return {self._name(piece): self.step.begin(piece.cols) for piece in self._low}

    def _name(self, piece: Piece) -> str:
        return f"{self.step.spec} {piece.name}"

    @cached_property
    def _low(self) -> list[Piece]:
        """The pieces that are sent as factors."""
        return [piece for piece in self.pieces if self._saves(piece)]

    def _saves(self, piece: Piece) -> bool:
        return self.step.saves(piece.rows, piece.cols)

    @cached_property
    def _parts(self) -> list[int]:
        """How many values are in all P, in all Q, and in what is sent as it is, where there are any.

        Each part passes through `inner` by itself: P is of size 1, the others are of the update's.
        """
        rest = sum(piece.rows * piece.cols for piece in self.pieces if not self._saves(piece))
        factors = [self.step.rank * sum(p.rows for p in self._low), self.step.rank * sum(p.cols for p in self._low)]
        return [size for size in (*factors, rest) if size]

    @property
    def apart(self) -> bool:
        """See `Chain.apart`: matrix by matrix, where factors are sent as they are."""
        return self.inner == WHOLE

    def held(self, x: Vector, key: Key, segment: int, bound: bytes, held: Held, state: State) -> bytes:
        """As `Chain.held`; `state` as in `write`."""
        parts = list[Vector | Product]()
        for piece in self.pieces:
            span = slice(piece.at, piece.stop)
            held.before(x, span)
            parts.append(self._part(piece, x[span] if self._saves(piece) else x[span].copy(), state))
            held.after(x, span)
            add_part(parts[-1], piece.at, piece.stop, np.float32(held.weight), True, x[span])
            held.settled(x, span)
        return frame.pack(bound, self._sent(parts, key, segment, 0)[0])

    def write(
        self, x: Vector, key: Key, segment: int, group: int = 0, state: State | None = None
    ) -> tuple[list[Stream], Support, Factored]:
        """As `Chain.write`; `state` has each matrix's Q, and gets the next one's."""
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
    ) -> tuple[list[Stream], list[Read]]:
        products = [part for part in parts if isinstance(part, Product)]
        streams, reads = list[Stream](), list[Read]()
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

    def _decoded_parts(self, reads: Sequence[Read]) -> Vector:
        values: Vector = np.zeros(sum(self._parts), np.float32)
        at = 0
        for part, read in zip(self._parts, reads, strict=True):
            self.inner.add(read, None, values[at : at + part], 0, part)
            at += part
        return values

    def streams(self, size: int) -> int:
        return sum(self.inner.streams(part) for part in self._parts)

    def max_bytes(self, size: int) -> int:
        return sum(self.inner.max_bytes(part) for part in self._parts)

    def read(self, streams: list[Stream], size: int) -> Factored:
        """The factors, checked; nothing of the size of the vector has been allocated but what was sent as it is."""
        rest, reads = iter(streams), list[Read]()
        for part in self._parts:
            reads.append(self.inner.read([next(rest) for _ in range(self.inner.streams(part))], part))
        values = self._decoded_parts(reads)
        end = self.step.rank * sum(piece.rows for piece in self._low)
        stop = end + self.step.rank * sum(piece.cols for piece in self._low)
        if not ((np.abs(values[:end]) <= ROOM).all() and (np.abs(values[end:stop]) <= MOST).all()):
            raise BadPayload(f"a factor that {self.step.spec} never makes", why="it is too large")
        return Factored(values)

    def add(self, read: Factored, weight: float | None, into: Vector, start: int, stop: int, shift: int = 0) -> None:
        """As `Chain.add`: in work proportional to the span."""
        factor, adds = np.float32(1 if weight is None else weight), weight is not None
        for first, last, part in self._decoded(read.values, start, stop):
            add_part(part, first, last, factor, adds, into[first - shift : last - shift])

    def _decoded(self, values: Vector, start: int, stop: int) -> Iterator[tuple[int, int, Vector | Product]]:
        """(from, to, what they are) of start .. stop, tensor by tensor."""
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
