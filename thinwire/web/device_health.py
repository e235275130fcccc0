"""The health of devices over time: who was online when, and what the replies of each hour measured.

Connections come from the journal, everything else from the device's assignments, of which at most `MAX_READ` are read:
what a read costs does not depend on how long runs are.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Final, Literal

from thinwire.core.events import DeviceOffline, DeviceOnline
from thinwire.store import Store, UpdateRow
from thinwire.store.read_models import AT_ONCE_BYTES
from thinwire.web import device_schemas as models

Span = Literal["day", "week"]
ROWS: Final[dict[Span, tuple[int, float]]] = {"day": (24, 3600.0), "week": (28, 6 * 3600.0)}  # their number and length
MAX_READ: Final = 2000  # assignments
AT_ONCE: Final = 5000  # events
KEPT: Final = 200  # last connects and disconnects of a device

Change = tuple[float, bool]  # wall clock, whether the device is online from then on


class Presence:
    """The last connects and disconnects of each device. Any thread may call it.

    The journal is read once, then only its new events.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._lock = store, threading.Lock()
        self._read, self._left = 0, dict[str, DeviceOffline]()
        self._changes = dict[str, deque[Change]]()

    def departures(self) -> dict[str, DeviceOffline]:
        """Return the last disconnect of each device that has not reconnected since."""
        with self._lock:
            self._follow()
            return dict(self._left)

    def changes(self, device: str) -> list[Change]:
        """Return the last connects and disconnects of a device, oldest first."""
        with self._lock:
            self._follow()
            return list(self._changes.get(device, ()))

    def _follow(self) -> None:
        while new := self._store.events(None, self._read, AT_ONCE):
            for self._read, event in new:
                if isinstance(event, DeviceOffline):
                    self._left[event.device] = event
                    self._add(event.device, (event.last_seen_at or event.at, False))
                elif isinstance(event, DeviceOnline):
                    self._left.pop(event.device, None)
                    self._add(event.device, (event.at, True))

    def _add(self, device: str, change: Change) -> None:
        self._changes.setdefault(device, deque(maxlen=KEPT)).append(change)


def rows_of(
    span: Span, until: float, changes: Sequence[Change], updates: Sequence[UpdateRow], read_since: float
) -> list[models.HealthRow]:  # fmt: skip
    """Return the rows of a span that ends at `until`; what lies before `read_since` has no figures of assignments."""
    number, length = ROWS[span]
    last = until // length * length
    begins = [last - length * back for back in reversed(range(number))]
    of: dict[float, list[UpdateRow]] = {begin: [] for begin in begins}
    for one in updates:
        if one.assigned_at is not None and (place := one.assigned_at // length * length) in of:
            of[place].append(one)
    shown = []
    for begin, own in of.items():
        end, known = min(begin + length, until), begin + length > read_since
        shown.append(
            models.HealthRow(
                begin_at=begin, end_at=end, online=online_share(changes, begin, end), outside_s=_median(outside_s, own),
                up_bits_s=_median(up_bits_s, own), down_bits_s=_median(down_bits_s, own), step_s=_median(step_s, own),
                assignments=len(own) if known else None,
                failures=sum(one.outcome in ("failed", "dropped") for one in own) if known and own else None,
            )
        )  # fmt: skip
    return shown


def online_share(changes: Sequence[Change], begin: float, end: float) -> float | None:
    """Return the share of the time for which a device was online; None before the first thing that is known of it.

    >>> online_share([(0.0, True), (30.0, False)], 0.0, 40.0), online_share([(50.0, True)], 0.0, 40.0)
    (0.75, None)
    >>> online_share([], 0.0, 40.0)
    """
    online_s = known_s = 0.0
    for (at, is_online), (following, _) in pairwise([*changes, (end, False)]):
        seconds = max(0.0, min(following, end) - max(at, begin))
        known_s += seconds
        online_s += seconds if is_online else 0.0
    return online_s / known_s if known_s else None


def outside_s(one: UpdateRow) -> float | None:
    """Return the time from a delivery to the first byte of its reply without the device's own work.

    It is one round trip, or a few if the device has to connect again; None if the device does not tell its work.
    """
    stages = (one.download_s, one.queue_s, one.load_s, one.evaluate_s, one.train_s, one.encode_s, one.commit_s)
    if one.pulled_at is None or one.began_at is None or not one.train_s:
        return None
    left = one.began_at - one.pulled_at - sum(stage or 0.0 for stage in stages)
    return left if left > 0 else None


def up_bits_s(one: UpdateRow) -> float | None:
    """Return the rate of a reply from its first byte to its last; None if it was too small to measure one."""
    rate = upload_rate(one)
    return 8 * rate if rate is not None and _up_bytes(one) > AT_ONCE_BYTES else None


def down_bits_s(one: UpdateRow) -> float | None:
    """Return the rate of a download by the device's stopwatch; None if it was too small to measure one."""
    size = one.payload_down if one.wire_down is None else one.wire_down
    return 8 * size / one.download_s if one.download_s and size > AT_ONCE_BYTES else None


def step_s(one: UpdateRow) -> float | None:
    """Return the seconds of a local step; None if the reply tells none."""
    return one.train_s / one.steps if one.train_s and one.steps else None


def upload_rate(one: UpdateRow) -> float | None:
    """Return the upload rate of a reply in bytes a second, from its first byte to its last; None if unknown."""
    size = _up_bytes(one)
    if one.arrived_at is None or one.began_at is None or one.arrived_at <= one.began_at or not size:
        return None
    return size / (one.arrived_at - one.began_at)


def _up_bytes(one: UpdateRow) -> int:
    return one.payload_up if one.wire_up is None else one.wire_up


def _median(figure: Callable[[UpdateRow], float | None], updates: Iterable[UpdateRow]) -> float | None:
    found = [value for one in updates if (value := figure(one)) is not None]
    return statistics.median(found) if found else None
