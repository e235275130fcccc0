"""The streaming weighted mean: each update is added as it comes, so memory does not grow with the clients.

With d_i = change_i / a_i from each client, p_i = examples_i / all examples and staleness discounts s_i:

    change = (sum_j p_j a_j) * sum_i p_i s_i d_i          (FedNova, Wang et al. 2020)

The discount stands in the sum only: a stale update moves the model less, it does not make the others move it more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from thinwire.aggregation.codec import BoundCodec
from thinwire.core.errors import BadPayload
from thinwire.core.layout import Layout
from thinwire.core.types import Payload, Vector

Frames = Callable[[], Iterator[Payload]]


class WeightedMean:
    """A tally of one round. An update is folded wholly or not at all: its frames are checked before one is added."""

    def __init__(self, codec: BoundCodec, layout: Layout) -> None:
        self.codec, self.layout = codec, layout
        self.total: Vector = np.zeros(layout.size, np.float32)
        self.examples = 0
        self.normaliser = 0.0  # sum of examples_j * a_j
        self.count = 0

    def fold(self, frames: Frames, examples: int, discount: float, a: float) -> None:
        """Add one update; `frames` gives them in the order of segments, twice. BadPayload: the tally is as before."""
        segments = self.layout.segments
        found = 0
        for segment, payload in zip(segments, frames(), strict=False):
            self.codec.check(payload, segment.index)
            found += 1
        if found != len(segments):
            raise BadPayload(f"an update of {found} frames", why=f"the model has {len(segments)} segments")
        weight = examples * discount
        for segment, payload in zip(segments, frames(), strict=False):
            self.codec.decode_add(payload, weight, self.total[segment.span], segment=segment.index)
        self.examples += examples
        self.normaliser += examples * a
        self.count += 1

    def close(self) -> Vector | None:
        """The mean change, or None when nothing was folded. The tally's own memory is given away."""
        if self.examples == 0:
            return None
        self.total *= np.float32(self.normaliser / self.examples / self.examples)
        return self.total

    def memory(self, clients: int) -> float:
        """In models, for any number of clients: the sum, and one segment that is being read."""
        return 1.0 + min(1.0, 2**24 / max(1, self.layout.size))
