"""Error feedback around a whole chain: what was not sent is added to the next update.

r_0 = 0;  p = x + r;  send C(p);  r' = p - decode(C(p))   (Seide et al. 2014; Karimireddy et al. 2019, EF-SGD)

It needs a contraction: with a stochastic quantizer of omega >= 1 the residual grows without bound (qsgd(2) with L2
norms: 4e6 times after 60 steps), so such a chain is refused. The residual depends on the layout only: it survives a
switch of codec between two rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from thinwire.aggregation.codec import (
    ALL,
    BoundCodec,
    Codec,
    Contractive,
    Encoded,
    Kind,
    ResidualOnly,
    Unbiased,
    finite,
    require_vector,
)
from thinwire.core.errors import CodecError, NonFiniteUpdate
from thinwire.core.keys import Key
from thinwire.core.layout import Layout
from thinwire.core.types import Payload, State, Vector

RESIDUAL = "residual"


@dataclass(frozen=True)
class Feedback:
    """A codec whose encoder carries the residual; frames are those of the codec inside."""

    inner: Codec

    @property
    def spec(self) -> str:
        return self.inner.spec

    def bind(self, layout: Layout) -> BoundFeedback:
        bound = self.inner.bind(layout)
        if isinstance(bound.kind, Unbiased) and bound.kind.omega >= 1:
            raise CodecError(
                f"feedback around {self.spec!r} would diverge",
                why=f"it is no contraction: its variance is {bound.kind.omega:.3g} times the vector's square",
                hint='[uplink] feedback = "none", or a codec that contracts: int8',
            )
        return BoundFeedback(bound, layout)


def feedback(codec: Codec) -> Feedback:
    """Stand error feedback around a codec.

    >>> from thinwire.aggregation import parse
    >>> bound = feedback(parse("topk(0.5)")).bind(Layout.of({"w": (2,)}))
    >>> bound.encode(np.float32([1, 3]), bound.init(), Key(1)).state["residual"]
    array([1., 0.], dtype=float32)
    """
    return Feedback(codec)


@dataclass(frozen=True)
class BoundFeedback:
    """See `BoundCodec`; `x` becomes the new residual, the old one is left to its owner when encoding fails."""

    inner: BoundCodec
    layout: Layout

    @property
    def spec(self) -> str:
        return self.inner.spec

    @cached_property
    def kind(self) -> Kind:
        return self.inner.kind if isinstance(self.inner.kind, Contractive) else ResidualOnly()

    def init(self, segment: int = 0) -> State:
        return {RESIDUAL: np.zeros(self.layout.segments[segment].size, np.float32)}

    def encode(self, x: Vector, state: State, key: Key, segment: int = 0) -> Encoded:
        require_vector(x, self.layout.segments[segment].size)
        x += state[RESIDUAL]
        if not finite(x):
            raise NonFiniteUpdate(
                "update and residual add up to infinity", why="training diverged", hint="a smaller lr"
            )
        encoded = self.inner.encode(x, {}, key, segment)  # our chains only read x
        self.inner.decode_add(encoded.payload, -1.0, x, segment=segment)
        return Encoded(encoded.payload, {**state, RESIDUAL: x}, encoded.support)

    def refund(self, payload: Payload, state: State, segment: int = 0) -> State:
        """Take back what was sent and not used: the decoded update goes into the residual, and into nothing else."""
        residual = state[RESIDUAL].copy()
        self.inner.decode_add(payload, 1.0, residual, segment=segment)
        return {**state, RESIDUAL: residual}

    def check(self, payload: Payload, segment: int = 0) -> None:
        self.inner.check(payload, segment)

    def decode_add(self, payload: Payload, weight: float, into: Vector, span: slice = ALL, segment: int = 0) -> None:
        self.inner.decode_add(payload, weight, into, span, segment)

    def decode(self, payload: Payload, segment: int = 0) -> Vector:
        return self.inner.decode(payload, segment)

    def max_bytes(self, segment: int = 0) -> int:
        return self.inner.max_bytes(segment)
