"""Which devices are there now, and what each of them said about itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from thinwire.core.fleet import Arrival, Hello, NodeJoined, NodeLeft


@dataclass
class Presence:
    """Kept by the service across runs; a run reads it."""

    hellos: dict[str, Hello] = field(default_factory=dict)

    def take(self, arrival: Arrival) -> None:
        if isinstance(arrival, NodeJoined):
            self.hellos[arrival.device] = arrival.hello
        elif isinstance(arrival, NodeLeft):
            self.hellos.pop(arrival.device, None)

    @property
    def devices(self) -> Sequence[str]:
        return sorted(self.hellos)
