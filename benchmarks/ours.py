"""Our side: the aggregator's service as `thinwire aggregator start` runs it, and devices that do not train."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.noop_client import CODEC, Shape
from benchmarks.processes import Processes, cpu_seconds, free_port, status_bytes
from thinwire.core import RunPlan
from thinwire.core.fleet import TaskReport
from thinwire.core.statedir import AggregatorHome, holder
from thinwire.server.submit import FirstModel, submit
from thinwire.store import Store

CLIENT = "from benchmarks.noop_client import main; main()"
FLEET = "from benchmarks.noop_fleet import main; main()"
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Made:
    """Holds what one run cost. A round's seconds are counted from its opening to the opening of the next one."""

    seconds: list[float]
    requests: float
    cpu_s: float  # of the aggregator, from the run's submission to its end
    spent: list[dict[str, float]]


class Ours:
    """Started with `count` clients, each of which has every task of `shapes`. No run is loaded yet.

    Each client is a process, or all of them are threads of so many processes as `together` says.
    """

    def __init__(
        self, folder: Path, processes: Processes, count: int, shapes: dict[str, Shape], together: int = 0
    ) -> None:
        self.processes, self.count, self.shapes = processes, count, shapes
        home = folder / "thinwire"
        self.home = AggregatorHome.under(home)
        listen = f"127.0.0.1:{free_port()}"
        command = [
            "-m",
            "thinwire.cli",
            "aggregator",
            "start",
            "--home",
            str(home),
            "--listen",
            listen,
            "--no-dashboard",
        ]
        began = time.perf_counter()
        self.pid = processes.start("aggregator", [sys.executable, *command])
        processes.until(lambda: "listen" in (holder(self.home.lock) or {}), 60, "the aggregator serves")
        self.ready_s = time.perf_counter() - began
        tasks = [f"{task}={shape}" for task, shape in shapes.items()]
        for each in range(together):
            first, last = count * each // together, count * (each + 1) // together
            command = ["-c", FLEET, f"http://{listen}", str(first), str(last), str(folder), *tasks]
            processes.start(f"fleet-{each}", [sys.executable, *command], {"PYTHONPATH": str(ROOT)})
        for number in range(0 if together else count):
            name = f"device-{number}"
            command = ["-c", CLIENT, f"http://{listen}", name, str(folder / name), *tasks]
            processes.start(name, [sys.executable, *command], {"PYTHONPATH": str(ROOT)})
        self.store = Store.open(self.home.database)
        processes.until(lambda: self._online() == count, 60, f"{count} devices are there")
        self.idle_bytes = status_bytes(self.pid, "VmRSS")

    def rounds(self, task: str, count: int, within_s: float, keep: str = "last,best") -> Made:
        """Run `count` rounds of a task to their end: model files, spool, journal and database included.

        `keep` names the model versions that stay, as `[run] keep` does.
        """
        layout = self.shapes[task].layout
        plan = RunPlan.from_json(
            {
                "run": {"task": task, "rounds": count, "keep": keep},
                "cohort": {"wait_for": self.count, "min_updates": float(self.count)},
                "local": {"lr": 1.0, "steps": 1},
                "uplink": {"codec": CODEC, "feedback": "none"},
            }
        )
        params, nothing = np.zeros(layout.size, np.float32), np.zeros(0, np.float32)
        report = TaskReport(task, layout_digest=layout.digest)
        before = cpu_seconds(self.pid)
        run_id = submit(self.store, self.home, plan, FirstModel(layout, report, params, nothing))
        self.processes.until(lambda: self._ended(run_id), within_s, f"{count} rounds of {run_id}")
        cpu_s = cpu_seconds(self.pid) - before
        row, rounds, updates = self.store.run(run_id), self.store.rounds(run_id), self.store.updates(run_id)
        aggregated = [update for update in updates if update.outcome == "aggregated"]
        if row.status != "done" or len(aggregated) != count * self.count:
            raise RuntimeError(
                f"{run_id} is {row.status}: {row.status_text}; {len(aggregated)} updates were aggregated"
            )
        rounds = sorted(rounds, key=lambda each: each.round)
        seconds = [b.opened_at - a.opened_at for a, b in pairwise(rounds)]
        requests = sum(update.requests or 0 for update in aggregated) / len(aggregated)
        return Made(seconds, requests, cpu_s, [dict(each.spent) for each in rounds])

    def peak_bytes(self) -> int:
        return status_bytes(self.pid, "VmHWM")

    def close(self) -> None:
        self.store.close()

    def _online(self) -> int:
        return sum(info.online for info in self.store.devices())

    def _ended(self, run_id: str) -> bool:
        return self.store.run(run_id).status in ("done", "failed", "stopped")
