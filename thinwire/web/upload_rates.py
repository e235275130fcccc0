"""How fast each device's link carries its answers up, from what was measured of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from thinwire.store import RoundRow, Store, UpdateRow

NEWEST_RUNS = 3
LOOK_BACK = 8  # closed rounds of each that are looked at
KEPT_ROUNDS = 4 * NEWEST_RUNS * LOOK_BACK


@dataclass(frozen=True)
class Rate:
    """The median over `uploads` answers, bytes a second."""

    bytes_s: float
    uploads: int


class UploadRates:
    """Of all devices at once. A closed round is read once, for hundreds of devices look at it again and again."""

    def __init__(self, store: Store, rounds: Callable[[str], Sequence[RoundRow]]) -> None:
        self._store, self._rounds = store, rounds
        self._kept: dict[tuple[int, str, int], list[tuple[str, float]]] = {}

    def of_all(self) -> dict[str, Rate]:
        """By device; one that sent nothing in those rounds is not there."""
        acts = self._store.last_act()  # a device that was renamed is read anew
        newest = [run.run_id for run in self._store.runs() if run.source == "devices"][:NEWEST_RUNS]
        found: dict[str, list[float]] = {}
        for run_id in newest:
            closed = [one.round for one in self._rounds(run_id) if one.reason][-LOOK_BACK:]
            for device, rate in (pair for number in closed for pair in self._round((acts, run_id, number))):
                found.setdefault(device, []).append(rate)
        return {device: Rate(statistics.median(rates), len(rates)) for device, rates in found.items()}

    def _round(self, key: tuple[int, str, int]) -> list[tuple[str, float]]:
        if key not in self._kept:
            self._kept[key] = list(rates(self._store.updates(*key[1:])))
            for oldest in list(self._kept)[:-KEPT_ROUNDS]:
                self._kept.pop(oldest, None)
        return self._kept[key]


def rates(updates: Iterable[UpdateRow]) -> Iterable[tuple[str, float]]:
    return ((one.device, rate) for one in updates if (rate := upload_rate(one)) is not None)


def upload_rate(one: UpdateRow) -> float | None:
    """Bytes a second from an answer's first byte to its last; None where nothing was measured."""
    size = one.payload_up if one.wire_up is None else one.wire_up
    if one.arrived_at is None or one.began_at is None or one.arrived_at <= one.began_at or not size:
        return None
    return size / (one.arrived_at - one.began_at)
