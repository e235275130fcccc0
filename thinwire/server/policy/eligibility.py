"""Holds the connected devices with their reports, and checks a device against what a plan requires."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from thinwire.core.fleet import Arrival, Hello, NodeJoined, NodeLeft
from thinwire.core.formatting import counted
from thinwire.core.plan_schema import Requires
from thinwire.core.types import GIB, Equipment

DIGITS = 16  # of a digest, in hex: enough to compare reports of one device


@dataclass
class ConnectedDevices:
    """Holds the connected devices, and what each one reports about itself. The service keeps it across runs; a run
    reads it.
    """

    hellos: dict[str, Hello] = field(default_factory=dict)
    joined: int = 0  # how often a device connected
    _last: dict[str, Hello] = field(default_factory=dict)  # device -> last report, disconnected devices too
    _said: dict[str, str] = field(default_factory=dict)  # device -> digest of the last report, computed on demand

    def take(self, arrival: Arrival) -> bool:
        """Record an arrival. Return True if a device connects with another report than last time.

        Only then may the device answer an assignment differently.
        """
        if isinstance(arrival, NodeLeft):
            self.hellos.pop(arrival.device, None)
        if not isinstance(arrival, NodeJoined):
            return False
        self.hellos[arrival.device] = arrival.hello
        self.joined += 1
        has = replace(arrival.hello.has, free_bytes=None)
        said = replace(arrival.hello, link={}, holds=(), plans=(), has=has)  # these say nothing about its abilities
        if said == self._last.get(arrival.device):
            return False
        self._last[arrival.device] = said
        self._said.pop(arrival.device, None)
        return True

    def said(self, device: str) -> str:
        """Return a digest of a device's last report, as far as it concerns what the device can do; "" before its first
        report.

        The digest stays when the device disconnects.
        """
        if device not in self._said and device in self._last:
            told = json.dumps(asdict(self._last[device]), sort_keys=True)
            self._said[device] = hashlib.sha256(told.encode()).hexdigest()[:DIGITS]
        return self._said.get(device, "")

    @property
    def devices(self) -> Sequence[str]:
        """Return the names of the connected devices, sorted."""
        return sorted(self.hellos)


SILENT = "it does not say"


def lacking(requires: Requires, has: Equipment) -> str:
    """Return what the plan requires and the device lacks; "" if the device meets all requirements.

    The device lacks whatever it does not report.

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
