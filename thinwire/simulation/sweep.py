"""Runs many simulations that differ in a few keys of the plan and in their seeds; finished runs are not repeated."""

from __future__ import annotations

import itertools
import multiprocessing
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.client.task import load_task, parse_split
from thinwire.client.train.runtime import use_threads
from thinwire.core.errors import ThinwireError
from thinwire.core.plan import RunPlan
from thinwire.reports.sweep_results import Made, Trial, TrialStore
from thinwire.simulation.history import RunFailed
from thinwire.simulation.run import simulate

BEFORE = {"cohort": {"max_weight": "none"}}  # values of keys that are newer than stored results, as they were before


@dataclass(frozen=True)
class Sweep:
    """Holds the runs of a sweep. `task` is NAME=MODULE, because each worker process imports it."""

    task: str
    made: tuple[Made, ...]

    @classmethod
    def of(cls, task: str, plans: Sequence[RunPlan], clients: int, split: str, data: Path | None = None) -> Sweep:
        """Return the sweep of these plans, without duplicates; raise `UsageError` for a split that is not valid."""
        parse_split(split)
        digest, place = load_task(task).source_digest, str(data.absolute()) if data else ""
        made = [Made(plan.to_json(), clients, split, place, digest) for plan in plans]
        return cls(task, tuple({one.digest: one for one in made}.values()))

    def missing(self, cells: TrialStore) -> list[Made]:
        """Return the runs that have no result in `cells` yet."""
        there = cells.all()
        return [one for one in self.made if one.digest not in there]


def grid(axes: Mapping[str, Sequence[str]], seeds: Sequence[int]) -> Iterator[dict[str, str]]:
    """Yield every combination as overrides of the plan, with the seeds innermost.

    >>> list(grid({"local.lr": ["1", "2"]}, [7]))
    [{'local.lr': '1', 'run.seed': '7'}, {'local.lr': '2', 'run.seed': '7'}]
    """
    for values in itertools.product(*axes.values()):
        for seed in seeds:
            yield {**dict(zip(axes, values, strict=True)), "run.seed": str(seed)}


def run_cell(task: str, made: Made) -> Trial:
    """Run one simulation on one thread and return its result; runs in parallel do not change its bits."""
    use_threads(1)
    began = time.perf_counter()
    try:
        history = simulate(
            task,
            plan_of(made),
            clients=made.clients,
            split=made.split,
            data=Path(made.data) if made.data else None,
            progress=False,
        )
    except RunFailed as error:
        history = error.history
    return Trial.of(made, history.run, history.rounds, time.perf_counter() - began, history.failures)


def plan_of(made: Made) -> RunPlan:
    """Return the plan of a run. A key that the stored plan does not have gets the value that leaves the results
    unchanged.
    """
    sections = {name: {**keys, **made.plan.get(name, {})} for name, keys in BEFORE.items()}
    return RunPlan.from_json({**made.plan, **sections})


@dataclass(frozen=True)
class Progress:
    """Holds how far a sweep is: `done` of `missing` runs, of which `cell` is the latest one; None before the first.

    `left_s` estimates the seconds until all runs are done; None until a run of the group has finished.
    """

    missing: int
    done: int = 0
    cell: Trial | None = None
    left_s: float | None = None


def time_left_s(finished: Iterable[Trial], missing: Sequence[Made], workers: int) -> float | None:
    """Return the seconds that `workers` take for the missing runs, at the speed of the finished ones; None if no
    finished run has a round.
    """
    timed = [cell for cell in finished if cell.took_s and cell.rounds]
    if not timed:
        return None
    each = sum(cell.took_s for cell in timed) / sum(len(cell.rounds) for cell in timed)
    rounds = sum(int(one.plan["run"]["rounds"]) for one in missing)
    return each * rounds / max(1, min(workers, len(missing)))


def run_sweep(
    sweep: Sweep,
    cells: TrialStore,
    *,
    workers: int = 1,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> list[Trial]:
    """Execute the missing runs, keep each result at once, and return all results in the order of the sweep.

    `on_progress` is called before the first run and after each one. Results are kept even if the sweep is interrupted.
    An exception from the import of the task or from this program ends the sweep. A run that fails is a result like
    others.
    """
    finished, missing = cells.all(), {one.digest: one for one in sweep.missing(cells)}
    runs = list(missing.values())
    cells.request(one.digest for one in sweep.made)
    if runs:
        with _pool(min(workers, len(runs))) as pool:
            on_progress(Progress(len(runs), left_s=time_left_s(finished.values(), runs, workers)))
            for done, cell in enumerate(_made(sweep.task, runs, pool), start=1):
                cells.keep(cell)
                finished[cell.made.digest] = cell
                del missing[cell.made.digest]
                left_s = time_left_s(finished.values(), list(missing.values()), workers)
                on_progress(Progress(len(runs), done, cell, left_s))
    there = cells.all()
    return [there[one.digest] for one in sweep.made]


def _made(task: str, missing: Sequence[Made], pool: Executor | None) -> Iterator[Trial]:
    if pool is None:
        for one in missing:
            yield run_cell(task, one)
        return
    waiting: list[Future[Trial]] = [pool.submit(run_cell, task, one) for one in missing]
    for future in as_completed(waiting):
        yield future.result()


@contextmanager
def _pool(workers: int) -> Iterator[Executor | None]:
    """Yield a pool of worker processes, or None for this process alone; no worker outlives the block."""
    if workers == 1:
        yield None
        return
    before: set[Any] = set(multiprocessing.active_children())
    with tempfile.TemporaryDirectory(prefix="thinwire-sweep-", ignore_cleanup_errors=True) as scratch:
        pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin, (scratch,))
        try:
            yield pool
            pool.shutdown()
        except BrokenProcessPool:
            raise ThinwireError(
                "a worker ended before its run did",
                why="something killed it: the system does so where memory is short",
                hint="fewer --workers; the same command goes on with what is missing",
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            left = set(multiprocessing.active_children()) - before
            for child in left:
                child.terminate()
            for child in left:
                child.join()


def _begin(scratch: str) -> None:
    """Prepare a worker: it ignores Ctrl-C, and makes its temporary files under `scratch`.

    The process that keeps the results ends the worker and removes the files.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    tempfile.tempdir = scratch
