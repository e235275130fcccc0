"""Error feedback around a whole chain: what was not sent is added to the next update.

r_0 = 0;  p = x + r;  send C(p);  r' = p - decode(C(p))   (Seide et al. 2014; Karimireddy et al. 2019, EF-SGD)

It needs a contraction: with a stochastic quantizer of omega >= 1 the residual grows without bound (qsgd(2) with L2
norms: 4e6 times after 60 steps), so such a chain is refused. The residual depends on the layout only: it survives a
switch of codec between two rounds.

With momentum m, for one-step gradients only, what is accumulated is not x but its velocity (momentum correction, Lin
et al. 2018, "Deep gradient compression"):

u = m u + x;  p = u + r;  send C(p);  r' = p - decode(C(p));  masked: u = 0 where it was sent
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.aggregation.around import Around
from thinwire.aggregation.bound import Bound
from thinwire.aggregation.codec import (
    BoundCodec,
    Codec,
    Contractive,
    Encoded,
    Everything,
    Kind,
    ResidualOnly,
    Unbiased,
    contraction,
)
from thinwire.aggregation.held import Held
from thinwire.aggregation.shrunk import Shrunk
from thinwire.aggregation.vectors import require_vector, require_writable
from thinwire.core.errors import CodecError
from thinwire.core.keys import Key
from thinwire.core.layout import Layout
from thinwire.core.types import Payload, State, Vector

RESIDUAL = "residual"
MOMENTUM = "momentum"


@dataclass(frozen=True)
class Feedback:
    """A codec whose encoder carries the residual; frames are those of the codec inside."""

    inner: Codec
    momentum: float = 0.0
    masked: bool = False

    @property
    def spec(self) -> str:
        return self.inner.spec

    def bind(self, layout: Layout) -> BoundFeedback:
        bound = inside(self.inner, layout)
        require_contraction(self.spec, bound.kind)
        return BoundFeedback(bound, layout, self.momentum, self.masked)


def feedback(codec: Codec, momentum: float = 0.0, masked: bool = False) -> Feedback:
    """Stand error feedback around a codec; with `momentum` for gradients of one step, `masked` where they were sent.

    >>> from thinwire.aggregation import parse
    >>> bound = feedback(parse("topk(0.5)")).bind(Layout.of({"w": (2,)}))
    >>> bound.encode(np.float32([1, 3]), bound.init(), Key(1)).state["residual"]
    array([1., 0.], dtype=float32)
    """
    if not 0 <= momentum < 1:
        raise CodecError(f"feedback with a momentum of {momentum}", why="it is at least 0 and under 1")
    return Feedback(codec, momentum, masked)


def inside(codec: Codec, layout: Layout) -> BoundCodec:
    """A codec as it encodes inside a residual: its own way where it has one, else C / (1 + omega).

    A chain of `parse` knows that of its quantizer; a codec that is no chain is `Shrunk` as a whole.
    """
    bound = codec.bind(layout)
    if isinstance(bound, Bound):
        return bound.under_feedback()
    if isinstance(bound.kind, Unbiased) and bound.kind.omega > 0:
        return Shrunk(bound, bound.kind.omega)
    return bound


def require_contraction(spec: str, kind: Kind) -> None:
    """CodecError when a residual around this kind would grow from step to step."""
    if not isinstance(kind, ResidualOnly) and contraction(kind) <= 0:
        raise CodecError(
            f"feedback around {spec!r} would diverge",
            why="it is no contraction: what is left over can be larger than what was given",
            hint='[uplink] feedback = "none", or a codec that contracts: int8',
        )


@dataclass(frozen=True)
class BoundFeedback(Around):
    """See `BoundCodec`; `x` becomes the new residual, and nothing of `state` is written to.

    A codec inside that has state of its own keeps it beside the residual; arrays that it does not know are dropped,
    so that a run may switch codecs and lose nothing but the old one's own memory.
    """

    layout: Layout
    momentum: float = 0.0
    masked: bool = False

    @cached_property
    def kind(self) -> Kind:
        return self.inner.kind if isinstance(self.inner.kind, Contractive) else ResidualOnly()

    def init(self, segment: int = 0) -> State:
        size = self.layout.segments[segment].size
        own = [RESIDUAL, MOMENTUM] if self.momentum else [RESIDUAL]
        return {**self.inner.init(segment), **{name: np.zeros(size, np.float32) for name in own}}

    def aged(self, state: State, decay: float, rounds: int) -> State:
        """The state `rounds` after its last encode: of the residual decay^rounds is left, one round being the least."""
        if decay == 1 or RESIDUAL not in state:
            return state
        return {**state, RESIDUAL: state[RESIDUAL] * np.float32(decay ** max(1, rounds))}

    def encode(self, x: Vector, state: State, key: Key, segment: int = 0) -> Encoded:
        require_writable(x, self.layout.segments[segment].size)
        kept = {MOMENTUM: self._velocity(x, state)} if self.momentum else {}
        encoded = encode_held(self.inner, x, Held(state[RESIDUAL], 1.0), state, key, segment)
        if self.masked and self.momentum:
            sent = slice(None) if isinstance(encoded.support, Everything) else encoded.support
            kept[MOMENTUM][sent] = 0
        return Encoded(encoded.payload, {**encoded.state, **kept, RESIDUAL: x}, encoded.support)

    def _velocity(self, x: Vector, state: State) -> Vector:
        """U' = m u + x, which also takes x's place."""
        velocity: Vector = np.zeros_like(x)
        if (held := state.get(MOMENTUM)) is not None:
            require_vector(held, x.size)
            np.multiply(held, np.float32(self.momentum), out=velocity)
        with np.errstate(over="ignore", invalid="ignore"):
            velocity += x
        x[:] = velocity
        return velocity

    def refund(self, payload: Payload, state: State, segment: int = 0) -> State:
        """Take back what was sent and not used: the decoded update goes into the residual, and into nothing else."""
        residual = state[RESIDUAL].copy()
        self.inner.decode_add(payload, 1.0, residual, segment=segment)
        return {**state, RESIDUAL: residual}


def encode_held(inner: BoundCodec, x: Vector, held: Held, state: State, key: Key, segment: int) -> Encoded:
    """Encode x with what is held, and x becomes what is to be held: the codec's own way, or with a copy of x."""
    own = carried(inner, state, segment)
    if isinstance(inner, Bound):
        return inner.encode_held(x, held, own, key, segment)
    held.before(x)
    encoded = inner.encode(x.copy(), own, key, segment)
    held.after(x)
    inner.decode_add(encoded.payload, held.weight, x, segment=segment)
    held.settled(x)
    return encoded


def carried(inner: BoundCodec, state: State, segment: int) -> State:
    """Of an earlier encode's arrays those that a codec knows, by name and size; the others begin anew."""
    own = dict[str, NDArray[Any]]()
    for name, fresh in inner.init(segment).items():
        held = state.get(name, fresh)
        own[name] = (held if held.shape == fresh.shape and held.dtype == fresh.dtype else fresh).copy()
    return own
