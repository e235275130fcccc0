"""One ask as stretches of time, measured from its round's opening: what the Gantt chart draws.

The aggregator saw when the ask was taken (`pulled_at`) and when the answer began and arrived; what lies between, the
device measured by its own stopwatch. A device's stretches are laid end to end from `pulled_at` and never reach past
`began_at`: two clocks that differ cannot make an upload begin before its encoding ends. What they leave stands before
the upload, as what was between its stages; not where no aggregator was there, which is drawn behind all devices. A
device that took the ask up again was gone and starts what trains: there it stands before the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.store import UpdateRow
from thinwire.store.stages import ON_DEVICE, Away, along, taken_first, within_s

FETCHED = ("download", "queue")  # what is over before what trains is needed


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
    first = max(asked, taken_first(update, pulled + opened_at) - opened_at)
    found = [Stretch("asked", asked, first), Stretch("again", first, max(first, pulled))]
    gone = [(since - opened_at, until - opened_at) for since, until, *_ in away]
    between_s, anew, at = along(update, away)["between"], first < pulled, found[-1].end_s
    for stage in ON_DEVICE:
        if anew and stage not in FETCHED:
            work = began - sum(getattr(update, f"{name}_s") or 0.0 for name in ON_DEVICE if name not in FETCHED)
            found += _between(at, work, between_s, gone)
            between_s, anew, at = 0.0, False, max(at, work)
        until = max(at, min(began, at + (getattr(update, f"{stage}_s") or 0.0)))
        found.append(Stretch(stage, at, until))
        at = until
    found += _between(at, began, between_s, gone)
    found.append(Stretch("upload", max(began, at), max(end, at)))
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
            found.insert(0, Stretch("between", max(begin, end - free), end))
        took_s, end = took_s - free, min(end, max(begin, since))
    return found
