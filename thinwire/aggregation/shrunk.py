"""C / (1 + omega): an unbiased codec made a contraction, for those that have no way of their own inside a residual."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from thinwire.aggregation.around import Around
from thinwire.aggregation.codec import Contractive, Encoded, Kind
from thinwire.aggregation.vectors import require_writable
from thinwire.core.keys import Key
from thinwire.core.layout import Layout
from thinwire.core.types import State, Vector


@dataclass(frozen=True)
class Shrunk(Around):
    """Encodes x / (1 + omega): E||C(y) - x||^2 <= omega / (1 + omega) ||x||^2 with y = x / (1 + omega).

    So delta = 1 / (1 + omega) for any omega, where C itself contracts only under omega = 1.
    Frames are the inner codec's: the decoder need not know.
    """

    omega: float

    @property
    def layout(self) -> Layout:
        return self.inner.layout

    @property
    def kind(self) -> Kind:
        return Contractive(1 / (1 + self.omega))

    def init(self, segment: int = 0) -> State:
        return self.inner.init(segment)

    def encode(self, x: Vector, state: State, key: Key, segment: int = 0) -> Encoded:
        require_writable(x, self.layout.segments[segment].size)
        x *= np.float32(1 / (1 + self.omega))
        return self.inner.encode(x, state, key, segment)
