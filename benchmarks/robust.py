"""Robust aggregation: accuracy with 30 % hostile clients, and what reductions cost beside Flower's.

    python -m benchmarks.robust [--preset tiny|small|digits|full] [--cells FILE] --json

Twenty clients train the digits' MLP and a CNN, iid and by dirichlet(1.0); six are hostile. Attacks: sign flip (times
4), gaussian, ALIE, IPM, label flip, scaled backdoor. Updates are sent as float32 and the learning rate is the same in
all cells. Simulated: all accuracies come from seeds, and no clock. The full preset runs all reductions on the digits,
and `NAMED` beside the mean on the CNN: two core-hours; `digits` has neither the CNN nor unequal data. With `--cells`
each run is appended to a file, and a run that is in it is not made again.

`worst_gap_30` is the accuracy of the mean without hostile clients less that of `NAMED` under an attack: the largest
mean over the seeds, of all attacks and tasks, iid. `NAMED` was written down before the full preset ran. The rows of
`honest` tell how much of a gap is that of training without the data of hostile clients.
`backdoor_success` is the share of stamped test images of other classes that the model of `NAMED` takes for the target.
`seconds_ratio_flower` is Flower's time over ours, the least of its four functions. `peak_models` is the most resident
memory of a round above its model, in models: cohorts of 10 and 100, dense and sparse updates. `flower_apart` is the
largest difference to Flower's functions on the same vectors, in all runs.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.document import document, note, show
from benchmarks.entry import arguments, end_what_we_started
from benchmarks.robust_cost import memory, seconds
from benchmarks.robust_rounds import ATTACKS, REDUCTIONS, measure_one

NAMED = "median"
FIRST_SEED = 11  # seed 1 was looked at before
IID = "iid"
PLAIN = ("mean", NAMED)
NAMES = ("task", "split", "attack", "reduce", "seed", "rounds")  # of a run


@dataclass(frozen=True)
class Preset:
    """Sets what is run: `reductions` are those of each task."""

    reductions: Mapping[str, Sequence[str]] = field(default_factory=lambda: {"digits": PLAIN})
    splits: Sequence[str] = (IID,)
    attacks: Sequence[str] = tuple(ATTACKS)
    seeds: int = 1
    rounds: int = 40
    params: int = 25_000_000
    cohorts: tuple[int, ...] = (10, 100)


PRESETS = {
    "tiny": Preset({"digits": (NAMED,)}, attacks=("backdoor",), rounds=1, params=50_000, cohorts=(10,)),
    "small": Preset(params=5_000_000),
    "digits": Preset({"digits": REDUCTIONS}, seeds=5),
    "full": Preset({"digits": REDUCTIONS, "cnn": PLAIN}, (IID, "dirichlet(1.0)"), seeds=5),
}


def measure(preset: Preset, workers: int, file: Path | None = None) -> list[dict[str, Any]]:
    """Return the rows of all runs, those in `file` as they are; the mean without hostile clients is always one."""
    seeds = range(FIRST_SEED, FIRST_SEED + preset.seeds)
    cells = [
        (task, split, attack, spec, seed, preset.rounds)
        for task, specs in preset.reductions.items()
        for split, (attack, spec), seed in product(
            preset.splits, [("none", "mean"), *product(preset.attacks, specs)], seeds
        )
    ]
    rows = {_cell(row): row for row in map(json.loads, file.read_text().splitlines())} if file and file.exists() else {}
    missing = [cell for cell in dict.fromkeys(cells) if cell not in rows]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        do = pool.map if len(missing) > workers else map
        for row in do(measure_one, *zip(*missing, strict=True)) if missing else ():
            note(f"{row['task']}, {row['split']}, {row['attack']}, {row['reduce']}: {row['accuracy']:.3f}")
            rows[_cell(row)] = row
            if file:
                with file.open("a") as out:
                    out.write(json.dumps(row) + "\n")
    return [{"what": "accuracy", **rows[cell]} for cell in dict.fromkeys(cells)]


def _cell(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in NAMES)


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the figures that follow from the rows."""
    of = {name: [row for row in rows if row["what"] == name] for name in ("accuracy", "seconds", "memory")}
    plain = {
        (row["task"], row["split"], row["seed"]): row["accuracy"]
        for row in of["accuracy"]
        if (row["attack"], row["reduce"]) == ("none", "mean")
    }
    gaps, turned = defaultdict[tuple[str, str], list[float]](list), defaultdict[str, list[float]](list)
    for row in of["accuracy"]:
        if row["split"] == IID and row["reduce"] == NAMED and row["attack"] != "none":
            gap = plain[row["task"], row["split"], row["seed"]] - row["accuracy"]
            gaps[row["task"], row["attack"]].append(gap)
            if row["attack"] == "backdoor":
                turned[row["task"]].append(row["backdoor"])
    found = {"worst_gap_30": max(map(fmean, gaps.values()))}
    if turned:
        found["backdoor_success"] = max(map(fmean, turned.values()))
    found["seconds_ratio_flower"] = min(row["ratio"] for row in of["seconds"])
    found["peak_models"] = max(row["peak_models"] for row in of["memory"])
    found["flower_apart"] = max(row["flower_apart"] for row in (*of["accuracy"], *of["seconds"]))
    return found


def main() -> None:
    parser = arguments("robust", __doc__ or "", PRESETS)
    parser.add_argument("--cells", type=Path, metavar="FILE", help="keep each run in this file of JSON lines")
    given = parser.parse_args()
    end_what_we_started()
    preset = PRESETS[given.preset]
    rows = measure(preset, len(os.sched_getaffinity(0)), given.cells)
    with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as folder:
        rows += seconds(preset.params, Path(folder))
        rows += memory(preset.params, preset.cohorts, Path(folder))
    show(document("robust", given.preset, rows, figures(rows)), given.json)


if __name__ == "__main__":
    main()
