"""A bound codec around another one: it differs in what it encodes, and its frames are those of the one inside."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.aggregation.codec import ALL, BoundCodec
from thinwire.core.types import Arrived, Vector


@dataclass(frozen=True)
class Around:
    """What reads a frame: the inner codec's, since a decoder need not know what stood around the encoder."""

    inner: BoundCodec

    @property
    def spec(self) -> str:
        return self.inner.spec

    def check(self, payload: Arrived, segment: int = 0) -> None:
        self.inner.check(payload, segment)

    def decode_add(self, payload: Arrived, weight: float, into: Vector, span: slice = ALL, segment: int = 0) -> None:
        self.inner.decode_add(payload, weight, into, span, segment)

    def decode(self, payload: Arrived, segment: int = 0) -> Vector:
        return self.inner.decode(payload, segment)

    def max_bytes(self, segment: int = 0) -> int:
        return self.inner.max_bytes(segment)
