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

from thinwire.aggregation.bound import Bound
from thinwire.aggregation.codec import (
    ALL,
    BoundCodec,
    Codec,
    Contractive,
    Encoded,
    Kind,
    ResidualOnly,
    blocks,
    contraction,
    require_finite,
    require_vector,
)
from thinwire.core.errors import CodecError
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
        if isinstance(bound, Bound):
            bound = bound.under_feedback()
        require_contraction(self.spec, bound.kind)
        return BoundFeedback(bound, layout)


def feedback(codec: Codec) -> Feedback:
    """Stand error feedback around a codec.

    >>> from thinwire.aggregation import parse
    >>> bound = feedback(parse("topk(0.5)")).bind(Layout.of({"w": (2,)}))
    >>> bound.encode(np.float32([1, 3]), bound.init(), Key(1)).state["residual"]
    array([1., 0.], dtype=float32)
    """
    return Feedback(codec)


def require_contraction(spec: str, kind: Kind) -> None:
    """CodecError when a residual around this kind would grow from step to step."""
    if not isinstance(kind, ResidualOnly) and contraction(kind) <= 0:
        raise CodecError(
            f"feedback around {spec!r} would diverge",
            why="it is no contraction: what is left over can be larger than what was given",
            hint='[uplink] feedback = "none", or a codec that contracts: int8',
        )


@dataclass(frozen=True)
class BoundFeedback:
    """See `BoundCodec`; `x` becomes the new residual, and nothing of `state` is written to.

    A codec inside that has state of its own keeps it beside the residual; arrays that it does not know are dropped,
    so that a run may switch codecs and lose nothing but the old one's own memory.
    """

    inner: BoundCodec
    layout: Layout

    @property
    def spec(self) -> str:
        return self.inner.spec

    @cached_property
    def kind(self) -> Kind:
        return self.inner.kind if isinstance(self.inner.kind, Contractive) else ResidualOnly()

    def init(self, segment: int = 0) -> State:
        return {**self.inner.init(segment), RESIDUAL: np.zeros(self.layout.segments[segment].size, np.float32)}

    def encode(self, x: Vector, state: State, key: Key, segment: int = 0) -> Encoded:
        require_vector(x, self.layout.segments[segment].size)
        residual = state[RESIDUAL]
        with np.errstate(over="ignore", invalid="ignore"):
            for start, stop in blocks(x.size):
                x[start:stop] += residual[start:stop]
                require_finite(x[start:stop])
        own = {name: state.get(name, fresh).copy() for name, fresh in self.inner.init(segment).items()}
        if isinstance(self.inner, Bound):  # it only reads what it encodes
            encoded = self.inner.encode_finite(x, own, key, segment)
        else:
            encoded = self.inner.encode(x.copy(), own, key, segment)
        self.inner.decode_add(encoded.payload, -1.0, x, segment=segment)
        return Encoded(encoded.payload, {**encoded.state, RESIDUAL: x}, encoded.support)

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
