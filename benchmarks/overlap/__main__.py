"""What delayed averaging gains where sending takes as long as training: with and without it, on the same lines.

    python -m benchmarks.overlap [--preset small|full] --json

Two devices with one torch thread each, an aggregator, and a line for each device, all real processes on this machine.
First the devices run alone without a line: that gives c, what a round computes, and with it the rate at which the
model's way there and back takes as long. Then the same plan runs on such lines without and with
`[local] overlap = { max_delay = 1 }`. `ideal` is (c + t) / max(c, t) from the c and t of the run without.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.document import document, note, show
from benchmarks.overlap.site import Devices, Took, medians
from benchmarks.processes import Processes

DEVICES, TRIAL_STEPS = 2, 20
LEAST_S = 4.0  # both c and t, for figures that decide anything


@dataclass(frozen=True)
class Preset:
    """`compute_s` is what a round is made to compute; `rounds` are counted after `warm_up` others."""

    compute_s: float
    rounds: int
    warm_up: int = 2


PRESETS = {"tiny": Preset(0.2, 2, 1), "small": Preset(1.0, 5, 1), "full": Preset(6.0, 10)}


def plan_of(rounds: int, steps: int, overlap: bool) -> dict[str, Any]:
    local: dict[str, Any] = {"lr": 0.05, "steps": steps, "batch": 64, "codec_threads": 1}
    return {
        "run": {"task": "wide", "rounds": rounds, "seed": 1, "metric": "accuracy"},
        "cohort": {"wait_for": DEVICES, "min_replies": float(DEVICES), "deadline_s": 600.0},
        "local": {**local, "overlap": {"max_delay": 1}} if overlap else local,
        "uplink": {"codec": "int8"},
    }


def measure(preset: Preset, folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    within_s = 120 + 60 * preset.compute_s * (preset.rounds + preset.warm_up)
    with Processes(_made(folder / "trial")) as processes:
        devices = Devices(folder / "trial", processes, DEVICES, 0.0)
        trial = devices.run(plan_of(3, TRIAL_STEPS, overlap=False), within_s)
        steps = max(1, round(TRIAL_STEPS * preset.compute_s / median(trial.compute[DEVICES:])))
        alone = devices.run(plan_of(3, steps, overlap=False), within_s)
        devices.store.close()
    compute_s = median(alone.compute[DEVICES:])
    bytes_per_s = (alone.up_bytes + alone.down_bytes) / compute_s
    note(f"{steps} steps compute {compute_s:.2f} s; lines of {8e-6 * bytes_per_s:.1f} Mb/s")
    took = dict[bool, Took]()
    for overlap in (False, True):
        name = "overlap" if overlap else "plain"
        with Processes(_made(folder / name)) as processes:
            devices = Devices(folder / name, processes, DEVICES, bytes_per_s)
            took[overlap] = devices.run(plan_of(preset.rounds + preset.warm_up, steps, overlap), within_s)
            devices.store.close()
        note(f"{name}: {medians(took[overlap].rounds, preset.warm_up):.2f} s a round")
    rows = [
        {"overlap": overlap, "round": number, "seconds": seconds}
        for overlap, one in took.items() for number, seconds in enumerate(one.rounds, 1)
    ]  # fmt: skip
    return rows, figures(took[False], took[True], preset, bytes_per_s, steps)


def figures(plain: Took, overlap: Took, preset: Preset, bytes_per_s: float, steps: int) -> dict[str, Any]:
    """What the rounds come to. `cpu_bound`: the cores, and not the line, were full in the run with overlap."""
    first = DEVICES * preset.warm_up
    c, t = median(plain.compute[first:]), median(plain.transfer[first:])
    without, with_it = medians(plain.rounds, preset.warm_up), medians(overlap.rounds, preset.warm_up)
    ideal = (c + t) / max(c, t)
    return {
        "speedup": without / with_it, "ideal": ideal, "share_of_ideal": without / with_it / ideal,
        "accuracy_gap": plain.accuracy - overlap.accuracy, "cpu_bound": overlap.busy > 0.95, "cpu_busy": overlap.busy,
        "compute_s": c, "transfer_s": t, "round_s": without, "round_overlap_s": with_it,
        "compute_overlap_s": median(overlap.compute[first:]), "accuracy": plain.accuracy,
        "accuracy_overlap": overlap.accuracy, "mbit_per_s": 8e-6 * bytes_per_s, "steps": steps,
        "shaped_by": "proxy", "decides": min(c, t) >= LEAST_S,
    }  # fmt: skip


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=__doc__.split("\n")[0])
    parser.add_argument("--preset", choices=sorted(PRESETS), default="small")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what we started ends with us
    with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as folder:
        rows, found = measure(PRESETS[chosen.preset], Path(folder))
    show(document("overlap", chosen.preset, rows, found), chosen.json)


if __name__ == "__main__":
    main()
