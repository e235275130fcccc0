"""Devices whose model has a normed layer: what they say of its statistics is theirs to choose."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tests.support.server_bench import every
from thinwire.aggregation import encode_buffers
from thinwire.core import Layout, Tensor
from thinwire.core.fleet import Delivery
from thinwire.core.types import Part, Reply, ReplyHeader
from thinwire.simulation import Behavior, ScriptedDevice, SyntheticUpdates

NORMED = Layout.build(
    [
        Tensor("w", (40,)),
        Tensor("bn.running_mean", (3,), "float32", "buffer"),
        Tensor("bn.running_var", (3,), "float32", "buffer"),
        Tensor("bn.num_batches_tracked", (), "int64", "buffer"),
    ]
)


@dataclass
class Normed(SyntheticUpdates):
    """Sends these statistics and counters behind its frames."""

    mean: float = 0.5
    variance: float = 1.0
    counters: Mapping[str, int] = field(default_factory=lambda: {"bn.num_batches_tracked": 7})

    def finish(self, delivery: Delivery, behavior: Behavior) -> tuple[Reply, bytes]:
        header, body = super().finish(delivery, behavior)
        if not isinstance(header, ReplyHeader) or not header.parts:
            return header, body
        sent = encode_buffers(NORMED, np.array([self.mean] * 3 + [self.variance] * 3, np.float32))
        part = Part("buffers", len(sent), hashlib.sha256(sent).hexdigest())
        return replace(header, parts=(*header.parts, part), counters=dict(self.counters)), body + sent


def normed(name: str, change: float = 1.0, at: float = 1.0, **said: object) -> ScriptedDevice:
    """One that says this of its statistics, after so many seconds."""
    return ScriptedDevice(name, Normed(name, NORMED, change, **said), every(at))  # type: ignore[arg-type]  # tests vary them


def three_honest() -> Sequence[ScriptedDevice]:
    return [normed("b", at=2.0), normed("c", at=3.0), normed("d", at=4.0)]
