"""Which devices are there now, and what each of them said about itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from thinwire.core.fleet import Arrival, Hello, NodeJoined, NodeLeft


@dataclass
class Presence:
    """Kept by the service across runs; a run reads it."""

    hellos: dict[str, Hello] = field(default_factory=dict)
    joined: int = 0  # how often a device said hello
    _last: dict[str, Hello] = field(default_factory=dict)  # also of those that have left

    def take(self, arrival: Arrival) -> bool:
        """Whether a device came that says something else than the last time: only then may its answer be another."""
        if isinstance(arrival, NodeLeft):
            self.hellos.pop(arrival.device, None)
        if not isinstance(arrival, NodeJoined):
            return False
        self.hellos[arrival.device] = arrival.hello
        self.joined += 1
        has = replace(arrival.hello.has, free_bytes=None)
        said = replace(arrival.hello, link={}, holds=(), plans=(), has=has)  # what says nothing about what it can do
        before, self._last[arrival.device] = self._last.get(arrival.device), said
        return said != before

    @property
    def devices(self) -> Sequence[str]:
        return sorted(self.hellos)
