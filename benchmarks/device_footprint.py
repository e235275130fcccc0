"""Measure what our client takes of a device: memory and CPU without an assignment, time to start, installed bytes.

    python -m benchmarks.device_footprint [--preset small|full] --json

An aggregator and one client, both the programs that people start. The client is started twice, and each start imports
torch in the worker to describe the task. `bare` is the client without its worker, as it is without an assignment
ten minutes and the worker has ended. Then the client trains a round, and its worker stays for the next one. Memory is
the resident set of all its processes, added up: what they share counts twice.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.document import note
from benchmarks.entry import run_in_folder
from benchmarks.installed import installed_bytes, required
from benchmarks.processes import Processes, cpu_seconds, descendants, free_port, status_bytes
from thinwire.client.calls import ClientStatus

WITHIN_S = 120.0
NAME = "pi-01"
BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}  # pip compiles what it installs; a process that compiles takes 0.7 MB more
RUN = ("run.rounds=1", "cohort.wait_for=1", "local.steps=20")


@dataclass(frozen=True)
class Preset:
    """Sets how long a client without an assignment is watched, and how often it is started."""

    idle_s: float
    starts: int = 2


PRESETS = {"tiny": Preset(1.0, starts=1), "small": Preset(20.0), "full": Preset(120.0)}


class Node:
    """A home with an aggregator and a client in it."""

    def __init__(self, folder: Path, processes: Processes) -> None:
        self.folder, self.home, self._processes = folder, folder / "home", processes
        self._listen, self._starts = f"127.0.0.1:{free_port()}", 0
        self._call("init", str(folder / "task"))
        self._start("aggregator", "aggregator", "start", "--listen", self._listen, "--no-dashboard")
        log = processes.log("aggregator")
        processes.until(lambda: self._listen in log.read_text(), WITHIN_S, "the aggregator was there")

    def start_client(self) -> tuple[int, float]:
        """Its process, and the seconds until it was connected and its task known."""
        self._starts += 1
        began = time.time()
        pid = self._start(
            f"client-{self._starts}", "client", "start", "--aggregator", f"http://{self._listen}",
            "--task", f"task={self.folder / 'task' / 'task.py'}", "--name", NAME,
        )  # fmt: skip
        at = self.until_idle(began)
        return pid, (at.connected_at or began) - began

    def until_idle(self, since: float) -> ClientStatus:
        """Return the status that the client reports when it is connected and has no assignment."""
        found: list[ClientStatus] = []

        def idle() -> bool:
            at = ClientStatus.load(self.home / "clients" / NAME)
            if at is None or at.state != "idle" or at.at < since:
                return False
            found.append(at)
            return True

        self._processes.until(idle, WITHIN_S, "the client was idle")
        return found[-1]

    def end(self, pid: int) -> None:
        os.kill(pid, signal.SIGTERM)
        self._processes.ended(pid, WITHIN_S)

    def train(self) -> None:
        began = time.time()
        sets = [word for each in RUN for word in ("--set", each)]
        self._call("run", str(self.folder / "task" / "plan.toml"), *sets, "--home", str(self.home))
        self.until_idle(began)

    def _start(self, name: str, *words: str) -> int:
        command = [sys.executable, "-m", "thinwire.cli", *words, "--home", str(self.home)]
        return self._processes.start(name, command, BYTECODE)

    def _call(self, *words: str) -> None:
        command = [sys.executable, "-m", "thinwire.cli", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, check=False)
        if done.returncode:
            raise RuntimeError(f"thinwire {words[0]} ended with {done.returncode}:\n{done.stderr}")


def idle(what: str, processes: Collection[int], idle_s: float) -> dict[str, Any]:
    """Measure what processes hold, and what they do, while their client has no assignment."""
    before, began = sum(map(cpu_seconds, processes)), time.monotonic()
    time.sleep(idle_s)
    spent, took_s = sum(map(cpu_seconds, processes)) - before, time.monotonic() - began
    rss = sum(status_bytes(each, "VmRSS") for each in processes)
    found = {
        "what": what, "processes": len(processes), "torch": any(_has_torch(each) for each in processes),
        "rss_mb": round(rss / 1e6, 3), "cpu_percent": round(100 * spent / took_s, 4), "seconds": round(took_s, 3),
    }  # fmt: skip
    note(f"{what}: {found['rss_mb']:.0f} MB in {found['processes']} processes, {found['cpu_percent']:.2f} % CPU")
    return found


def measure(preset: Preset, folder: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Start the client as often as the preset says, then train a round."""
    with Processes(folder) as processes:
        node = Node(folder, processes)
        pid, first_start_s = node.start_client()
        start_s = first_start_s
        for _ in range(1, preset.starts):
            node.end(pid)
            pid, start_s = node.start_client()
        bare = idle("bare", [pid], preset.idle_s)  # without the worker, which every start begins to describe the tasks
        node.train()
        after = idle("after a round", descendants(pid), preset.idle_s)
    if (bare["torch"], after["torch"]) != (False, True):
        raise RuntimeError(f"torch is not where it should be: {bare}, {after}")
    sizes = {name: installed_bytes(found) for name, found in required("thinwire", ["client"]).items()}
    rows = [bare, after, *({"what": "package", "name": name, "mb": size / 1e6} for name, size in sizes.items())]
    return rows, figures(bare, after, sizes) | {"start_s": start_s, "first_start_s": first_start_s}


def figures(bare: Mapping[str, Any], after: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, float]:
    beside = {name: size for name, size in sizes.items() if name != "numpy"}  # as torch, numpy is the task's
    return {
        "idle_rss_bare_mb": bare["rss_mb"], "idle_rss_mb": after["rss_mb"],
        "idle_cpu_bare_percent": bare["cpu_percent"], "idle_cpu_percent": after["cpu_percent"],
        "distributions": len(beside), "installed_mb": sum(beside.values()) / 1e6,
    }  # fmt: skip


def _has_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


if __name__ == "__main__":
    run_in_folder("device_footprint", __doc__, PRESETS, measure)
