"""Measure what delayed averaging gains where sending takes as long as training: with and without it, on the same lines.

    python -m benchmarks.overlap [--preset small|full] [--shaped-by netns|proxy] --json

Two devices with one torch thread each, an aggregator, and a line for each device, all real processes on this machine:
in network namespaces whose lines the kernel shapes (tc tbf, both ways) where these are allowed, else through a proxy;
`shaped_by` says which, and `why_proxy` why. Over namespaces devices join and speak TLS.
First the devices run alone without a line: that gives c, what a round computes, and with it the rate at which the
model's way there and back takes as long. Then the same plan runs on such lines without and with
`[local] overlap = { max_delay = 1 }`. `ideal` is (c + t) / max(c, t) from the c and t of the run without.
What the delay costs in accuracy is simulated, on several seeds: seeds.py.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.document import document, note, show
from benchmarks.entry import arguments, end_what_we_started
from benchmarks.overlap import seeds
from benchmarks.overlap.site import Devices, Took, medians
from benchmarks.overlap.ways import way
from benchmarks.processes import Processes
from tests.support.shaped import why_not

NAMES = ("device-0", "device-1")
DEVICES = len(NAMES)
LEAST_S = 4.0  # both c and t, for figures that decide anything


@dataclass(frozen=True)
class Preset:
    """`compute_s` is what a round is made to compute; `rounds` are counted after `warm_up` others.

    `seeds` and `seed_rounds`: of the simulation that accuracy is compared in. `trial_steps`: of a round from which
    it is learned how long a step takes.
    """

    compute_s: float
    rounds: int
    warm_up: int
    seeds: int
    seed_rounds: int
    trial_steps: int = 20


PRESETS = {
    "tiny": Preset(0.05, 1, 1, seeds=1, seed_rounds=1, trial_steps=3),
    "small": Preset(1.0, 5, 1, seeds=3, seed_rounds=40),
    "full": Preset(6.0, 10, 2, seeds=10, seed_rounds=40),
}  # fmt: skip


def plan_of(rounds: int, steps: int, overlap: bool) -> dict[str, Any]:
    local: dict[str, Any] = {"lr": 0.05, "steps": steps, "batch": 64, "codec_threads": 1}
    return {
        "run": {"task": "wide", "rounds": rounds, "seed": 1, "metric": "accuracy"},
        "cohort": {"wait_for": DEVICES, "min_updates": float(DEVICES), "deadline_s": 600.0},
        "local": {**local, "overlap": {"max_delay": 1}} if overlap else local,
        "uplink": {"codec": "int8", "feedback": "classic"},
    }


def measure(preset: Preset, folder: Path, shaped_by: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    within_s = 120 + 60 * preset.compute_s * (preset.rounds + preset.warm_up)
    with here(folder / "trial", shaped_by, 0.0) as devices:
        trial = devices.run(plan_of(3, preset.trial_steps, overlap=False), within_s)
        steps = max(1, round(preset.trial_steps * preset.compute_s / median(trial.compute[DEVICES:])))
        alone = devices.run(plan_of(3, steps, overlap=False), within_s)
    compute_s = median(alone.compute[DEVICES:])
    bytes_per_s = (alone.up_bytes + alone.down_bytes) / compute_s
    note(f"{steps} steps compute {compute_s:.2f} s; lines of {8e-6 * bytes_per_s:.1f} Mb/s, by {shaped_by}")
    took = dict[bool, Took]()
    with here(folder / "lines", shaped_by, bytes_per_s) as devices:
        for overlap in (False, True):
            took[overlap] = devices.run(plan_of(preset.rounds + preset.warm_up, steps, overlap), within_s)
            name = "overlap" if overlap else "plain"
            note(f"{name}: {medians(took[overlap].rounds, preset.warm_up):.2f} s a round")
    rows = [
        {"overlap": overlap, "round": number, "seconds": seconds}
        for overlap, one in took.items() for number, seconds in enumerate(one.rounds, 1)
    ]  # fmt: skip
    found = figures(took[False], took[True], preset, bytes_per_s, steps)
    return rows, {**found, "shaped_by": shaped_by}


@contextmanager
def here(folder: Path, shaped_by: str, bytes_per_s: float) -> Iterator[Devices]:
    """An aggregator and its devices, which end with it."""
    folder.mkdir()
    with way(shaped_by, list(NAMES), bytes_per_s) as by, Processes(folder) as processes:
        devices = Devices(folder, processes, NAMES, by)
        try:
            yield devices
        finally:
            devices.store.close()


def figures(plain: Took, overlap: Took, preset: Preset, bytes_per_s: float, steps: int) -> dict[str, Any]:
    """Return the figures of the rounds. `cpu_bound`: the cores, and not the line, were full in the run with overlap."""
    first = DEVICES * preset.warm_up
    c, t = median(plain.compute[first:]), median(plain.transfer[first:])
    without, with_it = medians(plain.rounds, preset.warm_up), medians(overlap.rounds, preset.warm_up)
    ideal = (c + t) / max(c, t)
    return {
        "speedup": without / with_it, "ideal": ideal, "share_of_ideal": without / with_it / ideal,
        "accuracy_gap_on_lines": plain.accuracy - overlap.accuracy,
        "cpu_bound": overlap.busy > 0.95, "cpu_busy": overlap.busy,
        "compute_s": c, "transfer_s": t, "round_s": without, "round_overlap_s": with_it,
        "compute_overlap_s": median(overlap.compute[first:]), "accuracy": plain.accuracy,
        "accuracy_overlap": overlap.accuracy, "mbit_per_s": 8e-6 * bytes_per_s, "steps": steps,
        "decides": min(c, t) >= LEAST_S,
    }  # fmt: skip


def main() -> None:
    parser = arguments("overlap", __doc__, PRESETS)
    parser.add_argument("--shaped-by", choices=("netns", "proxy"), help="default: netns where that is allowed")
    given = parser.parse_args()
    end_what_we_started()
    why = "chosen" if given.shaped_by == "proxy" else why_not()
    if why and given.shaped_by == "netns":
        parser.error(why)
    preset = PRESETS[given.preset]
    with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as folder:
        rows, found = measure(preset, Path(folder), "proxy" if why else "netns")
    if why:
        found["why_proxy"] = why
    of_seeds = seeds.measure(preset.seeds, preset.seed_rounds)
    show(document("overlap", given.preset, rows + of_seeds, {**found, **seeds.gaps(of_seeds)}), given.json)


if __name__ == "__main__":
    main()
