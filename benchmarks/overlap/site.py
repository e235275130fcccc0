"""An aggregator and its devices as real processes, each device behind a line of its own, and what a run took there."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.processes import Processes, cpu_seconds, descendants, free_port
from thinwire.client.initial import initial_model
from thinwire.client.task import load_task, report
from thinwire.core import RunPlan
from thinwire.core.events import Evaluated, RoundClosed, UpdateAccepted
from thinwire.core.home import AggregatorHome, holder
from thinwire.server.submit import submit
from thinwire.store import Store

ROOT = Path(__file__).parents[2]
TASK = f"wide={Path(__file__).parent / 'task.py'}"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@dataclass(frozen=True)
class Took:
    """What a run took, in seconds: each round from the close before it to its own, and of each answer its parts.

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
    """`count` devices behind lines of `bytes_per_s`, none where that is 0; they wait for a run."""

    def __init__(self, folder: Path, processes: Processes, count: int, bytes_per_s: float) -> None:
        self.processes, self.count = processes, count
        self.home = AggregatorHome.under(folder / "thinwire")
        port = free_port()
        self.pids = [
            self._cli("aggregator", "aggregator", "start", "--listen", f"127.0.0.1:{port}", "--no-page")
        ]  # fmt: skip
        processes.until(lambda: "listen" in (holder(self.home.lock) or {}), 60, "the aggregator serves")
        for number in range(count):
            there = port
            if bytes_per_s:
                there = free_port()
                words = ("-m", "benchmarks.overlap.line", str(there), str(port), str(bytes_per_s))
                processes.start(f"line-{number}", [sys.executable, *words], ONE_THREAD)
                processes.until(lambda port=there: _answers(port), 60, "the line is there")  # type: ignore[misc]
            self.pids.append(self._cli(
                f"device-{number}", "client", "start", "--aggregator", f"http://127.0.0.1:{there}", "--task", TASK,
                "--name", f"device-{number}", "--partition", f"{number}/{count}",
            ))  # fmt: skip
        self.store = Store.open(self.home.database)
        processes.until(
            lambda: sum(info.online for info in self.store.devices()) == count, 120, "all devices are there"
        )

    def run(self, plan: Mapping[str, Any], within_s: float) -> Took:
        """Submit a plan and follow it to its end."""
        task = load_task(TASK)
        made, parsed = initial_model(task, 0), RunPlan.from_json(plan)
        run_id = submit(
            self.store, self.home, parsed, made.layout, made.vector, made.buffers, made.counters, report(task)
        )
        self.processes.until(lambda: self.store.run(run_id).version >= 1, within_s, "the first round")
        before, since = self._cpu_s(), self._closes(run_id)
        self.processes.until(
            lambda: self.store.run(run_id).status in ("done", "failed"), within_s, f"the end of {run_id}"
        )
        row, closes = self.store.run(run_id), self._closes(run_id)
        if row.status != "done":
            raise RuntimeError(f"{run_id} is {row.status}: {row.status_text}")
        events = [event for _, event in self.store.events(run_id)]
        heads = [event.head for event in events if isinstance(event, UpdateAccepted)]
        measured = [event for event in events if isinstance(event, Evaluated)]
        wall_s = closes[-1] - since[-1]
        return Took(
            rounds=[closes[0], *(b - a for a, b in pairwise(closes))],
            compute=[sum(head["timings"][f"{part}_s"] for part in ("evaluate", "train", "encode")) for head in heads],
            transfer=[_transfer_s(head) for head in heads],
            up_bytes=sum(part["length"] for part in heads[-1]["parts"]),
            down_bytes=4 * made.layout.size,
            busy=(self._cpu_s() - before) / (wall_s * len(os.sched_getaffinity(0))),
            accuracy=max(measured, key=lambda event: event.version).metrics["accuracy"],
        )

    def _cli(self, name: str, *words: str) -> int:
        home = str(self.home.lock.parents[1])
        return self.processes.start(name, [sys.executable, "-m", "thinwire.cli", *words, "--home", home], ONE_THREAD)

    def _cpu_s(self) -> float:
        return sum(cpu_seconds(each) for pid in self.pids for each in descendants(pid))

    def _closes(self, run_id: str) -> list[float]:
        return [event.elapsed_s for _, event in self.store.events(run_id) if isinstance(event, RoundClosed)]


def medians(rounds: Sequence[float], warm_up: int) -> float:
    """The median round after the first few."""
    return median(rounds[warm_up:])


def _transfer_s(head: Mapping[str, Any]) -> float:
    """Both ways: the download by the device's clock, the upload by the aggregator's."""
    transfer = head["transfer"]
    return float(head["timings"]["download_s"]) + float(transfer["arrived_at"]) - float(transfer["began_at"])


def _answers(port: int) -> bool:
    import socket

    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
