"""Measure the gain of correcting drift where data differ: FedAvg, FedProx, SCAFFOLD and FedDyn on the digits.

    python -m benchmarks.drift [--preset small|full] --json

Ten clients share the digits by dirichlet(0.1) and three of them are selected in a round, for 50 steps with the same
learning rate, with the whole update up and with `stc(0.04)`. Accuracy and loss are means over the models of the last
quarter of the rounds, on all clients' test splits; bytes are payloads up. Simulated: all numbers come from seeds, and
no clock.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from statistics import fmean, stdev
from typing import Any

from benchmarks.document import document, note, show
from benchmarks.entry import arguments, end_what_we_started
from benchmarks.stragglers import TASK
from thinwire import simulate
from thinwire.core import RunPlan

CLIENTS, ASKED, SPLIT = 10, 3, "dirichlet(0.1)"
STEPS, LR = 50, 0.1
CODECS = ("identity", "stc(0.04)")
FEDAVG = "fedavg"
SETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    FEDAVG: {},
    "fedavg, prox = 0.1": {"local": {"prox": 0.1}},
    "scaffold": {"run": {"algorithm": "scaffold"}},
    "feddyn": {"run": {"algorithm": "feddyn"}},
    "feddyn, alpha = 0.01": {"run": {"algorithm": "feddyn", "alpha": 0.01}},
}


@dataclass(frozen=True)
class Preset:
    seeds: int
    rounds: int


PRESETS = {"tiny": Preset(1, 4), "small": Preset(3, 30), "full": Preset(10, 30)}


def plan_of(algorithm: str, codec: str, rounds: int, seed: int) -> RunPlan:
    raw: dict[str, dict[str, Any]] = {
        "run": {"task": "digits", "rounds": rounds, "seed": seed},
        "cohort": {"clients": ASKED, "late": "drop", "max_weight": "none"},
        "local": {"lr": LR, "steps": STEPS},
        "uplink": {"codec": codec},
    }
    return RunPlan.from_json({name: {**table, **SETS[algorithm].get(name, {})} for name, table in raw.items()})


def measure(preset: Preset, workers: int) -> list[dict[str, Any]]:
    cells = [
        (algorithm, codec, preset.rounds, seed)
        for seed, codec, algorithm in product(range(1, preset.seeds + 1), CODECS, SETS)
    ]
    rows = []
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for row in pool.map(measure_one, *zip(*cells, strict=True)):
            note(f"seed {row['seed']}, {row['uplink']}, {row['algorithm']}: {row['accuracy']:.3f}")
            rows.append(row)
    return rows


def measure_one(algorithm: str, codec: str, rounds: int, seed: int) -> dict[str, Any]:
    history = simulate(TASK, plan_of(algorithm, codec, rounds, seed), clients=CLIENTS, split=SPLIT)
    late = [one.metrics for one in history.rounds[-(rounds // 4) :]]
    return {
        "algorithm": algorithm, "uplink": codec, "seed": seed,
        **{name: fmean(metrics[name] for metrics in late) for name in ("accuracy", "loss")},
        "payload_up": sum(one.payload_up for one in history.rounds),
    }  # fmt: skip


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """`gain`: points of accuracy over FedAvg on the same seed and with the same codec, mean and standard error."""
    of = {(row["algorithm"], row["uplink"], row["seed"]): row for row in rows}
    seeds, found = sorted({row["seed"] for row in rows}), dict[str, float]()
    for algorithm, codec in product(SETS, CODECS):
        each = [of[algorithm, codec, seed] for seed in seeds]
        name = f"{algorithm} {codec}"
        found |= {f"{what} {name}": fmean(row[what] for row in each) for what in ("accuracy", "loss", "payload_up")}
        if algorithm == FEDAVG:
            continue
        gains = [100 * (row["accuracy"] - of[FEDAVG, codec, row["seed"]]["accuracy"]) for row in each]
        found[f"gain {name}"] = fmean(gains)
        if len(gains) > 1:
            found[f"gain_error {name}"] = stdev(gains) / len(gains) ** 0.5
    return found


def main() -> None:
    given = arguments("drift", __doc__, PRESETS).parse_args()
    end_what_we_started()
    rows = measure(PRESETS[given.preset], len(os.sched_getaffinity(0)))
    show(document("drift", given.preset, rows, figures(rows)), given.json)


if __name__ == "__main__":
    main()
