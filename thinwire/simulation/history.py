"""What came out of a simulated run, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.core.layout import Layout
from thinwire.core.types import Vector
from thinwire.store import RoundRow, RunRow


@dataclass(frozen=True)
class History:
    """`accuracy[v]`, `loss[v]`: of model version v, from the initial one on, pooled over the clients' test splits."""

    run: RunRow
    rounds: list[RoundRow] = field(repr=False)
    layout: Layout = field(repr=False)
    params: Vector = field(repr=False)

    def metric(self, name: str) -> list[float]:
        """The values of one metric, version by version."""
        measured = [self.run.metrics0, *(row.metrics for row in self.rounds)]
        return [metrics[name] for metrics in measured if name in metrics]

    @property
    def accuracy(self) -> list[float]:
        return self.metric("accuracy")

    @property
    def loss(self) -> list[float]:
        return self.metric("loss")

    @property
    def payload_bytes(self) -> int:
        """Of all updates, upwards."""
        return self.run.payload_up
