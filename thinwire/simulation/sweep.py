"""Runs many simulations that differ in a few keys of the plan and in their seeds; finished runs are not repeated."""

from __future__ import annotations

import itertools
import multiprocessing
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from thinwire.client.task import load_task, parse_split
from thinwire.client.train.runtime import use_threads
from thinwire.core.errors import ThinwireError
from thinwire.core.plan import RunPlan
from thinwire.reports.sweep_results import Made, Trial, TrialStore
from thinwire.simulation.run import simulate

FEW_ROUNDS = 12  # in total: a trial would take as long as so few rounds
BEFORE = {"cohort": {"max_weight": "none"}}  # values of keys that are newer than stored results, as they were before
SHORT, LONG = 1, 3  # rounds of the trial's two runs, which differ in nothing else


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
    history = simulate(
        task,
        plan_of(made),
        clients=made.clients,
        split=made.split,
        data=Path(made.data) if made.data else None,
    )
    return Trial.of(made, history.run, history.rounds, time.perf_counter() - began)


def plan_of(made: Made) -> RunPlan:
    """Return the plan of a run. A key that the stored plan does not have gets the value that leaves the results
    unchanged.
    """
    sections = {name: {**keys, **made.plan.get(name, {})} for name, keys in BEFORE.items()}
    return RunPlan.from_json({**made.plan, **sections})


def trial_s(task: str, made: Made) -> tuple[float, float, float]:
    """Measure one run, cut short: (seconds that a process's first run takes longer, seconds outside rounds, seconds a
    round).
    """
    first = run_cell(task, _short(made, SHORT)).took_s  # imports and caches
    short, long = (run_cell(task, _short(made, rounds)).took_s for rounds in (SHORT, LONG))
    each = max((long - short) / (LONG - SHORT), 0.05 * long / LONG)
    return max(0.0, first - short), max(0.0, short - SHORT * each), each


def _short(made: Made, rounds: int) -> Made:
    return replace(made, plan={**made.plan, "run": {**made.plan["run"], "rounds": rounds}})


@dataclass(frozen=True)
class Estimate:
    """Holds the seconds until all runs are done, and how they were estimated."""

    seconds: float
    how: str


def estimated(
    sweep: Sweep, cells: TrialStore, missing: Sequence[Made], workers: int, pool: Executor | None
) -> Estimate | None:
    """Estimate from finished runs of the group, else from a trial run; return None if few rounds are missing.

    Both ways begin with the start of one worker. The other workers take as long to start, in parallel with the first
    one's runs.
    """
    rounds = sum(one.plan["run"]["rounds"] for one in missing)
    done = [cell for cell in cells.all().values() if cell.took_s and cell.rounds]
    if not done and rounds <= FEW_ROUNDS:
        return None
    start = _started_s(sweep.task, pool) if pool else 0.0
    if done:
        each = sum(cell.took_s for cell in done) / sum(len(cell.rounds) for cell in done)
        return Estimate((each * rounds + start * (workers - 1)) / workers, f"from {len(done)} finished runs")
    arguments = sweep.task, missing[0]
    more, fixed, each = pool.submit(trial_s, *arguments).result() if pool else trial_s(*arguments)
    runs = fixed * len(missing) + each * rounds + (start + more) * (workers - 1)
    return Estimate(runs / workers, f"from {SHORT + LONG} rounds of the first run")


def _started_s(task: str, pool: Executor) -> float:
    """Return the seconds until a worker has started and imported the task."""
    began = time.perf_counter()
    pool.submit(_import, task).result()
    return time.perf_counter() - began


def _import(task: str) -> None:
    load_task(task)


def run_sweep(
    sweep: Sweep,
    cells: TrialStore,
    *,
    workers: int = 1,
    on_estimate: Callable[[Estimate | None, int], None] = lambda estimate, missing: None,
    on_cell: Callable[[Trial, int, int], None] = lambda cell, done, of: None,
) -> list[Trial]:
    """Execute the missing runs, keep each result at once, and return all results in the order of the sweep.

    Results are kept even if the sweep is interrupted. An exception from the import of the task or from this program
    ends the sweep. A run that fails is a result like others.
    """
    missing = sweep.missing(cells)
    cells.ask(one.digest for one in sweep.made)
    if missing:
        with _pool(min(workers, len(missing))) as pool:
            on_estimate(estimated(sweep, cells, missing, min(workers, len(missing)), pool), len(missing))
            for done, cell in enumerate(_made(sweep.task, missing, pool), start=1):
                cells.keep(cell)
                on_cell(cell, done, len(missing))
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
