"""A secure round's price: process CPU of one client and of the aggregator, bytes of a client, and memory of both sides,
with Flower's SecAgg+ on the same work in the same run.

python -m benchmarks.secure_sum --preset small --json

A row is one case and one system. `client_cpu_s` is one client's user and system time in all threads: keys, shares,
the checks of all phases, and from the float32 update to the packed bytes (`client_vector_cpu_s`: encoding, all masks,
packing). `server_cpu_s` is the aggregator's: it adds the survivors' vectors, rebuilds secrets, removes the masks, also
those that drop-outs have in common with survivors, and decodes. `uplink_bytes` are all bytes of a client: keys, shares,
escrow, masked vectors, signature, disclosed shares. `*_peak_models` is the most memory of a phase in models of float32,
what it is given included, and what the aggregator maps of a vector's file.

Each measurement is a process of its own; a row has the medians of `repeats`, but a slow case is measured once.
`secure_cohort.py` says what of our round is real, `secagg_plus.py` the same of Flower's. Flower's rows, and the ratios,
are missing where flwr is not installed.

Figures, theirs over ours, at the first cohort of the preset: `client_cpu_ratio` and `server_cpu_ratio` (no rotation;
`server_cpu_ratio_drop` with the most drop-outs), `bytes_ratio_dense` (8 bits and rotation, against int64 as SecAgg+
sends it), `bytes_ratio_modulus` (against 4 bytes a parameter, which its modulus of 2^32 needs), `bytes_ratio_support`
(a support of 0.1). `server_peak_models` and `client_peak_models` are the most of all our rows of that size. Neither the
time of a whole secure round nor the accuracy that a support costs is measured here.

The small preset takes two minutes on two free cores; the full one takes hours, nearly all of them Flower's. The
`committed` preset has all of our rows of the full one, and those of Flower's that take minutes: 25.56 M parameters with
10 clients, and 1 M with 10, 50 and 100. It takes an hour. The `crossed` preset has each option with each other one, of
10 clients and 25.56 M parameters, and five repeats of every row. It takes an hour too. The `figures` preset has the
rows of the figures alone, likewise five times: ten minutes in which nothing else should run.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import secure_cohort
from benchmarks.document import note
from benchmarks.entry import Measured, run_in_folder
from benchmarks.secure_case import Case

RESNET_50 = 25_557_032
OURS, THEIRS = "thinwire", "flwr"
ROTATED = {"rotate": 1 << 16}
SPARSE = {"support": 0.1, **ROTATED}
HYBRID = {"post_quantum": True}
OPTIONS: tuple[dict[str, Any], ...] = (  # one axis at a time, and what the figures need
    {"bits": 4}, {"support": 0.1}, {"support": 0.01}, {"rotate": 1 << 12}, {"rotate": 1 << 14}, ROTATED, SPARSE, HYBRID,
    {**ROTATED, "dropout": 0.3}, {**SPARSE, "dropout": 0.3}, {**HYBRID, "dropout": 0.3},
)  # fmt: skip
CROSSED = tuple(
    {"bits": bits, "support": support, "rotate": rotate, "post_quantum": hybrid, "dropout": dropout}
    for bits, support, rotate, hybrid, dropout in product(
        (8, 4), (1.0, 0.1, 0.01), (0, 1 << 12, 1 << 14, 1 << 16), (False, True), (0.0, 0.1, 0.3)
    )
    if (bits, support, rotate, hybrid) != (8, 1.0, 0, False)  # the plain case has all drop-outs already
)
ONCE = "import sys; from benchmarks.secure_sum import once; once(*sys.argv[1:])"
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Preset:
    """`cohorts` (clients, parameters) are measured plainly with all `dropouts`, on both sides; and with each of
    `options`, on ours: the first `varied` of them. Flower's rows are those whose masks, clients^2 x parameters, are at
    most `most_masks`. A case whose measurement takes longer than `slow_s` seconds is measured once.
    """

    cohorts: tuple[tuple[int, int], ...]
    dropouts: tuple[float, ...] = (0.0, 0.3)
    options: tuple[dict[str, Any], ...] = OPTIONS
    varied: int = 1
    repeats: int = 5
    most_masks: float = math.inf
    slow_s: float = 60.0

    def cases(self) -> Iterator[tuple[str, Case]]:
        """Give the system and the case of each row."""
        for number, cohort in enumerate(self.cohorts):
            plain = [Case(*cohort, dropout=dropout) for dropout in self.dropouts]
            yield from ((OURS, case) for case in plain)
            if cohort[0] ** 2 * cohort[1] <= self.most_masks:
                yield from ((THEIRS, case) for case in plain)
            if number < self.varied:
                yield from ((OURS, replace(plain[0], **option)) for option in self.options)


PRESETS = {
    "tiny": Preset(((4, 20_000),), options=(SPARSE, ROTATED, {**HYBRID, "dropout": 0.3}), repeats=1),
    "small": Preset(((10, RESNET_50), (10, 1_000_000)), options=(SPARSE, ROTATED, HYBRID), repeats=3),
    "full": (FULL := Preset(
        tuple((clients, size) for clients in (10, 50, 100) for size in (RESNET_50, 1_000_000)), (0.0, 0.1, 0.3),
        varied=6,
    )),
    "committed": replace(FULL, repeats=3, most_masks=1e10, slow_s=15.0),
    "figures": (TEN := Preset(((10, RESNET_50),), (0.0, 0.1, 0.3), (SPARSE, ROTATED), slow_s=math.inf)),
    "crossed": replace(TEN, options=CROSSED),
}  # fmt: skip


def measure(preset: Preset, folder: Path) -> Measured:
    there = importlib.util.find_spec("flwr") is not None
    rows = list[dict[str, Any]]()
    for system, case in preset.cases():
        if system == OURS or there:
            note(f"{system}: {case}")
            rows.append({"system": system, **asdict(case), **_measured(system, case, preset, folder)})
    return rows, figures(rows, preset)


def _measured(system: str, case: Case, preset: Preset, folder: Path) -> dict[str, Any]:
    found, began = list[dict[str, Any]](), time.monotonic()
    while len(found) < preset.repeats and (not found or time.monotonic() - began < preset.slow_s * len(found)):
        found.append(_once(system, case, folder))
    return {name: median(one[name] for one in found) for name in found[0]} | {"repeats": len(found)}


def _once(system: str, case: Case, folder: Path) -> dict[str, Any]:
    """Run a round in a process of its own."""
    command = [sys.executable, "-c", ONCE, system, json.dumps(asdict(case)), str(folder)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, check=True, text=True)
    made: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return made


def once(system: str, about: str, folder: str) -> None:
    """Run one round in this process, and print what it took."""
    case = Case(**json.loads(about))
    if system == OURS:
        made = secure_cohort.measure(case, Path(folder))
    else:
        from benchmarks import secagg_plus

        made = secagg_plus.measure(case, secure_cohort.threshold_of(case))
    print(json.dumps(made))


def figures(rows: list[dict[str, Any]], preset: Preset) -> dict[str, float]:
    """Return the figures of a preset; those that compare are missing without rows of flwr."""
    clients, params = preset.cohorts[0]
    made = {
        f"{end}_peak_models": max(
            row[f"{end}_peak_models"] for row in rows if row["system"] == OURS and row["params"] == params
        )
        for end in ("server", "client")
    }
    if not any(row["system"] == THEIRS for row in rows):
        return made
    found = {(row["system"], Case(**{name: row[name] for name in Case.__annotations__})): row for row in rows}
    plain = Case(clients, params)
    dropped = replace(plain, dropout=preset.dropouts[-1])

    def ratio(name: str, case: Case) -> float:
        return float(found[THEIRS, case][name] / found[OURS, case][name])

    def smaller(their_bytes: int, **option: Any) -> float:
        return float(their_bytes / found[OURS, replace(plain, **option)]["uplink_bytes"])

    sent = found[THEIRS, plain]["uplink_bytes"]
    return made | {
        "client_cpu_ratio": ratio("client_cpu_s", plain),
        "server_cpu_ratio": ratio("server_cpu_s", plain),
        "server_cpu_ratio_drop": ratio("server_cpu_s", dropped),
        "bytes_ratio_dense": smaller(sent, **ROTATED),
        "bytes_ratio_modulus": smaller(sent - 4 * params, **ROTATED),
        "bytes_ratio_support": smaller(sent, **SPARSE),
    }


if __name__ == "__main__":
    run_in_folder("secure_sum", __doc__, PRESETS, measure)
