"""One ask as stretches of time, measured from its round's opening: what the Gantt chart draws.

The aggregator saw when the ask was taken (`pulled_at`) and when the answer began and arrived; what lies between, the
device measured by its own stopwatch. A device's stretches are laid end to end from `pulled_at` and never reach past
`began_at`: two clocks that differ cannot make an upload begin before its encoding ends. What they leave stands before
the upload, as what was between its stages; not where no aggregator was there, which is drawn behind all devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.store import UpdateRow
from thinwire.store.stages import Away, along, within_s

ON_DEVICE = ("download", "queue", "evaluate", "train", "encode")


@dataclass(frozen=True)
class Stretch:
    """Seconds since the round opened. Stages: those of `thinwire.store.stages.ALONG`."""

    stage: str
    begin_s: float
    end_s: float


def stretches(update: UpdateRow, opened_at: float, away: Away = ()) -> list[Stretch]:
    """In order, without overlap; empty for an ask that was not answered. A device that worked on it while no aggregator
    was there (`away`, wall clock) had taken it up before.
    """
    if update.arrived_at is None:
        return []
    asked = (update.asked_at or opened_at) - opened_at
    end = update.arrived_at - opened_at
    began = min(end, (update.began_at or update.arrived_at) - opened_at)
    device_s = sum(getattr(update, f"{stage}_s") or 0.0 for stage in ON_DEVICE)
    untold = asked if within_s(away, asked + opened_at, began + opened_at) else max(asked, began - device_s)
    pulled = update.pulled_at - opened_at if update.pulled_at else untold
    found = [Stretch("asked", asked, max(asked, pulled))]
    for stage in ON_DEVICE:
        begin = found[-1].end_s
        took = getattr(update, f"{stage}_s") or 0.0
        found.append(Stretch(stage, begin, max(begin, min(began, begin + took))))
    gone = [(since - opened_at, until - opened_at) for since, until, *_ in away]
    found += _between(found[-1].end_s, began, along(update, away)["between"], gone)
    found.append(Stretch("upload", max(began, found[-1].end_s), max(end, found[-1].end_s)))
    return [stretch for stretch in found if stretch.end_s > stretch.begin_s]


def _between(begin: float, end: float, took_s: float, gone: Sequence[tuple[float, float]]) -> list[Stretch]:
    """So many seconds up to `end`, none before `begin` and none while no aggregator was there.

    >>> _between(10.0, 40.0, 15.0, [(30.0, 40.0)])
    [Stretch(stage='between', begin_s=15.0, end_s=30.0)]
    """
    found = list[Stretch]()
    for since, until in [*sorted(gone, reverse=True), (begin, begin)]:
        free = min(took_s, max(0.0, end - max(begin, until)))
        if free > 0.0:
            found.insert(0, Stretch("between", end - free, end))
        took_s, end = took_s - free, min(end, max(begin, since))
    return found
