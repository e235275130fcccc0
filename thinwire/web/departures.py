"""Since when, and why, devices are not heard of: read from the journal once, then only what is new."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from thinwire.core.events import DeviceJoined, DeviceLeft
from thinwire.store import Store

AT_ONCE = 5000  # events


@dataclass(frozen=True)
class Departure:
    at: float
    why: str


class Departures:
    """The last departure of each device that has not come back since. Any thread may call it."""

    def __init__(self, store: Store) -> None:
        self._store, self._lock = store, threading.Lock()
        self._read, self._left = 0, dict[str, Departure]()

    def of_all(self) -> dict[str, Departure]:
        with self._lock:
            while new := self._store.events(None, self._read, AT_ONCE):
                for self._read, event in new:
                    if isinstance(event, DeviceLeft):
                        self._left[event.device] = Departure(event.at, event.why)
                    elif isinstance(event, DeviceJoined):
                        self._left.pop(event.device, None)
            return dict(self._left)
