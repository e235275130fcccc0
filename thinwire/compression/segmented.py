"""A codec bound to a layout: the tensors of each segment in groups, one chain a group, all streams in one frame."""

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
    ErrorBound,
    Everything,
    NoGuarantee,
    Support,
    Unbiased,
    contraction,
)
from thinwire.compression.frame import Stream
from thinwire.compression.memory import Memory
from thinwire.compression.vector_ops import require_finite, require_vector, require_writable, spanned
from thinwire.core.errors import BadPayload
from thinwire.core.layout import Layout
from thinwire.core.prng import Key
from thinwire.core.types import Arrived, State, Vector


@dataclass(frozen=True)
class SegmentedCodec:
    """A bound codec of chains; see `BoundCodec`. Its state is the state of its chains, which is empty for most."""

    spec: str
    layout: Layout
    groups: Sequence[Sequence[TensorGroup]]  # the groups of each segment

    @cached_property
    def kind(self) -> ErrorBound:
        """Return the error bound of all groups together; parts of a vector contract as the weakest of them does."""
        kinds = [group.chain.kind for groups in self.groups for group in groups]
        if any(isinstance(kind, NoGuarantee) for kind in kinds):
            return NoGuarantee()
        unbiased = [kind.omega for kind in kinds if isinstance(kind, Unbiased)]
        if unbiased and len(unbiased) == len(kinds):
            return Unbiased(max(unbiased))
        return Contractive(min((contraction(kind) for kind in kinds), default=1.0))

    @cached_property
    def _hashes(self) -> list[bytes]:
        return [frame.codec_hash(self.spec, self.layout.digest, s.index) for s in self.layout.segments]

    def _size(self, segment: int) -> int:
        return self.layout.segments[segment].size

    def under_feedback(self) -> SegmentedCodec:
        """Return the codec that encodes inside error feedback. Its frames have the same format."""
        return replace(self, groups=[[replace(g, chain=g.chain.under_feedback()) for g in gs] for gs in self.groups])

    def init(self, segment: int = 0) -> State:
        """Return the first state of a segment."""
        return {name: array for group in self.groups[segment] for name, array in group.chain.init().items()}

    def encode(self, x: Vector, state: State, key: Key, segment: int = 0) -> Encoded:
        """Encode a segment without changing `x`; see `BoundCodec.encode`."""
        require_vector(x, self._size(segment))
        if not self._writes(segment) and not all(group.chain.looks for group in self.groups[segment]):
            require_finite(x)
        return self.encode_finite(x, state, key, segment)

    def encode_finite(self, x: Vector, state: State, key: Key, segment: int = 0) -> Encoded:
        """Encode a segment of which the caller knows that all values are finite."""
        if self._writes(segment):
            payload = cast("Straight", self.groups[segment][0].chain).written(x, key, segment, self._hashes[segment])
            return Encoded(payload, state, Everything.SENT)
        return self._encoded(x, state, key, segment)[0]

    def encode_held(self, x: Vector, held: Memory, state: State, key: Key, segment: int = 0) -> Encoded:
        """Encode `x` compensated by `held`, and overwrite `x` with the updated memory.

        It does not decode the finished frame, except for a chain that `writes` but is not `apart`.
        """
        require_writable(x, self._size(segment))
        require_vector(held.vector, self._size(segment))  # a kernel gets only its address
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

    def _encoded(
        self, x: Vector, state: State, key: Key, segment: int
    ) -> tuple[Encoded, list[tuple[TensorGroup, Any]]]:
        """Return a frame, and the content that `_read` would find in it."""
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

    def _read(self, payload: Arrived, segment: int) -> list[tuple[TensorGroup, Any]]:
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
        """Raise BadPayload unless the payload is a legal frame of this segment."""
        self._read(payload, segment)

    def decode_add(self, payload: Arrived, weight: float, into: Vector, span: slice = ALL, segment: int = 0) -> None:
        """Add `weight` times the decoded values in `span` to `into`; see `BoundCodec.decode_add`."""
        start, stop = spanned(span, self._size(segment))
        require_writable(into, self._size(segment))
        self._add(self._read(payload, segment), weight, into, start, stop)

    def decode(self, payload: Arrived, segment: int = 0) -> Vector:
        """Return the decoded segment.

        A lossless codec returns the bits that were encoded. Adding to zeros would not: -0 + 0 is 0.
        """
        read = self._read(payload, segment)
        out: Vector = np.zeros(self._size(segment), np.float32)
        self._add(read, None, out, 0, out.size)
        return out

    def _add(
        self, read: list[tuple[TensorGroup, Any]], weight: float | None, into: Vector, start: int, stop: int
    ) -> None:
        with np.errstate(over="ignore", invalid="ignore"):  # the user of the sum checks for overflow
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
        """Return the largest size of a legal frame, in bytes."""
        size = self._size(segment)
        groups = [(group.chain, group.size(size)) for group in self.groups[segment]]
        further = sum(chain.streams(n) for chain, n in groups) - 1
        return frame.MAX_OVERHEAD + 4 * further + sum(chain.max_bytes(n) for chain, n in groups)


def _joined(supports: list[Support]) -> Support:
    """Return the support of all groups of a segment, which divide its coordinates among them."""
    indices = [support for support in supports if not isinstance(support, Everything)]
    if len(indices) < len(supports):
        return Everything.SENT
    return indices[0] if len(indices) == 1 else np.sort(np.concatenate(indices))


class VectorCodec(Protocol):
    """Encodes one vector as streams and decodes them: a `Chain`, or `LowRank`."""

    @property
    def kind(self) -> ErrorBound:
        """Return the error bound."""

    @property
    def looks(self) -> bool:
        """Return True if `write` itself raises NonFiniteUpdate for NaN and infinity."""

    @property
    def writes(self) -> bool:
        """Return True if a fused kernel writes the frame from the vector."""

    @property
    def apart(self) -> bool:
        """Return True if parts of a vector can be encoded separately, so that `held` is available."""

    def under_feedback(self) -> VectorCodec:
        """Return the codec that encodes inside error feedback."""

    def init(self) -> State:
        """Return the first state."""

    def streams(self, size: int) -> int:
        """Return the number of streams of a vector of `size`."""

    def max_bytes(self, size: int) -> int:
        """Return the largest number of bytes of the streams of a vector of `size`."""

    def write(
        self, x: Vector, key: Key, segment: int, group: int = 0, state: State | None = None
    ) -> tuple[list[Stream], Support, Any]:
        """Return the streams of `x`, its support, and the content that `read` would find in the streams."""

    def held(self, x: Vector, key: Key, segment: int, bound: bytes, held: Memory, state: State) -> bytes:
        """Return the frame of `x` compensated by `held`, and overwrite `x` with the updated memory."""

    def read(self, streams: list[Stream], size: int) -> Any:
        """Decode the streams without dequantizing; raise BadPayload before anything else happens."""

    def add(self, read: Any, weight: float | None, into: Vector, start: int, stop: int, shift: int = 0) -> None:
        """Add the decoded values in start .. stop to `into`; see `DecodedStreams.add`."""


class Straight(VectorCodec, Protocol):
    """A vector codec with a fused kernel that makes the whole frame (`writes` is True)."""

    def written(self, x: Vector, key: Key, segment: int, bound: bytes) -> bytes:
        """Return the frame of one vector."""


@dataclass(frozen=True)
class TensorGroup:
    """The parts of a segment that one chain encodes together. No `pieces` means the whole segment as it is."""

    chain: VectorCodec
    pieces: tuple[slice, ...] = ()

    def size(self, whole: int) -> int:
        """Return the number of values of the group in a segment of `whole` values."""
        return sum(p.stop - p.start for p in self.pieces) if self.pieces else whole

    def gather(self, x: Vector) -> Vector:
        """Return the group's values of a segment as one vector; a copy if there are pieces."""
        return np.concatenate([x[piece] for piece in self.pieces]) if self.pieces else x

    def places(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the index within the segment of each element of the gathered vector."""
        return np.concatenate([np.arange(p.start, p.stop, dtype=np.int64) for p in self.pieces])
