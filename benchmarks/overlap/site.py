"""An aggregator and its devices as real processes, each device with a way of its own, and what a run took there."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.overlap.ways import ONE_THREAD, Inside, Way, thinwire
from benchmarks.processes import Processes, cpu_seconds, descendants
from thinwire.client.task import initial_model, load_task, report
from thinwire.core import RunPlan
from thinwire.core.events import Evaluated, RoundClosed, UpdateAccepted
from thinwire.core.statedir import AggregatorHome, holder
from thinwire.server.submit import FirstModel, submit
from thinwire.store import Store

TASK = f"wide={Path(__file__).parent / 'task.py'}"


@dataclass(frozen=True)
class Took:
    """Holds what a run took, in seconds: each round from the close before it to its own, and of each answer its parts.

    `busy` is the share of the cores that all its processes used; `accuracy` that of the last model.
    """

    rounds: list[float]
    compute: list[float]
    transfer: list[float]
    up_bytes: int
    down_bytes: int
    busy: float
    accuracy: float


class Devices:
    """Devices that have found their aggregator by their ways, and wait for a run."""

    def __init__(self, folder: Path, processes: Processes, names: Sequence[str], by: Way) -> None:
        self.processes, self.home = processes, AggregatorHome.under(folder / "thinwire")
        self._at = self.home.lock.parents[1]
        self.pids = [self._cli("aggregator", by.inside, "aggregator", "start", "--listen", by.listen, "--no-dashboard")]
        processes.until(lambda: "listen" in (holder(self.home.lock) or {}), 60, "the aggregator serves")
        for number, name in enumerate(names):
            there, words = by.device(name, self._at, processes)
            part = ("--name", name, "--partition", f"{number}/{len(names)}")
            self.pids.append(self._cli(name, there, "client", "start", "--task", TASK, *part, *words))
        self.store = Store.open(self.home.database)
        online = len(names)
        processes.until(
            lambda: sum(info.online for info in self.store.devices()) == online, 120, "all devices are there"
        )

    def run(self, plan: Mapping[str, Any], within_s: float) -> Took:
        """Submit a plan and follow it to its end."""
        task = load_task(TASK)
        made, parsed = initial_model(task, 0), RunPlan.from_json(plan)
        run_id = submit(
            self.store,
            self.home,
            parsed,
            FirstModel(made.layout, report(task), made.vector, made.buffers, made.counters),
        )
        self.processes.until(lambda: self.store.run(run_id).version >= 1, within_s, "the first round")
        before, began = self._cpu_s(), time.monotonic()
        self.processes.until(
            lambda: self.store.run(run_id).status in ("done", "failed"), within_s, f"the end of {run_id}"
        )
        cpu_s, wall_s = self._cpu_s() - before, time.monotonic() - began
        row, closes = self.store.run(run_id), self._closes(run_id)
        if row.status != "done":
            raise RuntimeError(f"{run_id} is {row.status}: {row.status_text}")
        events = [event for _, event in self.store.events(run_id)]
        headers = [event.header for event in events if isinstance(event, UpdateAccepted)]
        measured = [event for event in events if isinstance(event, Evaluated)]
        return Took(
            rounds=[closes[0], *(b - a for a, b in pairwise(closes))],
            compute=[
                sum(header["timings"][f"{part}_s"] for part in ("evaluate", "train", "encode")) for header in headers
            ],
            transfer=[_transfer_s(header) for header in headers],
            up_bytes=sum(part["length"] for part in headers[-1]["parts"]),
            down_bytes=4 * made.layout.size,
            busy=cpu_s / (wall_s * len(os.sched_getaffinity(0))),
            accuracy=max(measured, key=lambda event: event.version).metrics["accuracy"],
        )

    def _cli(self, name: str, inside: Inside, *words: str) -> int:
        return self.processes.start(name, thinwire(inside, *words, "--home", str(self._at)), ONE_THREAD)

    def _cpu_s(self) -> float:
        return sum(cpu_seconds(each) for pid in self.pids for each in descendants(pid))

    def _closes(self, run_id: str) -> list[float]:
        return [event.elapsed_s for _, event in self.store.events(run_id) if isinstance(event, RoundClosed)]


def medians(rounds: Sequence[float], warm_up: int) -> float:
    """The median round after the first few."""
    return median(rounds[warm_up:])


def _transfer_s(header: Mapping[str, Any]) -> float:
    """Both ways: the download by the device's clock, the upload by the aggregator's."""
    transfer = header["transfer"]
    return float(header["timings"]["download_s"]) + float(transfer["arrived_at"]) - float(transfer["began_at"])
