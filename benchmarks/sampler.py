"""Draws of privacy noise: the discrete Gaussian and Skellam from tables, one thread, with the AES that they read.

    python -m benchmarks.sampler [--preset small|full] --json

`ns_per_draw_SIGMA` is the time of a discrete Gaussian draw of this standard deviation, `ns_per_draw_skellam` that of
the slowest of three Skellam samplers: medians of fills of one array of int32. Goal: 30. It is CPU time of the one
thread, so that other programs on the machine change it less; rows have elapsed time too (`elapsed_ns_per_draw`). Rows
also have the time to build the table, its bytes, the time of a draw without the kernel, and that of an exact draw in
Python, which tests compare with.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.document import note
from benchmarks.entry import run_in_folder, timed_ms
from thinwire.compression.native import NUMPY, chosen, using
from thinwire.privacy.samplers import ExactSampler, TableSampler
from thinwire.privacy.secret_rng import SystemRng

SIGMAS = (16, 256, 4096)  # those of the goal
LARGE = 65536
EXACT_VARIANCE = 256  # an exact Skellam draw takes a time proportional to the variance


@dataclass(frozen=True)
class Preset:
    draws: int
    fills: int
    exact: int


PRESETS = {"tiny": Preset(10**5, 2, 20), "small": Preset(10**7, 5, 500), "full": Preset(10**7, 25, 5000)}


def measure(preset: Preset, folder: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return a row for each distribution and standard deviation, and the figures of the goal."""
    del folder  # all of it is in memory
    rows = [
        row_of(distribution, sigma, preset)
        for distribution in ("discrete_gaussian", "skellam")
        for sigma in (*SIGMAS, LARGE)
    ]
    found = {(row["distribution"], row["sigma"]): row["ns_per_draw"] for row in rows}
    figures = {f"ns_per_draw_{sigma}": found["discrete_gaussian", sigma] for sigma in SIGMAS}
    return rows, {**figures, "ns_per_draw_skellam": max(found["skellam", sigma] for sigma in SIGMAS)}


def row_of(distribution: str, sigma: int, preset: Preset) -> dict[str, Any]:
    """Return what one sampler takes."""
    began = time.perf_counter()
    sampler: TableSampler = getattr(TableSampler, distribution)(float(sigma**2))
    build_ms = 1000 * (time.perf_counter() - began)
    out, rng = np.zeros(preset.draws, np.int32), SystemRng()
    sampler.fill(out, rng)  # a warm-up: pages, caches, the key
    cpu_ns, elapsed_ns = [], []
    for _ in range(preset.fills):
        began = time.thread_time()
        elapsed_ns.append(1e6 * timed_ms(lambda: sampler.fill(out, rng)) / preset.draws)
        cpu_ns.append(1e9 * (time.thread_time() - began) / preset.draws)
    few = out[: max(1, preset.draws // 10)]
    with using(NUMPY):
        numpy_ns = 1e6 * timed_ms(lambda: sampler.fill(few, rng)) / few.size
    row = {
        "distribution": distribution,
        "sigma": sigma,
        "ns_per_draw": statistics.median(cpu_ns),
        "elapsed_ns_per_draw": statistics.median(elapsed_ns),
        "numpy_ns_per_draw": numpy_ns,
        "build_ms": build_ms,
        "table_bytes": sampler.thresholds.nbytes + sampler.lower.nbytes + sampler.guide.nbytes,
        "distance": sampler.distance,
        "path": chosen(),
    }
    if sigma**2 == EXACT_VARIANCE:
        draw = getattr(ExactSampler(rng), distribution)
        row["exact_us"] = 1e3 * timed_ms(lambda: [draw(EXACT_VARIANCE) for _ in range(preset.exact)]) / preset.exact
    note(f"{distribution} of sigma {sigma}: {row['ns_per_draw']:.1f} ns a draw, table in {build_ms:.0f} ms")
    return row


if __name__ == "__main__":
    run_in_folder("sampler", __doc__, PRESETS, measure)
