"""EF21: not the update travels but its difference to a reference that both ends advance by what was sent.

g_0 = 0;  send c = C(x - g);  g' = g + decode(c)                        (Richtarik, Sokolov and Fatkhullin 2021)

Nothing that was left out is ever added to a later update: a residual under classic feedback can grow with the step
size, the difference to g shrinks wherever updates settle. The paper's server keeps one g a client; here it keeps only
their weighted sum, which moves by the sum of what was decoded (server/model/shares.py), so decoders remember nothing.
That sum is right while every c counts exactly once with the same weight: a dropped one is taken back on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from thinwire.aggregation.around import Around
from thinwire.aggregation.codec import Codec, Contractive, Encoded, Kind, ResidualOnly
from thinwire.aggregation.feedback import encode_held, inside, require_contraction
from thinwire.aggregation.held import Held
from thinwire.aggregation.vectors import require_writable
from thinwire.core.errors import CodecError
from thinwire.core.keys import Key
from thinwire.core.layout import Layout
from thinwire.core.types import Payload, State, Vector

REFERENCE = "reference"


@dataclass(frozen=True)
class Ef21:
    """A codec that sends differences; its frames are those of the codec inside."""

    inner: Codec

    @property
    def spec(self) -> str:
        return self.inner.spec

    def bind(self, layout: Layout) -> BoundEf21:
        bound = inside(self.inner, layout)
        if isinstance(bound.kind, ResidualOnly):
            raise CodecError(
                f"ef21 around {self.spec!r} need not come to rest",
                why="each call has to contract, and this codec promises nothing of one call",
                hint='[uplink] feedback = "classic"',
            )
        require_contraction(self.spec, bound.kind)
        return BoundEf21(bound, layout)


def ef21(codec: Codec) -> Ef21:
    """Send differences to a reference.

    >>> from thinwire.aggregation import parse
    >>> bound = ef21(parse("topk(0.5)")).bind(Layout.of({"w": (2,)}))
    >>> state = bound.encode(np.float32([1, 3]), bound.init(), Key(1)).state
    >>> bound.encode(np.float32([1, 3]), state, Key(2)).state["reference"]
    array([1., 3.], dtype=float32)
    """
    return Ef21(codec)


@dataclass(frozen=True)
class BoundEf21(Around):
    """See `BoundCodec`; what a frame decodes to is a step of the reference, and `x` becomes the new one.

    Law: ||x - g'||^2 <= (1 - delta) ||x - g||^2. A refund takes such a step back. The reference depends on the layout
    only: it survives a switch of codec.
    """

    layout: Layout

    @property
    def kind(self) -> Kind:
        return self.inner.kind if isinstance(self.inner.kind, Contractive) else ResidualOnly()

    def init(self, segment: int = 0) -> State:
        return {**self.inner.init(segment), REFERENCE: np.zeros(self.layout.segments[segment].size, np.float32)}

    def encode(self, x: Vector, state: State, key: Key, segment: int = 0) -> Encoded:
        require_writable(x, self.layout.segments[segment].size)
        encoded = encode_held(self.inner, x, Held(state[REFERENCE], -1.0), state, key, segment)
        return Encoded(encoded.payload, {**encoded.state, REFERENCE: x}, encoded.support)

    def refund(self, payload: Payload, state: State, segment: int = 0) -> State:
        """Take a step of the reference back: it was not used."""
        reference = state[REFERENCE].copy()
        self.inner.decode_add(payload, -1.0, reference, segment=segment)
        return {**state, REFERENCE: reference}
