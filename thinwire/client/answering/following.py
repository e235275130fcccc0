"""What a device does for SCAFFOLD or FedDyn around its training: a correction before it, a second sum after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from thinwire.aggregation.algorithms import Algorithm, followed
from thinwire.aggregation.feedback import inside
from thinwire.aggregation.parse import parse

if TYPE_CHECKING:
    from thinwire.core.keys import Key
    from thinwire.core.layout import Layout
    from thinwire.core.types import Payload, Vector


@dataclass(frozen=True)
class Following:
    """What SCAFFOLD or FedDyn needs for one ask: `own`, the sum of what was sent until now, and `common`, the mean of
    all devices' that came with the ask; None where `own` is not in it yet, or where none came.

    Law: `own` moves by what its frames decode to, which is what the aggregator adds: both ends know it whatever the
    codec leaves out, and that is a part of the next difference.
    """

    algorithm: Algorithm
    layout: Layout  # of what travels
    own: Vector
    common: Vector | None

    @classmethod
    def of(cls, algorithm: Algorithm, layout: Layout, own: Vector | None, params: Vector, counted: bool) -> Following:
        """`own` None: nothing was sent yet. `params` is what came. `counted`: whether this device is in the mean there;
        one without it may have in it who was shut out.
        """
        own = np.zeros(layout.model_size, np.float32) if own is None else own
        given = algorithm.control and counted
        return cls(algorithm, layout, own, params[layout.model_size :] if given else None)

    @property
    def shift(self) -> Vector:
        return self.algorithm.shift(self.own, self.common)

    def differences(self, change: Vector, spec: str, key: Key) -> list[Payload]:
        """The frames behind the model's, where there are any, of a change that is divided by its normaliser."""
        if (wanted := self.algorithm.wanted(self.own, self.common, change)) is None:
            return []
        wanted -= self.own
        codec, start = inside(parse(spec), self.layout), self.layout.model_size
        return [
            codec.encode(wanted[s.start - start : s.stop - start], codec.init(s.index), key, s.index).payload
            for s in self.layout.control_segments
        ]

    def moved(self, frames: list[Payload], spec: str) -> Vector:
        """The sum with an update's frames in it."""
        made, segments, codec = self.own.copy(), followed(self.algorithm, self.layout), parse(spec).bind(self.layout)
        start = segments[0].start
        for s in segments:
            codec.decode_add(frames[s.index], 1.0, made[s.start - start : s.stop - start], segment=s.index)
        return made
