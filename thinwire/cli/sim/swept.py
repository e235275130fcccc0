"""A sweep with its lines: what it will take, each run as it ends, how much is left."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire.cli import say

if TYPE_CHECKING:
    from thinwire.core import RunPlan
    from thinwire.simulation.sweep import Estimate
    from thinwire.store.cells import Cell, Cells

INTERRUPTED = 130
HOUR = 3600.0


def swept(
    file: Path,
    overrides: Mapping[str, str],
    axes: Mapping[str, Sequence[str]],
    *,
    name: str | None,
    seeds: int,
    workers: int,
    task: str | None,
    clients: int,
    split: str,
    data: Path | None,
    home: Path | None,
) -> tuple[dict[str, Any], int]:
    """Make every run that is missing; gives the group's document and the exit code of the first that failed."""
    from thinwire.cli.places import again, aggregator_home
    from thinwire.cli.task_code import task_spec
    from thinwire.core import RunPlan
    from thinwire.simulation.sweep import Sweep, grid, run_sweep
    from thinwire.store.cells import Cells

    base = RunPlan.load(file, overrides)
    plans = [
        RunPlan.load(file, {**overrides, **cell}, option="--sweep")
        for cell in grid(axes, range(base.run.seed, base.run.seed + seeds))
    ]
    _require_sense(plans)
    group = name or base.run.task
    cells = Cells.named(aggregator_home(home).sweeps, group)
    sweep = Sweep.of(task_spec(base.run.task, file, task), plans, clients, split, data)
    told = Told(cells, list(axes), len(sweep.made), workers)
    try:
        made = run_sweep(sweep, cells, workers=workers, on_estimate=told.estimate, on_cell=told.cell)
    except KeyboardInterrupt:
        say.note(f"{group}: {len(cells.all())} runs are kept; the same command goes on with what is missing")
        return _document(group, [], told), INTERRUPTED
    say.note(f"{group}: {len(made)} runs are there: {again(f'runs compare --group {group}', home)}")
    failed = next((cell.exit_code for cell in made if cell.exit_code), 0)
    return _document(group, made, told), failed


class Told:
    """What was said of a sweep while it went on."""

    def __init__(self, cells: Cells, keys: Sequence[str], total: int, workers: int) -> None:
        self.cells, self.keys, self.total, self.workers = cells, keys, total, workers
        self.began, self.made = 0.0, 0
        self.estimate_s: float | None = None

    def estimate(self, estimate: Estimate | None, missing: int) -> None:
        """Before the first run begins."""
        self.began = time.monotonic()
        there = f", {self.total - missing} are there already" if missing < self.total else ""
        about = "too few rounds to estimate"
        if estimate is not None:
            self.estimate_s = estimate.seconds
            hours = estimate.seconds / HOUR
            about = f"about {f'{hours:.1f} h' if hours > 1 else say.seconds(estimate.seconds)}, {estimate.how}"
        say.note(f"{missing} of {self.total} runs to make{there}; {self.workers} at once: {about}")

    def cell(self, cell: Cell, done: int, missing: int) -> None:
        """One more run is over and kept."""
        self.made = done
        left = (time.monotonic() - self.began) / done * (missing - done)
        metric, plan = cell.plan.run.metric, cell.made.plan
        settings = [f"{key}={_value(plan, key)}" for key in (*self.keys, "run.seed")]
        text = f"{metric} {say.figure(cell.metrics.get(metric))}" if cell.status == "done" else cell.status_text
        rest = f"; about {say.seconds(left)} left" if done < missing else ""
        say.note(f"{done}/{missing}  {' '.join(settings)}: {text}, {say.seconds(cell.took_s)}{rest}")


def _value(plan: Mapping[str, Any], place: str) -> Any:
    found: Any = plan
    for name in place.split("."):
        found = found[name]
    return found


def _document(group: str, made: Sequence[Cell], told: Told) -> dict[str, Any]:
    return {
        "group": group,
        "folder": str(told.cells.folder),
        "runs": told.total,
        "made": told.made,
        "estimate_s": told.estimate_s,
        "cells": [
            {"cell": one.made.digest, "seed": one.plan.run.seed, "status": one.status, "metrics": one.metrics}
            for one in made
        ],
    }


def _require_sense(plans: Sequence[RunPlan]) -> None:
    """Everything is refused before anything is begun."""
    from thinwire.aggregation import codecs
    from thinwire.simulation.run import require_own_start

    for plan in plans:
        require_own_start(plan)
        if refused := plan.check(codecs):
            raise refused[0].error()
