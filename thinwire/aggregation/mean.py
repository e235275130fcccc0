"""The streaming weighted mean: each update is added as it comes, so memory does not grow with the clients.

With d_i = change_i / a_i from each client, p_i = examples_i / all examples and staleness discounts s_i:

    change = (sum_j p_j a_j) * sum_i p_i s_i d_i          (FedNova, Wang et al. 2020)

The discount stands in the sum only: a stale update moves the model less, it does not make the others move it more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy

import numpy as np

from thinwire.aggregation.codec import BoundCodec
from thinwire.core.errors import BadPayload, DataLost
from thinwire.core.layout import SEGMENT_FLOATS, Layout
from thinwire.core.types import Arrived, Vector

Frames = Callable[[], Iterator[Arrived]]


class WeightedMean:
    """A tally of one round. An update is folded wholly or not at all: its frames are checked before one is added."""

    def __init__(self, codec: BoundCodec, layout: Layout) -> None:
        self.codec, self.layout = codec, layout
        self.total: Vector = np.zeros(layout.size, np.float32)
        self.examples = 0
        self.normaliser = 0.0  # sum of examples_j * a_j
        self.count = 0

    def fold(self, frames: Frames, examples: int, discount: float, a: float) -> None:
        """Add one update; `frames` gives them in the order of segments, each time. BadPayload changes nothing."""
        if not (examples > 0 and discount >= 0 and a > 0 and np.isfinite([examples, discount, a]).all()):
            raise BadPayload(f"an update of {examples} examples, a = {a}", why="both are finite and above 0")
        weight = examples * discount
        *others, last = self.layout.segments
        payload = self._last(frames)
        # It is checked before it is added, and was the only one that is not checked yet: a model of one segment is
        # read once.
        self.codec.decode_add(payload, weight, self.total[last.span], segment=last.index)
        try:
            for segment, payload in zip(others, frames(), strict=False):
                self.codec.decode_add(payload, weight, self.total[segment.span], segment=segment.index)
        except (
            BadPayload
        ) as error:  # they were whole a moment ago, and now the sum is half changed: no such update is dropped
            raise DataLost("an update changed while it was added", why=str(error)) from error
        self.examples += examples
        self.normaliser += examples * a
        self.count += 1

    def _last(self, frames: Frames) -> Arrived:
        """The last segment's frame; BadPayload unless there is one for each, and all before it are whole and legal."""
        segments, found = self.layout.segments, 0
        payload: Arrived = b""
        for found, payload in enumerate(frames(), 1):
            if found < len(segments):
                self.codec.check(payload, found - 1)
        if found != len(segments):
            raise BadPayload(f"an update of {found} frames", why=f"the model has {len(segments)} segments")
        return payload

    def copy(self) -> WeightedMean:
        """The same tally, which goes on by itself."""
        made = copy(self)
        made.total = self.total.copy()
        return made

    def close(self) -> Vector | None:
        """The mean change, or None when nothing was folded. The tally's own memory is given away."""
        if self.examples == 0:
            return None
        self.total *= np.float32(self.normaliser / self.examples / self.examples)
        return self.total

    def memory(self, clients: int) -> float:
        """In models, for any number of clients: the sum, and one segment that is being read."""
        del clients
        return 1.0 + min(1.0, SEGMENT_FLOATS / max(1, self.layout.size))
