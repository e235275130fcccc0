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
from thinwire.core.errors import DataLost, NotWritten, ThinwireError
from thinwire.core.plan import RunPlan
from thinwire.reports.sweep_results import Trial, TrialSpec, TrialStore
from thinwire.simulation.history import RunFailed
from thinwire.simulation.run import simulate

OLD_DEFAULTS = {"cohort": {"max_weight": "none"}}  # of keys that are newer than some stored results


@dataclass(frozen=True)
class Sweep:
    """Holds the runs of a sweep. `task` is NAME=MODULE, because each worker process imports it."""

    task: str
    specs: tuple[TrialSpec, ...]

    @classmethod
    def of(cls, task: str, plans: Sequence[RunPlan], clients: int, split: str, data: Path | None = None) -> Sweep:
        """Return the sweep of these plans, without duplicates; raise `UsageError` for a split that is not valid."""
        parse_split(split)
        digest, place = load_task(task).source_digest, str(data.absolute()) if data else ""
        specs = [TrialSpec(plan.to_json(), clients, split, place, digest) for plan in plans]
        return cls(task, tuple({one.digest: one for one in specs}.values()))

    def missing(self, trials: TrialStore) -> list[TrialSpec]:
        """Return the runs that have no result in `trials` yet."""
        finished = trials.all()
        return [one for one in self.specs if one.digest not in finished]


def grid(axes: Mapping[str, Sequence[str]], seeds: Sequence[int]) -> Iterator[dict[str, str]]:
    """Yield every combination as overrides of the plan, with the seeds innermost.

    >>> list(grid({"local.lr": ["1", "2"]}, [7]))
    [{'local.lr': '1', 'run.seed': '7'}, {'local.lr': '2', 'run.seed': '7'}]
    """
    for values in itertools.product(*axes.values()):
        for seed in seeds:
            yield {**dict(zip(axes, values, strict=True)), "run.seed": str(seed)}


def run_trial(task: str, spec: TrialSpec) -> Trial:
    """Run one simulation on one thread and return its result; runs in parallel do not change its bits."""
    use_threads(1)
    began = time.perf_counter()
    try:
        history = simulate(
            task,
            plan_of(spec),
            clients=spec.clients,
            split=spec.split,
            data=Path(spec.data) if spec.data else None,
            progress=False,
        )
    except RunFailed as error:
        history = error.history
        if history.run.exit_code == DataLost.exit_code:  # this machine's disk and not the plan: no result to keep
            raise NotWritten(
                f"a run of the sweep failed: {history.run.status_text}",
                hint="free some space; the same command goes on",
            ) from None
    return Trial.of(spec, history.run, history.rounds, time.perf_counter() - began, history.failures)


def plan_of(spec: TrialSpec) -> RunPlan:
    """Return the plan of a run. A key that the stored plan does not have gets the value that leaves the results
    unchanged.
    """
    sections = {name: {**keys, **spec.plan.get(name, {})} for name, keys in OLD_DEFAULTS.items()}
    return RunPlan.from_json({**spec.plan, **sections})


@dataclass(frozen=True)
class Progress:
    """The progress of a sweep: `done` of `missing` runs. `trial` is the latest of them, None before the first.

    `left_s` estimates the seconds until all runs are done; None until a run of the group has finished.
    """

    missing: int
    done: int = 0
    trial: Trial | None = None
    left_s: float | None = None


def time_left_s(finished: Iterable[Trial], missing: Sequence[TrialSpec], workers: int) -> float | None:
    """Return the seconds that `workers` take for the missing runs, at the speed of the finished ones; None if no
    finished run has a round.
    """
    timed = [trial for trial in finished if trial.took_s and trial.rounds]
    if not timed:
        return None
    each = sum(trial.took_s for trial in timed) / sum(len(trial.rounds) for trial in timed)
    rounds = sum(int(one.plan["run"]["rounds"]) for one in missing)
    return each * rounds / max(1, min(workers, len(missing)))


def run_sweep(
    sweep: Sweep,
    trials: TrialStore,
    *,
    workers: int = 1,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> list[Trial]:
    """Execute the missing runs, keep each result at once, and return all results in the order of the sweep.

    `on_progress` is called before the first run and after each one. Results are kept even if the sweep is interrupted.
    An exception from the import of the task or from this program ends the sweep. A run that fails is a result like
    others.
    """
    finished, missing = trials.all(), {one.digest: one for one in sweep.missing(trials)}
    runs = list(missing.values())
    trials.request(one.digest for one in sweep.specs)
    if runs:
        with _pool(min(workers, len(runs))) as pool:
            on_progress(Progress(len(runs), left_s=time_left_s(finished.values(), runs, workers)))
            for done, trial in enumerate(_run_trials(sweep.task, runs, pool), start=1):
                trials.keep(trial)
                finished[trial.made.digest] = trial
                del missing[trial.made.digest]
                left_s = time_left_s(finished.values(), list(missing.values()), workers)
                on_progress(Progress(len(runs), done, trial, left_s))
    finished = trials.all()
    return [finished[one.digest] for one in sweep.specs]


def _run_trials(task: str, missing: Sequence[TrialSpec], pool: Executor | None) -> Iterator[Trial]:
    if pool is None:
        for one in missing:
            yield run_trial(task, one)
        return
    waiting: list[Future[Trial]] = [pool.submit(run_trial, task, one) for one in missing]
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
