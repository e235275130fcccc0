"""Buffers that are not trained: running means and variances, and counters.

Means are averaged by weight; a variance by the law of total variance, with the mean beside it; integers by maximum.
They travel as one half-precision frame (with a scale a bucket), and their bytes are counted like all others.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from thinwire.aggregation.bound import Bound
from thinwire.aggregation.parse import parse
from thinwire.core.errors import BadPayload
from thinwire.core.keys import Key
from thinwire.core.layout import Layout, Tensor
from thinwire.core.types import Arrived, Payload, Vector

MEAN, VARIANCE = "running_mean", "running_var"


def float_buffers(layout: Layout) -> tuple[Tensor, ...]:
    """The buffers that are averaged, in their order: one flat float32 vector."""
    return tuple(t for t in layout.buffers if t.dtype.startswith(("float", "bfloat")))


def counters(layout: Layout) -> tuple[Tensor, ...]:
    """Integer buffers of one element: they travel as plain numbers."""
    return tuple(t for t in layout.buffers if not t.dtype.startswith(("float", "bfloat")) and t.size == 1)


def buffer_layout(layout: Layout) -> Layout:
    """The averaged buffers as a layout of their own."""
    return Layout.of({t.name: t.shape for t in float_buffers(layout)})


def buffer_codec(layout: Layout, spec: str = "fp16") -> Bound:
    return parse(spec).bind(buffer_layout(layout))


def encode_buffers(layout: Layout, values: Vector) -> Payload:
    """One frame of all averaged buffers (they must fit into one segment of 64 MiB)."""
    codec = buffer_codec(layout)
    return codec.encode(np.ascontiguousarray(values, np.float32), codec.init(), Key(0)).payload


class BufferMean:
    """The weighted mean of clients' buffers."""

    def __init__(self, layout: Layout) -> None:
        self.layout = buffer_layout(layout)
        self.codec = buffer_codec(layout)
        self.counted = {t.name for t in counters(layout)}
        self.total = np.zeros(self.layout.size)
        self.squares = np.zeros(self.layout.size)  # of the means, where variances stand
        self.weight = 0.0
        self.counters: dict[str, int] = {}
        self._pairs = list(self._variances())

    def _variances(self) -> list[tuple[slice, slice]]:
        """(variance, its mean) as places in the flat vector."""
        places = {t.name: slice(t.offset, t.offset + t.size) for t in self.layout.trained}
        named = {name: name.removesuffix(VARIANCE) + MEAN for name in places if name.endswith(VARIANCE)}
        return [(places[var], places[mean]) for var, mean in named.items() if mean in places]

    def check(self, payload: Arrived) -> None:
        """BadPayload when it is not these buffers."""
        if not self.layout.size:
            raise BadPayload("buffers of a model that has none")
        self.codec.check(payload)

    def fold(self, payload: Arrived, weight: float) -> None:
        values = self.codec.decode(payload).astype(np.float64)
        self.total += weight * values
        for variance, mean in self._pairs:
            self.squares[variance] += weight * values[mean] ** 2
        self.weight += weight

    def count(self, seen: Mapping[str, int]) -> None:
        """Integer buffers: the largest value counts; names that the model does not have are ignored."""
        for name, value in seen.items():
            if name in self.counted:
                self.counters[name] = max(value, self.counters.get(name, value))

    def close(self, before: Vector) -> Vector:
        """The mean; `before` where nothing was folded. Var = E[var + mean^2] - E[mean]^2."""
        if self.weight == 0:
            return before
        mean = self.total / self.weight
        for variance, place in self._pairs:
            spread = self.squares[variance] / self.weight - mean[place] ** 2
            mean[variance] += np.maximum(spread, 0)
        return mean.astype(np.float32)
