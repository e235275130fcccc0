"""How good each version is, as the journal says: what answers measured of it, and what that came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from thinwire.core.events import Evaluated
from thinwire.core.types import Metrics


@dataclass
class Scores:
    """`kept`: versions whose measurements wait to be evaluated."""

    kept: int
    measured: dict[int, list[Metrics]] = field(default_factory=dict)  # version -> by answers, until it is evaluated
    evaluated: dict[int, dict[str, float]] = field(default_factory=dict)
    best: Evaluated | None = None
    by_few: set[int] = field(default_factory=set)  # versions that too few measured to go by
    most: int = 0  # clients that measured one version

    def measure(self, head: Mapping[str, Any], newest: int) -> None:
        """What an answer says of a version that is not evaluated yet; `newest`: the model's version meanwhile."""
        version, metrics = int(head.get("base_version", 0)), head.get("metrics", {})
        if version not in self.evaluated and any(name.startswith("eval/") for name in metrics):
            found = {name: (float(total), float(count)) for name, (total, count) in metrics.items()}
            self.measured.setdefault(version, []).append(found)
            self.measured.pop(newest - self.kept, None)

    def evaluate(self, event: Evaluated) -> None:
        self.evaluated[event.version] = event.metrics
        self.measured.pop(event.version, None)
        self.most = max(self.most, event.clients)
        if event.few:
            self.by_few.add(event.version)
        if event.best:
            self.best = event
