"""Four runs on the same devices: together, against one after the other, and how even their shares are.

    python -m benchmarks.several_runs [--preset tiny|small|full] --json

Ten devices on a virtual clock. An assignment takes each of them a time that is drawn log-normally (sigma 0.5, median
10 s), and one takes ten times as long as the median. They do not train: their updates are made up, because only times
count here.

`speedup`: each of four runs has five devices a round; the seconds until all are done with one run at a
time (`max_runs = 1`) over those with all at once, the median of the seeds. `fairness`: four buffered runs, which always
want all devices (a synchronous one wants none while its round is open); the device-seconds of the one that had most
over those of the one that had least, each over its priority, once at equal priorities and once at 1, 2, 3 and 4; the
larger of the two, the median of the seeds.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import numpy as np

from benchmarks.entry import Measured, run_in_folder
from thinwire.core import Layout, RunPlan, VirtualClock
from thinwire.core.events import (
    ENDED,
    ClientFailed,
    ClientSelected,
    Event,
    RoundOpened,
    RunStatusChanged,
    UpdateAccepted,
)
from thinwire.core.fleet import TaskReport
from thinwire.core.owner_file import AggregatorFile
from thinwire.core.prng import Key, derive
from thinwire.core.statedir import AggregatorHome
from thinwire.core.types import Assignment, Vector
from thinwire.server.service import serve
from thinwire.server.submit import FirstModel, submit
from thinwire.simulation import Behavior, InMemorySpool, LogNormal, ScriptedDevice, ScriptedFleet, SyntheticUpdates
from thinwire.store import Store

DEVICES, RUNS, A_ROUND = 10, 4, 5
MEDIAN_S, SIGMA, SLOWER, JITTER = 10.0, 0.5, 10.0, 0.1
LAYOUT = Layout.of({"w": (30, 20)})
REPORT = TaskReport("toy", layout_digest=LAYOUT.digest)
PRIORITIES = ((1.0,) * RUNS, (1.0, 2.0, 3.0, 4.0))


@dataclass(frozen=True)
class Preset:
    seeds: int
    rounds: int
    window_s: float  # in which shares are counted


PRESETS = {"tiny": Preset(1, 2, 100.0), "small": Preset(3, 10, 3000.0), "full": Preset(5, 20, 6000.0)}


def device(name: str, seed: int, seconds: float) -> ScriptedDevice:
    """Return a device that takes about so many seconds for each assignment."""
    wobble = LogNormal(seconds, JITTER)

    def change(assignment: Assignment) -> Vector:
        return np.full(LAYOUT.size, 0.01 * assignment.round, np.float32)

    def behavior(assignment: Assignment) -> Behavior:
        return Behavior(compute_s=wobble.at(derive(Key(seed), "step", assignment.assignment_id)))

    return ScriptedDevice(name, SyntheticUpdates(name, LAYOUT, change), behavior)


def devices(seed: int) -> list[ScriptedDevice]:
    draw = Random(seed)
    speeds = [MEDIAN_S * draw.lognormvariate(0.0, SIGMA) for _ in range(DEVICES)]
    speeds[0] = MEDIAN_S * SLOWER
    return [device(f"d{index}", seed, seconds) for index, seconds in enumerate(speeds)]


def plan_of(seed: int, rounds: int, priority: float = 1.0, **cohort: Any) -> RunPlan:
    """Return a plan; `cohort` are keys of its section."""
    return RunPlan.from_json({
        "run": {"task": "toy", "rounds": rounds, "seed": seed, "evaluate": "off", "priority": priority},
        "cohort": {"deadline_s": 20 * MEDIAN_S * SLOWER, **cohort},
        "local": {"lr": 1.0},
    })  # fmt: skip


def served(
    folder: Path, seed: int, plans: Sequence[RunPlan], max_runs: int, window_s: float
) -> tuple[float, list[float]]:
    """Serve these runs, and return the seconds until all are over, or the window, and the device-seconds of each."""
    home, clock, ending = AggregatorHome.under(folder, durable=False), VirtualClock(), threading.Event()
    with Store.open(home.database, durable=False, clock=clock) as store:
        fleet = ScriptedFleet(InMemorySpool(home.spool), clock, REPORT, devices(seed))
        nothing, first = np.zeros(0, np.float32), np.zeros(LAYOUT.size, np.float32)
        runs = [submit(store, home, plan, FirstModel(LAYOUT, REPORT, first, nothing)) for plan in plans]
        poll, going = fleet.poll, set(runs)

        def heard(run_id: str, event: Event) -> None:
            if isinstance(event, RunStatusChanged) and event.status in ENDED:
                going.discard(run_id)

        def polled(wait_s: float) -> Any:
            if clock.now() >= window_s or not going:
                ending.set()
            return poll(wait_s)

        fleet.poll = polled  # type: ignore[method-assign]
        settings = AggregatorFile(max_runs=max_runs)
        serve(fleet, store, home, clock=clock, ending=ending, settings=settings, on_event=heard)
        return clock.now(), [device_seconds(store, run_id) for run_id in runs]


def device_seconds(store: Store, run_id: str) -> float:
    """Return the seconds that devices worked for a run, from their selection until their reply had arrived."""
    begins, total = dict[str, float](), 0.0
    for _, event in store.events(run_id):
        match event:
            case RoundOpened():
                begins |= dict.fromkeys(event.assignments.values(), event.at)
            case ClientSelected():
                begins.setdefault(event.assignment_id, event.at)
            case UpdateAccepted():
                arrived_at = (event.header.get("transfer") or {}).get("arrived_at") or event.at
                total += arrived_at - begins.pop(event.assignment_id, arrived_at)
            case ClientFailed():
                total += event.at - begins.pop(event.assignment_id, event.at)
    return total


def measure(preset: Preset, folder: Path) -> Measured:
    rows = list[dict[str, Any]]()
    for seed in range(preset.seeds):
        work = partial(served, seed=seed)
        cohort = {"clients": A_ROUND, "wait_for": DEVICES}
        plans = [plan_of(seed * RUNS + i, preset.rounds, **cohort) for i in range(RUNS)]
        alone_s, _ = work(folder / f"alone-{seed}", plans=plans, max_runs=1, window_s=1e9)
        together_s, _ = work(folder / f"together-{seed}", plans=plans, max_runs=RUNS, window_s=1e9)
        row = {"seed": seed, "alone_s": alone_s, "together_s": together_s}
        for name, priorities in zip(("equal", "weighted"), PRIORITIES, strict=True):
            endless = [
                plan_of(seed * RUNS + i, 100_000, p, clients="all", mode="buffered", buffer=A_ROUND)
                for i, p in enumerate(priorities)
            ]
            _, had = work(folder / f"{name}-{seed}", plans=endless, max_runs=RUNS, window_s=preset.window_s)
            shares = [seconds / priority for seconds, priority in zip(had, priorities, strict=True)]
            row[name] = max(shares) / max(min(shares), 1e-9)
        rows.append(row)
    speedup = median(row["alone_s"] / row["together_s"] for row in rows)
    return rows, {"speedup": speedup, "fairness": median(max(row["equal"], row["weighted"]) for row in rows)}


if __name__ == "__main__":
    run_in_folder("several_runs", __doc__, PRESETS, measure)
