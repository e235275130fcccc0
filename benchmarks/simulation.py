"""A simulated round beside one of Flower's own simulation (Ray): the same work, on one machine, in one run, by turns.

    python -m benchmarks.simulation [--preset small|full] [--flower PYTHON] --json

Two works, with 10 000 parameters each way: `noop` gives back what came, `mlp` trains the digits MLP for 50 steps. Ours
is the complete path: journal, outbox, spool, database, fold, step and a model file a round. Flower's sends and
receives, averages nothing and stores nothing, and its clients keep their data between rounds, all in its favour. Each
side counts with its best of one and two workers (processes here, actors there). A round's seconds are the median of all
but the first; `around_s` is all the rest, from the start of the process to its end. `load_before` is the machine's load
in the minute before: where it is not near 0, other work took its part of both sides.

Flower's side needs `flwr[simulation]`, which brings Ray: it is installed into an environment of its own that is removed
afterwards, or `--flower` names the Python of one that is there. Where it cannot be installed ours is measured alone,
and a row says why.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.document import document, note, show
from benchmarks.entry import arguments
from benchmarks.processes import Processes, tree_bytes
from benchmarks.throwaway import NotInstallable, lend, made

FLOWER = "flwr[simulation]==1.41.*"
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
WITHIN_S = 900.0
LOOK_S = 0.25  # between two looks at the memory
OURS, THEIRS = "thinwire", "flower"


@dataclass(frozen=True)
class Case:
    work: str
    clients: int
    selected: int
    rounds: int


@dataclass(frozen=True)
class Preset:
    few: Case  # a no-op round of few clients
    many: Case  # of a hundred among a thousand
    mlp: Case
    workers: Sequence[int] = (1, 2)
    flower: bool = True

    @property
    def cases(self) -> Sequence[tuple[str, Case]]:
        return ("few", self.few), ("many", self.many), ("mlp", self.mlp)


PRESETS = {
    "tiny": Preset(Case("noop", 2, 1, 2), Case("noop", 8, 4, 2), Case("mlp", 2, 1, 2), (1,), flower=False),
    "small": Preset(Case("noop", 20, 4, 30), Case("noop", 1000, 100, 5), Case("mlp", 20, 4, 20)),
    "full": Preset(Case("noop", 20, 4, 100), Case("noop", 1000, 100, 20), Case("mlp", 20, 4, 100)),
}


@dataclass
class Measured:
    rows: list[dict[str, Any]] = field(default_factory=list)

    def best(self, side: str, case: str, what: str = "round_s") -> float | None:
        found = [row[what] for row in self.rows if row.get("side") == side and row["case"] == case]
        return min(found, default=None)


def measure(preset: Preset, flower: Path | None, folder: Path, wanted: Sequence[str] = ()) -> Measured:
    """Each case (or each of those `wanted`) by each side with each number of workers; the sides take turns."""
    measured = Measured()
    for name, case in preset.cases:
        if wanted and name not in wanted:
            continue
        numbers = [str(number) for number in (case.clients, case.selected, case.rounds)]
        for workers in preset.workers:
            sides = {OURS: [sys.executable, "-m", "benchmarks.simulated_rounds"]}
            if flower is not None:
                sides[THEIRS] = [str(flower), "-m", "benchmarks.flower_simulation.rounds"]
            for side, command in sides.items():
                note(f"{name}: {side} with {workers} workers")
                row = run([*command, case.work, *numbers, str(workers)], folder)
                measured.rows.append({"side": side, "case": name, **vars(case), "workers": workers, **row})
    return measured


def run(command: Sequence[str], folder: Path) -> dict[str, float]:
    """Seconds of a round and of all around them, and the most memory that it and its children held together."""
    env = {**QUIET, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    began, peak = time.perf_counter(), 0
    with Processes(folder) as processes:
        pid = processes.start("rounds", command, env)
        while processes.running(pid):
            peak = max(peak, tree_bytes(pid))
            if time.perf_counter() - began > WITHIN_S:
                raise RuntimeError(f"no end after {WITHIN_S:.0f} s: {' '.join(command)}")
            time.sleep(LOOK_S)
        lines = processes.log("rounds").read_text(errors="replace").splitlines()
    found = [json.loads(line) for line in lines if line.startswith('{"seconds"')]
    if not found:
        raise RuntimeError("\n".join(["it ended without a figure:", *lines[-15:]]))
    seconds = found[-1]["seconds"]
    spent = time.perf_counter() - began
    return {"round_s": median(seconds[1:]), "around_s": spent - sum(seconds[1:]), "peak_mb": peak / 1e6}


def figures(measured: Measured, preset: Preset) -> dict[str, float]:
    found: dict[str, float | None] = {}
    for figure, case in (("sim_overhead_ratio", "few"), ("sim_overhead_ratio_thousand", "many"), ("sim_ratio", "mlp")):
        ours, theirs = measured.best(OURS, case), measured.best(THEIRS, case)
        found[figure] = theirs / ours if ours and theirs else None
        found[f"round_s {case}"], found[f"flower_round_s {case}"] = ours, theirs
    for side, prefix in ((OURS, ""), (THEIRS, "flower_")):
        many = measured.best(side, "many")
        found[f"{prefix}client_rounds_per_s"] = preset.many.selected / many if many else None
        found[f"{prefix}peak_mb"] = measured.best(side, "many", "peak_mb")
        found[f"{prefix}around_s"] = measured.best(side, "many", "around_s")
    return {name: value for name, value in found.items() if value is not None}


def main() -> None:
    parser = arguments("simulation", __doc__, PRESETS)
    parser.add_argument("--flower", type=Path, help=f"the Python of an environment with {FLOWER}")
    parser.add_argument("--case", action="append", choices=("few", "many", "mlp"), help="this one only; repeatable")
    given = parser.parse_args()
    preset, busy = PRESETS[given.preset], os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="thinwire-bench-", ignore_cleanup_errors=True) as name:
        folder, flower, skipped = Path(name), given.flower, ""
        if flower is not None:
            lend(flower)
        elif preset.flower:
            note(f"installing {FLOWER} into an environment of its own")
            try:
                flower = made(folder / "flower", FLOWER)
            except (NotInstallable, OSError, subprocess.SubprocessError) as error:
                skipped = str(error)
                note(f"Flower's side is skipped: {skipped}")
        measured = measure(preset, flower, folder, given.case or ())
        if skipped:
            measured.rows.append({"case": "flower", "skipped": skipped})
    made_of = {**figures(measured, preset), "load_before": busy}
    show(document("simulation", given.preset, measured.rows, made_of), given.json)


if __name__ == "__main__":
    main()
