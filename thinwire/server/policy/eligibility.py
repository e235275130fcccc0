"""Which devices are there now, and what each of them said about itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from thinwire.core.fleet import Arrival, Hello, NodeJoined, NodeLeft
from thinwire.core.formatting import counted
from thinwire.core.plan_schema import Requires
from thinwire.core.types import GIB, Equipment

DIGITS = 16  # of a digest, in hex: it tells one device's words from its own later ones


@dataclass
class Presence:
    """Kept by the service across runs; a run reads it."""

    hellos: dict[str, Hello] = field(default_factory=dict)
    joined: int = 0  # how often a device said hello
    _last: dict[str, Hello] = field(default_factory=dict)  # also of those that have left
    _said: dict[str, str] = field(default_factory=dict)  # its digest, where it was asked for

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
        if said == self._last.get(arrival.device):
            return False
        self._last[arrival.device] = said
        self._said.pop(arrival.device, None)
        return True

    def said(self, device: str) -> str:
        """A digest of what it says that bears on what it can do, also if it has left; "" before it said anything."""
        if device not in self._said and device in self._last:
            told = json.dumps(asdict(self._last[device]), sort_keys=True)
            self._said[device] = hashlib.sha256(told.encode()).hexdigest()[:DIGITS]
        return self._said.get(device, "")

    @property
    def devices(self) -> Sequence[str]:
        return sorted(self.hellos)


# What a plan requires of a device, held against what the device says that it has.


SILENT = "it does not say"


def lacking(requires: Requires, has: Equipment) -> str:
    """What keeps a device from being asked, or "" when nothing does. What it does not say, it does not have.

    >>> lacking(Requires(memory_gb=4, mains=True), Equipment(free_bytes=2 * 2**30))
    'lacks 4 GiB of free memory (it has 2.0) and mains power (it does not say)'
    """
    lacks = []
    if requires.cores > (has.cores or 0):
        lacks.append(f"{counted(requires.cores, 'core')} ({SILENT if has.cores is None else f'it has {has.cores}'})")
    if requires.memory_gb:
        if has.free_bytes is None:
            lacks.append(f"{requires.memory_gb:g} GiB of free memory ({SILENT})")
        elif has.free_bytes < requires.memory_gb * GIB:
            lacks.append(f"{requires.memory_gb:g} GiB of free memory (it has {has.free_bytes / GIB:.1f})")
    if requires.mains and not has.mains:
        lacks.append(f"mains power ({SILENT if has.mains is None else 'it runs on a battery'})")
    if requires.unmetered and has.metered is not False:
        lacks.append(f"an unmetered link ({SILENT if has.metered is None else 'its link is metered'})")
    return f"lacks {' and '.join(lacks)}" if lacks else ""
