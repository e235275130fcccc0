"""A codec bound to a layout: each segment's tensors in groups of one chain each, all streams in one frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, cast

import numpy as np

from thinwire.compression import frame
from thinwire.compression.base import (
    ALL,
    Contractive,
    Encoded,
    Everything,
    Kind,
    ResidualOnly,
    Support,
    Unbiased,
    contraction,
)
from thinwire.compression.frame import Stream
from thinwire.compression.memory import Held
from thinwire.compression.vector_ops import require_finite, require_vector, require_writable, spanned
from thinwire.core.errors import BadPayload
from thinwire.core.layout import Layout
from thinwire.core.prng import Key
from thinwire.core.types import Arrived, State, Vector


@dataclass(frozen=True)
class Bound:
    """See `BoundCodec`. Its state is what its chains remember: of most it is empty."""

    spec: str
    layout: Layout
    groups: Sequence[Sequence[Group]]  # of each segment

    @cached_property
    def kind(self) -> Kind:
        """Of all groups together: parts of a vector contract as the weakest of them does."""
        kinds = [group.chain.kind for groups in self.groups for group in groups]
        if any(isinstance(kind, ResidualOnly) for kind in kinds):
            return ResidualOnly()
        unbiased = [kind.omega for kind in kinds if isinstance(kind, Unbiased)]
        if unbiased and len(unbiased) == len(kinds):
            return Unbiased(max(unbiased))
        return Contractive(min((contraction(kind) for kind in kinds), default=1.0))

    @cached_property
    def _hashes(self) -> list[bytes]:
        return [frame.codec_hash(self.spec, self.layout.digest, s.index) for s in self.layout.segments]

    def _size(self, segment: int) -> int:
        return self.layout.segments[segment].size

    def under_feedback(self) -> Bound:
        """The same codec inside a residual: its frames are read alike, and its kind is what the residual needs."""
        return replace(self, groups=[[replace(g, chain=g.chain.under_feedback()) for g in gs] for gs in self.groups])

    def init(self, segment: int = 0) -> State:
        return {name: array for group in self.groups[segment] for name, array in group.chain.init().items()}

    def encode(self, x: Vector, state: State, key: Key, segment: int = 0) -> Encoded:
        """Only reads `x`."""
        require_vector(x, self._size(segment))
        if not self._writes(segment) and not all(group.chain.looks for group in self.groups[segment]):
            require_finite(x)
        return self.encode_finite(x, state, key, segment)

    def encode_finite(self, x: Vector, state: State, key: Key, segment: int = 0) -> Encoded:
        """The same for a vector that was looked at already."""
        if self._writes(segment):
            payload = cast("Straight", self.groups[segment][0].chain).written(x, key, segment, self._hashes[segment])
            return Encoded(payload, state, Everything.SENT)
        return self._encoded(x, state, key, segment)[0]

    def encode_held(self, x: Vector, held: Held, state: State, key: Key, segment: int = 0) -> Encoded:
        """Encode x with what is held, and x becomes what is to be held; nothing is read back from the frame."""
        require_writable(x, self._size(segment))
        require_vector(held.vector, self._size(segment))  # a kernel has its address alone, too
        if self._whole(segment) and (chain := self.groups[segment][0].chain).apart:
            state = dict(state)
            return Encoded(chain.held(x, key, segment, self._hashes[segment], held, state), state, Everything.SENT)
        if self._writes(segment):
            held.before(x)
            encoded = self.encode_finite(x, state, key, segment)
            read = self._read(encoded.payload, segment)
        else:
            held.before(x)
            encoded, found = self._encoded(x, state, key, segment)
            read = [(group, part.apart_from(x)) for group, part in found]
        held.after(x)
        self._add(read, held.weight, x, 0, x.size)
        held.settled(x, encoded.support)
        return encoded

    def _encoded(self, x: Vector, state: State, key: Key, segment: int) -> tuple[Encoded, list[tuple[Group, Any]]]:
        """A frame, and what `_read` finds in it."""
        streams, supports, reads, state = [], list[Support](), [], dict(state)
        for number, group in enumerate(self.groups[segment]):
            written, support, read = group.chain.write(group.gather(x), key, segment, number, state)
            streams += written
            reads.append((group, read))
            if group.pieces:
                places = group.places()
                support = places if support is Everything.SENT else places[support]
            supports.append(support)
        return Encoded(frame.pack(self._hashes[segment], streams), state, _joined(supports)), reads

    def _whole(self, segment: int) -> bool:
        (group, *others) = self.groups[segment]
        return not others and not group.pieces

    def _writes(self, segment: int) -> bool:
        return self._whole(segment) and self.groups[segment][0].chain.writes

    def _read(self, payload: Arrived, segment: int) -> list[tuple[Group, Any]]:
        size, groups = self._size(segment), self.groups[segment]
        counts = [group.chain.streams(group.size(size)) for group in groups]
        if len(payload) > self.max_bytes(segment):
            raise BadPayload(f"a frame of {len(payload)} bytes", why=f"at most {self.max_bytes(segment)} can be right")
        streams = iter(frame.unpack(payload, self._hashes[segment], sum(counts)))
        return [
            (group, group.chain.read([next(streams) for _ in range(count)], group.size(size)))
            for group, count in zip(groups, counts, strict=True)
        ]

    def check(self, payload: Arrived, segment: int = 0) -> None:
        self._read(payload, segment)

    def decode_add(self, payload: Arrived, weight: float, into: Vector, span: slice = ALL, segment: int = 0) -> None:
        start, stop = spanned(span, self._size(segment))
        require_writable(into, self._size(segment))
        self._add(self._read(payload, segment), weight, into, start, stop)

    def decode(self, payload: Arrived, segment: int = 0) -> Vector:
        """Bit for bit what was encoded, where nothing is lost: a -0 added to a 0 would not be."""
        read = self._read(payload, segment)
        out: Vector = np.zeros(self._size(segment), np.float32)
        self._add(read, None, out, 0, out.size)
        return out

    def _add(self, read: list[tuple[Group, Any]], weight: float | None, into: Vector, start: int, stop: int) -> None:
        with np.errstate(over="ignore", invalid="ignore"):  # a sum that overflows is found where the sum is used
            for group, found in read:
                if not group.pieces:
                    group.chain.add(found, weight, into, start, stop)
                    continue
                at = 0
                for piece in group.pieces:
                    # The group's own coordinates at .. at + length are the segment's piece.start .. piece.stop.
                    first, last = at + max(start, piece.start) - piece.start, at + min(stop, piece.stop) - piece.start
                    if first < last:
                        group.chain.add(found, weight, into[piece.start : piece.stop], first, last, shift=at)
                    at += piece.stop - piece.start

    def max_bytes(self, segment: int = 0) -> int:
        size = self._size(segment)
        groups = [(group.chain, group.size(size)) for group in self.groups[segment]]
        further = sum(chain.streams(n) for chain, n in groups) - 1
        return frame.MAX_OVERHEAD + 4 * further + sum(chain.max_bytes(n) for chain, n in groups)


def _joined(supports: list[Support]) -> Support:
    """What all groups sent together; groups divide the segment among them."""
    indices = [support for support in supports if not isinstance(support, Everything)]
    if len(indices) < len(supports):
        return Everything.SENT
    return indices[0] if len(indices) == 1 else np.sort(np.concatenate(indices))


# The parts of a segment that are encoded together, and what does it.


class VectorCodec(Protocol):
    """One vector to its streams and back: a `Chain`, or `LowRank`, which say what each of these does."""

    @property
    def kind(self) -> Kind: ...

    @property
    def looks(self) -> bool: ...

    @property
    def writes(self) -> bool: ...

    @property
    def apart(self) -> bool: ...

    def under_feedback(self) -> VectorCodec: ...

    def init(self) -> State: ...

    def streams(self, size: int) -> int: ...

    def max_bytes(self, size: int) -> int: ...

    def write(
        self, x: Vector, key: Key, segment: int, group: int = 0, state: State | None = None
    ) -> tuple[list[Stream], Support, Any]: ...

    def held(self, x: Vector, key: Key, segment: int, bound: bytes, held: Held, state: State) -> bytes: ...

    def read(self, streams: list[Stream], size: int) -> Any: ...

    def add(self, read: Any, weight: float | None, into: Vector, start: int, stop: int, shift: int = 0) -> None: ...


class Straight(VectorCodec, Protocol):
    """One that `writes`: a kernel makes the whole frame."""

    def written(self, x: Vector, key: Key, segment: int, bound: bytes) -> bytes: ...


@dataclass(frozen=True)
class Group:
    """The parts of a segment that one chain works on, put together; no pieces: the whole segment as it is."""

    chain: VectorCodec
    pieces: tuple[slice, ...] = ()

    def size(self, whole: int) -> int:
        return sum(p.stop - p.start for p in self.pieces) if self.pieces else whole

    def gather(self, x: Vector) -> Vector:
        return np.concatenate([x[piece] for piece in self.pieces]) if self.pieces else x

    def places(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Where each element of the gathered vector stands in the segment."""
        return np.concatenate([np.arange(p.start, p.stop, dtype=np.int64) for p in self.pieces])
