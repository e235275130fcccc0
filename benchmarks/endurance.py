"""Measure what a long run costs the aggregator: time, memory and disk a client-round, and what a person waits for.

    python -m benchmarks.endurance [--preset tiny|small|full] [--part live|long|real|sim] --json

- `live`: 100 devices that do not train, threads of two processes, and the program that people start. CPU of the
  aggregator a client-round; how long it takes to be ready.
- `long`: one recorded round of `live`, recorded again and again (`benchmarks.recorded_run`), then a restart. `small`
  records far fewer client-rounds than `full`, which records 1 000 000.
- `real`: clients as people start them, with the task of `thinwire init`. `unaccounted_share` is the share of all closed
  rounds but the first that stands in no measured stage: the seconds of each round that no stage covers, where a second
  counts once. It counts `run_to_first_round_s` from the start of `thinwire run`; `cli_list_s` is the median of
  `thinwire runs list`.
- `sim`: a simulated round of clients that give back what came, 1 000 of 10 000 in `small` and `full`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.document import document, note, show
from benchmarks.entry import arguments, end_what_we_started
from benchmarks.noop_client import Shape
from benchmarks.ours import ROOT, Ours
from benchmarks.processes import Processes, free_port
from thinwire.client.calls import ClientStatus
from thinwire.core.statedir import AggregatorHome, holder
from thinwire.store import Store
from thinwire.store.round_timing import UNACCOUNTED

WITHIN_S = 300.0
TASK, SHAPE = "noop", Shape(1, 2, 2)
PARTS = ("live", "long", "real", "sim")
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Preset:
    """Sizes of all parts. `repeated` counts the rounds that are recorded again; `limit_s` bounds each long program."""

    devices: int
    rounds: int
    repeated: int
    clients: int  # real ones
    real_rounds: int
    simulated: tuple[int, int, int]  # clients, of them in a round, rounds
    lists: int
    limit_s: float = 600.0


PRESETS = {
    "tiny": Preset(2, 3, 6, 1, 2, (4, 2, 2), 1),  # seconds: for the tests
    "small": Preset(100, 8, 150, 2, 5, (10_000, 1_000, 4), 3),
    "full": Preset(100, 40, 10_000, 3, 30, (10_000, 1_000, 20), 7, 7200.0),
}


def measure(preset: Preset, folder: Path, parts: Sequence[str]) -> tuple[Rows, dict[str, float]]:
    """Measure one part after the other; `long` needs what `live` recorded."""
    rows, figures, ready = Rows(), dict[str, float](), list[float]()
    if {"live", "long"} & set(parts):
        found, run_id = live(preset, folder / "live", ready)
        rows.append({"part": "live", **found})
        figures["server_cpu_ms_per_client_round"] = found["cpu_ms"]
    if "long" in parts:
        found = long(preset, folder, run_id)
        rows.append({"part": "long", **found})
        figures |= {name: found[name] for name in ("restart_s", "restart_mb", "store_bytes", "rss_bytes")}
        figures["client_rounds"] = found["client_rounds"]
    if "real" in parts:
        found = real(preset, folder / "real", ready)
        rows.append({"part": "real", **found})
        figures |= {name: found[name] for name in ("unaccounted_share", "run_to_first_round_s", "cli_list_s")}
    if "sim" in parts:
        found = sim(preset)
        rows.append({"part": "sim", **found})
        figures["sim_overhead_ms"], figures["sim_cpu_ms"] = found["client_round_ms"], found["client_round_cpu_ms"]
    if ready:
        figures["aggregator_ready_s"] = median(ready)
    return rows, figures


def live(preset: Preset, folder: Path, ready: list[float]) -> tuple[dict[str, Any], str]:
    """Run rounds of devices that do not train; return what they cost, and the run's id."""
    folder.mkdir()
    with Processes(folder) as processes:
        ours = Ours(folder, processes, preset.devices, {TASK: SHAPE}, together=2)
        ready.append(ours.ready_s)
        made = ours.rounds(
            TASK, preset.rounds, preset.limit_s, keep="all"
        )  # `long` begins with the last version but one
        run_id = ours.store.runs()[0].run_id
        ours.close()
    cpu_ms = 1000 * made.cpu_s / (preset.rounds * preset.devices)
    found = {"devices": preset.devices, "rounds": preset.rounds, "cpu_ms": cpu_ms, "round_s": median(made.seconds)}
    note(f"live: {found}")
    return found, run_id


def long(preset: Preset, folder: Path, run_id: str) -> dict[str, Any]:
    """Record the rounds in a process of their own, then restart in another one."""
    source, target = str(folder / "live" / "thinwire"), str(folder / "long")
    command = [sys.executable, "-m", "benchmarks.recorded_run"]
    found = _json([*command, "repeat", source, run_id, target, str(preset.repeated)], preset.limit_s)
    found |= _json([*command, "restart", target, run_id], preset.limit_s)
    note(f"long: {found}")
    return found


def real(preset: Preset, folder: Path, ready: list[float]) -> dict[str, Any]:
    """Train rounds with real clients; return the share of their time that no measured stage explains."""
    folder.mkdir()
    listen, home = f"127.0.0.1:{free_port()}", AggregatorHome.under(folder / "home")
    at_home = ("--home", str(folder / "home"))
    with Processes(folder) as processes:
        _call("init", str(folder / "task"))
        began = time.perf_counter()
        processes.start("aggregator", _thinwire("aggregator", "start", *at_home, "--listen", listen, "--no-dashboard"))
        processes.until(lambda: "listen" in (holder(home.lock) or {}), WITHIN_S, "the aggregator serves")
        ready.append(time.perf_counter() - began)
        names = [f"pi-{number}" for number in range(preset.clients)]
        for name in names:
            task = f"task={folder / 'task' / 'task.py'}"
            words = ("client", "start", *at_home, "--aggregator", f"http://{listen}", "--task", task, "--name", name)
            processes.start(name, _thinwire(*words))
        folders = [folder / "home" / "clients" / name for name in names]
        processes.until(lambda: all(map(_idle, folders)), WITHIN_S, "the clients were idle")
        sets = {"run.rounds": preset.real_rounds, "cohort.wait_for": preset.clients, "local.steps": 5}
        changed = [word for name, value in sets.items() for word in ("--set", f"{name}={value}")]
        before = time.time()
        _call("run", str(folder / "task" / "plan.toml"), *changed, *at_home, within_s=preset.limit_s)
        lists = [_call("runs", "list", *at_home) for _ in range(preset.lists)]
    with Store.open(home.database, read_only=True) as store:
        row = store.runs()[0]
        told = store.explanations(row.run_id)[1:]
        opened = min(one.opened_at for one in store.rounds(row.run_id))
    stages = {name: sum(one.stages.get(name, 0.0) for one in told) for one in told for name in one.stages}
    took, unaccounted = sum(one.seconds for one in told), sum(one.stages.get(UNACCOUNTED, 0.0) for one in told)
    found = {
        "clients": preset.clients, "rounds": len(told), "seconds": took, "cli_list_s": median(lists),
        "run_to_first_round_s": opened - before, "unaccounted_share": unaccounted / took, "stages": stages,
    }  # fmt: skip
    note(f"real: {found}")
    return found


def sim(preset: Preset) -> dict[str, Any]:
    """Simulate rounds of clients that do nothing, in one process."""
    clients, selected, rounds = preset.simulated
    words = ["-m", "benchmarks.simulated_rounds", "noop", str(clients), str(selected), str(rounds), "1"]
    measured = _json([sys.executable, *words], preset.limit_s)
    round_s, round_cpu_s = (median(measured[name][1:]) for name in ("seconds", "cpu_s"))
    found = {
        "clients": clients, "selected": selected, "client_round_ms": 1000 * round_s / selected,
        "client_round_cpu_ms": 1000 * round_cpu_s / selected,
    }  # fmt: skip
    note(f"sim: {found}")
    return found


def _thinwire(*words: str) -> list[str]:
    return [sys.executable, "-m", "thinwire.cli", *words]


def _call(*words: str, within_s: float = WITHIN_S) -> float:
    """Run a command to its end; return its seconds."""
    began = time.perf_counter()
    done = subprocess.run(_thinwire(*words), capture_output=True, text=True, timeout=within_s, check=False)
    if done.returncode:
        raise RuntimeError(f"thinwire {words[0]} ended with {done.returncode}:\n{done.stderr}")
    return time.perf_counter() - began


def _json(command: list[str], within_s: float) -> dict[str, Any]:
    """Run a program that prints one JSON line at its end."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=False, env=env)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _idle(folder: Path) -> bool:
    at = ClientStatus.load(folder)
    return at is not None and at.state == "idle"


def main() -> None:
    """Measure the parts that are requested, and print the document."""
    parser = arguments("endurance", __doc__ or "", PRESETS)
    parser.add_argument("--part", action="append", choices=PARTS, help="this part only; repeatable")
    given = parser.parse_args()
    end_what_we_started()
    with tempfile.TemporaryDirectory(prefix="thinwire-bench-", ignore_cleanup_errors=True) as name:
        rows, figures = measure(PRESETS[given.preset], Path(name), given.part or PARTS)
    show(document("endurance", given.preset, rows, figures), given.json)


if __name__ == "__main__":
    main()
