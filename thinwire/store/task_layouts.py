"""The layout of a task's model as this aggregator knows it: as its devices report it, or from an earlier run.

The aggregator never imports a task's code. `thinwire run` imports it where it is typed; a run that begins in the
dashboard needs the layout from here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from thinwire.core.errors import ThinwireError
from thinwire.core.fleet import TaskReport
from thinwire.core.layout import Layout
from thinwire.store.read_models import DeviceInfo, RunRow

if TYPE_CHECKING:
    from thinwire.store.store import Store

MAX_EARLIER = 200  # newest runs among which one of the task is searched


@dataclass(frozen=True)
class KnownTask:
    """Holds a task's layout and report, and where they come from: `devices` that report it, or the run `run_id`."""

    layout: Layout
    report: TaskReport
    devices: tuple[str, ...] = ()
    others: tuple[str, ...] = ()  # devices that report another layout of the same task
    run_id: str = ""


def known_task(store: Store, task: str) -> KnownTask | None:
    """Return what is known of a task: as most approved devices report it, else as its newest run had it; or None."""
    told = list(_told(store.devices(), task))
    if told:
        digests = Counter(report.layout_digest for _, report in told)
        digest = max(digests, key=lambda one: (digests[one], one))
        mine = [(name, report) for name, report in told if report.layout_digest == digest]
        others = tuple(name for name, report in told if report.layout_digest != digest)
        _, last = mine[-1]
        names = tuple(name for name, _ in mine)
        return KnownTask(Layout.from_json(json.loads(last.tensors)), replace(last, tensors=""), names, others)
    row = next(iter(earlier_runs(store, task)), None)
    return None if row is None else KnownTask(Layout.from_json(row.layout), row.task_report, run_id=row.run_id)


def earlier_runs(store: Store, task: str) -> list[RunRow]:
    """Return the newest runs of a task, the newest first, but none whose layout leaves personal layers out."""
    found = (row for row in store.some_runs(limit=MAX_EARLIER) if row.task == task and row.status != "preparing")
    return [row for row in found if not dict(row.plan["local"]).get("personal_layers")]


def known_tasks(store: Store) -> list[str]:
    """Return the names of all tasks that approved devices report or that newest runs had, in order."""
    names = {str(task.get("name", "")) for info in _approved(store.devices()) for task in info.tasks}
    return sorted(filter(None, names | {row.task for row in store.some_runs(limit=MAX_EARLIER)}))


def hosts(devices: list[DeviceInfo], task: str) -> list[DeviceInfo]:
    """Return the approved devices that report a usable task of this name."""
    return [
        info
        for info in _approved(devices)
        if any(one.get("name") == task and not one.get("error") for one in info.tasks)
    ]


def _approved(devices: list[DeviceInfo]) -> Iterator[DeviceInfo]:
    return (info for info in devices if info.row.state == "approved")


def _told(devices: list[DeviceInfo], task: str) -> Iterator[tuple[str, TaskReport]]:
    """Yield each approved device with its report of the task, if it has told a layout that can be read."""
    for info in hosts(devices, task):
        for one in info.tasks:
            report = _report(one) if one.get("name") == task else None
            if report is not None:
                yield info.row.name, report


def _report(told: dict[str, Any]) -> TaskReport | None:
    """Return a device's report of a task; None if its layout is missing or not what its digest says."""
    try:
        report = TaskReport(**{**told, "codecs": tuple(told.get("codecs", ()))})
        layout = Layout.from_json(json.loads(report.tensors)) if report.tensors else None
    except (ThinwireError, TypeError, ValueError, LookupError):
        return None
    return report if layout is not None and layout.digest == report.layout_digest else None
