"""The parts of a segment that are encoded together, and what does it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from thinwire.aggregation.codec import Kind, Support
from thinwire.aggregation.frame import Stream
from thinwire.aggregation.held import Held
from thinwire.core.keys import Key
from thinwire.core.types import State, Vector


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
