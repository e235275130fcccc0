"""Runs many simulations that differ in a few keys of the plan and in their seeds; finished runs are not repeated."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import multiprocessing
import os
import signal
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import thinwire
from thinwire.aggregation import codecs, optimizers, reductions
from thinwire.client.task import LoadedTask, load_task, parse_split
from thinwire.client.train.runtime import use_threads
from thinwire.compression.catalog import steps
from thinwire.core.errors import CodecError, DataLost, NotWritten, ThinwireError
from thinwire.core.plan import RunPlan
from thinwire.core.plan_names import CODECS, OPTIMIZERS, REDUCTIONS, named_in
from thinwire.core.registry import Registry
from thinwire.reports.sweep_results import Trial, TrialSpec, TrialStore
from thinwire.simulation.history import RunFailed
from thinwire.simulation.run import simulate

OLD_DEFAULTS = {"cohort": {"max_weight": "none"}}  # of keys that are newer than some stored results
REGISTRIES: dict[str, Registry[Any]] = {CODECS: steps, OPTIMIZERS: optimizers, REDUCTIONS: reductions}
INSTALLED = {"site-packages", "dist-packages"}  # folders of installed packages
NOT_OWN = (Path(sysconfig.get_path("stdlib")), Path(thinwire.__file__).parent)


@dataclass(frozen=True)
class Sweep:
    """Holds the runs of a sweep. `task` is NAME=MODULE, because each worker process imports it."""

    task: str
    specs: tuple[TrialSpec, ...]

    @classmethod
    def of(cls, task: str, plans: Sequence[RunPlan], clients: int, split: str, data: Path | None = None) -> Sweep:
        """Return the sweep of these plans, without duplicates; raise `UsageError` for a split that is not valid."""
        parse_split(split)
        code, place = load_task(task), str(data.absolute()) if data else ""
        specs = [
            TrialSpec(plan.to_json(), clients, split, place, code.source_digest, code_digest(code, plan))
            for plan in plans
        ]
        return cls(task, tuple({one.digest: one for one in specs}.values()))

    def missing(self, trials: TrialStore) -> list[TrialSpec]:
        """Return the runs that have no result in `trials` yet, and those that failed: the cause may be repaired."""
        done = {digest for digest, trial in trials.all().items() if trial.status == "done"}
        return [one for one in self.specs if one.digest not in done]


def code_digest(task: LoadedTask, plan: RunPlan) -> str:
    """Return the digest of the user's code outside of the task's file that a run depends on; "" if there is none.

    It covers the codecs, reductions and optimizers that the plan names, and the modules that these and the task have
    imported. Installed packages are left out, as is this program.
    """
    things: list[Any] = [task.module]
    for name in named_in(plan, codecs.own_names()):
        with contextlib.suppress(CodecError):  # a word in a pattern of tensors is no codec
            things.append(REGISTRIES[name.group].find(name.name) if name.group else None)
    folder, others = Path(task.file).parent, {one.module for kind in REGISTRIES.values() for one in kind.outside()}
    modules = [module for name, module in sys.modules.items() if name not in others]  # the plan may not name those
    things += [module for module in modules if folder in Path(_file(module)).parents]
    found = dict[str, str]()
    while things:
        module = _module_of(things.pop())
        if (file := _file(module)) not in found and _is_own(file):
            found[file] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
            things += vars(module).values()
    found.pop(task.file, None)
    told = sorted((Path(file).name, digest) for file, digest in found.items())
    return hashlib.sha256(repr(told).encode()).hexdigest() if told else ""


def _module_of(thing: Any) -> Any:
    """Return a module itself; else the module that defines a function, a class or the class of an object, or None."""
    name = getattr(thing, "__module__", None)
    return thing if isinstance(thing, ModuleType) else sys.modules.get(name) if isinstance(name, str) else None


def _file(module: Any) -> str:
    return os.path.abspath(file) if isinstance(file := getattr(module, "__file__", None), str) else ""


def _is_own(file: str) -> bool:
    """Return True for Python source that is part neither of Python, nor of an installed package, nor of Thinwire."""
    path = Path(file)
    return path.suffix == ".py" and not INSTALLED & {*path.parts} and not {*NOT_OWN} & {*path.parents}


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
