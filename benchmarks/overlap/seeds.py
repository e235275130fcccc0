"""Measure what a delay of one round costs in accuracy: both plans on the same seeds, simulated, with equal rounds.

Ten clients share the digits by dirichlet(0.3), all selected in every round. One run on lines tells little of it: its
model is near its best by then, and one seed is one seed. Here numbers come from seeds, and no clock.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from statistics import fmean, stdev
from typing import Any

from benchmarks.document import note
from benchmarks.stragglers import TASK
from thinwire import simulate
from thinwire.core import RunPlan

CLIENTS, SPLIT = 10, "dirichlet(0.3)"
STEPS, LR = 50, 0.1
ON_LINES, SPARSE = "int8", "stc(0.04)"  # what the lines' plan sends, and what leaves most of a change for later
CODECS = (ON_LINES, SPARSE)
DELAYS = (0, 1)


def plan_of(codec: str, delay: int, rounds: int, seed: int) -> RunPlan:
    local: dict[str, Any] = {"lr": LR, "steps": STEPS}
    return RunPlan.from_json({
        "run": {"task": "digits", "rounds": rounds, "seed": seed, "metric": "accuracy"},
        "cohort": {"clients": "all", "deadline_s": 1e6},
        "local": {**local, "overlap": {"max_delay": delay}} if delay else local,
        "uplink": {"codec": codec, "feedback": "classic"},
    })  # fmt: skip


def measure(seeds: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each run: accuracy, the mean over the models of the last quarter of the rounds."""
    cells = list(product(range(1, seeds + 1), CODECS, DELAYS))
    if seeds == 1:  # sooner here than other processes have imported torch
        rows = [measure_one(*cell, rounds) for cell in cells]
    else:
        workers = len(os.sched_getaffinity(0))
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            rows = list(pool.map(measure_one, *zip(*((*cell, rounds) for cell in cells), strict=True)))
    note(f"accuracy over {seeds} seeds: {gaps(rows)}")
    return rows


def measure_one(seed: int, codec: str, delay: int, rounds: int) -> dict[str, Any]:
    """The versions that both plans measure: with overlap the one before the last is measured by nobody."""
    history = simulate(TASK, plan_of(codec, delay, rounds, seed), clients=CLIENTS, split=SPLIT)
    measured = range(rounds * 3 // 4, rounds - max(DELAYS))
    late = [row.metrics["accuracy"] for row in history.rounds if row.version in measured]
    last = history.metrics["accuracy"]
    return {"seed": seed, "uplink": codec, "delay": delay, "accuracy": fmean([*late, last]), "last": last}


def gaps(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Accuracy without less that with overlap on the same seed: its mean, and that mean's standard error.

    `accuracy_gap` is of what the lines' plan sends, `accuracy_gap_sparse` of a sparse one.
    """
    of = {(row["uplink"], row["seed"], row["delay"]): row["accuracy"] for row in rows}
    seeds, found = sorted({row["seed"] for row in rows}), dict[str, float]()
    for codec, name in ((ON_LINES, "accuracy_gap"), (SPARSE, "accuracy_gap_sparse")):
        each = [of[codec, seed, 0] - of[codec, seed, 1] for seed in seeds]
        found[name] = fmean(each)
        if len(each) > 1:
            found[f"{name}_error"] = stdev(each) / len(each) ** 0.5
    return found
