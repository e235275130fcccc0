"""Benchmarks of two commits beside each other: how much slower and larger the second one is, with 95 % intervals.

    python -m benchmarks.before_after OLD NEW [--only codecs fold] [--pairs 10] [--preset small] --json

Each commit gets a worktree with its own kernels; both run in this Python, with the distributions that are installed
here. A pair is one run of a benchmark on each commit, one after the other, and the first of two alternates: what slows
the machine down slows both. `time` is the seconds that the benchmark took as a whole, and `memory` the largest resident
set of a process of it. All its own figures are compared too.

A ratio is that of the medians, the new one over the old one, or the old one over the new one where larger is better
(`LARGER`). So above 1 the new commit is worse. `BENCHMARK_FIGURE_low` is the lower end of its bootstrap interval, from
drawing pairs again. `worst_time_low` and `worst_memory_low` are the largest lower ends of all benchmarks' `time` and
`memory`: at most 1.05 says that no benchmark shows a new commit that is more than 5 % slower or larger.

A benchmark that was renamed runs under its earlier name (`EARLIER`) on a commit that has no file of the new name.
Figures that only one of the commits has, and benchmarks that do not run on one, are rows.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.document import document, note, show
from benchmarks.entry import Measured, arguments, end_what_we_started

ROOT = Path(__file__).parents[1]
DEFAULT = ("codecs", "fold", "round_overhead", "simulation", "device_api", "device_footprint")
PRESETS = ("tiny", "small", "full")
EARLIER = {"device_api": "door", "device_footprint": "node_footprint"}  # names of benchmarks before they were renamed
LARGER = re.compile(r"per_s\b|gb_s\b|(?<!unaccounted_)share|accuracy|sim_\w*ratio|noop_ratio")
DRAWS = 2000
SIDES = ("before", "after")
OWN = ("time", "memory")  # figures of every benchmark, which this one takes


@dataclass
class Side:
    """Holds one commit: its worktree, and each benchmark's figures, run by run."""

    commit: str
    folder: Path
    runs: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def run(self, benchmark: str, preset: str) -> None:
        """Run a benchmark of this commit; a failure is kept, and its later runs are left out."""
        words = [sys.executable, "-m", f"benchmarks.{self.name_of(benchmark)}", "--preset", preset, "--json"]
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            began = time.perf_counter()
            process = subprocess.Popen(words, cwd=self.folder, env=self._environment, stdout=out, stderr=err)
            _, status, usage = os.wait4(process.pid, 0)
            seconds = time.perf_counter() - began
            process.returncode = os.waitstatus_to_exitcode(status)
            out.seek(0)
            err.seek(0)
            if process.returncode:
                said = err.read().decode(errors="replace").strip().splitlines()
                self.failed[benchmark] = said[-1] if said else f"exit code {process.returncode}"
                return
            found = json.loads(out.read())["figures"]
        figures = {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
        memory = usage.ru_maxrss / 1024 / (1024 if sys.platform == "darwin" else 1)
        self.runs.setdefault(benchmark, []).append({"time": seconds, "memory": memory, **figures})

    def name_of(self, benchmark: str) -> str:
        """The name that the benchmark has on this commit."""
        folder, earlier = self.folder / "benchmarks", EARLIER.get(benchmark, benchmark)
        return benchmark if (folder / f"{benchmark}.py").exists() or (folder / benchmark).is_dir() else earlier

    def build(self) -> None:
        """Build the kernels; without them a commit runs in numpy, which is noted."""
        words = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        done = subprocess.run(words, cwd=self.folder, env=self._environment, capture_output=True, check=False)
        if done.returncode or not list(self.folder.glob("thinwire/**/kernels*.so")):
            note(f"{self.commit[:9]}: no kernels were built, so its codecs run in numpy")

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.folder)}


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


@contextmanager
def checked_out(commits: Sequence[str]) -> Iterator[list[Side]]:
    """A worktree of each commit with its kernels, while the context lasts."""
    with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as folder:
        sides = list[Side]()
        try:
            for name, commit in zip(SIDES, commits, strict=True):
                sides.append(Side(git("rev-parse", f"{commit}^{{commit}}"), Path(folder) / name))
                git("worktree", "add", "-q", "--detach", str(sides[-1].folder), sides[-1].commit)
                sides[-1].build()
            yield sides
        finally:
            for side in sides:
                git("worktree", "remove", "--force", str(side.folder))


def interval(before: Sequence[float], after: Sequence[float], larger: bool) -> tuple[float, float, float]:
    """The ratio of the medians, and the lower and the upper end of its 95 % interval.

    >>> interval([2.0, 2.0, 2.0], [1.0, 1.0, 1.0], larger=False)
    (0.5, 0.5, 0.5)
    """
    over, under = (np.array(before), np.array(after)) if larger else (np.array(after), np.array(before))
    drawn = np.random.default_rng(1).integers(0, len(over), (DRAWS, len(over)))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.median(over[drawn], axis=1) / np.median(under[drawn], axis=1)
        low, high = np.percentile(ratios, (2.5, 97.5))
    return median(over.tolist()) / median(under.tolist()), float(low), float(high)


def compared(benchmark: str, old: Side, new: Side) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """A row for each figure of a benchmark, and the ratios with their lower ends."""
    rows, figures = list[dict[str, Any]](), dict[str, float]()
    for side, name in ((old, "before"), (new, "after")):
        if why := side.failed.get(benchmark):
            rows.append({"benchmark": benchmark, "not run": name, "why": why})
    pairs = min(len(side.runs.get(benchmark, ())) for side in (old, new))
    if rows or not pairs:
        return rows, figures
    runs = [side.runs[benchmark][:pairs] for side in (old, new)]
    for name in dict.fromkeys(key for side in runs for run in side for key in run):
        values = [[run[name] for run in side if name in run] for side in runs]
        if not all(len(each) == pairs for each in values):
            only = "before" if values[0] and not values[1] else "after" if values[1] and not values[0] else "some runs"
            rows.append({"benchmark": benchmark, "figure": name, "only in": only})
            continue
        old_median, new_median = map(median, values)
        row = {"benchmark": benchmark, "figure": name, "before": old_median, "after": new_median}
        if old_median and new_median:
            larger = LARGER.search(name) is not None
            ratio, low, high = interval(values[0], values[1], larger)
            row |= {"ratio": ratio, "low": low, "high": high, "larger is better": larger}
            figures[f"{benchmark}_{name}"], figures[f"{benchmark}_{name}_low"] = ratio, low
        rows.append(row)
    return rows, figures


def measure(commits: Sequence[str], benchmarks: Sequence[str], pairs: int, preset: str) -> Measured:
    """All rows and figures."""
    rows, figures = list[dict[str, Any]](), dict[str, float]()
    with checked_out(commits) as sides:
        rows.append({"commit before": sides[0].commit, "commit after": sides[1].commit, "pairs": pairs})
        for benchmark in benchmarks:
            for pair in range(pairs):
                note(f"{benchmark}: pair {pair + 1} of {pairs}")
                for side in sides if pair % 2 == 0 else sides[::-1]:
                    if not any(benchmark in one.failed for one in sides):
                        side.run(benchmark, preset)
            found, more = compared(benchmark, *sides)
            rows += found
            figures |= more
    return rows, figures | worst(rows)


def worst(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The largest lower ends of `time` and `memory` over all benchmarks."""
    lows = {key: [row["low"] for row in rows if row.get("figure") == key and "low" in row] for key in OWN}
    return {f"worst_{key}_low": max(found) for key, found in lows.items() if found}


def main() -> None:
    parser = arguments("before_after", __doc__, PRESETS)
    parser.add_argument("old", metavar="OLD", help="the commit before")
    parser.add_argument("new", metavar="NEW", help="the commit after")
    parser.add_argument("--pairs", type=int, default=10, help="runs of each benchmark on each commit")
    parser.add_argument("--only", nargs="+", default=DEFAULT, metavar="NAME", help="benchmarks to run")
    given = parser.parse_args()
    end_what_we_started()
    rows, figures = measure((given.old, given.new), given.only, given.pairs, given.preset)
    show(document("before_after", given.preset, rows, figures), given.json)


if __name__ == "__main__":
    main()
