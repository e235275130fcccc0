"""`thinwire sim PLAN`: run a plan in this process, with as many simulated clients as wanted.

With `--sweep`, `--seeds` or `--name` it makes a group of such runs, one for each combination of values and seeds.
Everything is checked before the first run begins. Runs are kept, so that the same command makes only those that are
missing. A single simulated run is stored in the store of this machine's aggregator, like any other run.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thinwire.cli import console
from thinwire.cli.params import Data, Home, Json, PlanFile, Sets, Task, checked_plan, overrides
from thinwire.cli.runs.progress import Teller, screen
from thinwire.cli.runs.track import Track, opener, start_follower
from thinwire.core import formatting
from thinwire.core.signals import INTERRUPTED, interruptible

if TYPE_CHECKING:
    from thinwire.core import RunPlan
    from thinwire.core.events import ClientFailed, Event
    from thinwire.reports.sweep_results import Trial, TrialStore
    from thinwire.simulation.sweep import Progress


SWEEP = "values of one key, as uplink.codec='identity|int8'; repeatable"
SPLIT = 'how data is split: iid, "dirichlet(0.3)", "by(KEY)", "shards(N)"'


def sim(
    plan: PlanFile,
    clients: Annotated[int, typer.Option("--clients", min=1, help="number of clients to simulate")] = 20,
    task: Task = None,
    data: Data = None,
    split: Annotated[str, typer.Option(metavar="SPEC", help=SPLIT)] = "iid",
    sets: Sets = None,
    sweep: Annotated[list[str] | None, typer.Option("--sweep", metavar="KEY=A|B", help=SWEEP)] = None,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="of a sweep: number of seeds")] = 1,
    workers: Annotated[int, typer.Option("--workers", min=1, help="of a sweep: number of runs at once")] = 1,
    processes: Annotated[int, typer.Option("--processes", min=1, help="number of processes of one run")] = 1,
    keep: Annotated[bool, typer.Option("--keep", help="after kill -9 the same command goes on with the run")] = False,
    track: Track = None,
    name: Annotated[str | None, typer.Option("--name", help="of a sweep: name of its group")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="raise errors of the task with their traceback")] = False,
    json: Json = False,
    home: Home = None,
) -> None:
    """Run a plan without devices or network: stored, shown and exported like any other run.

    With --processes N its clients train in N processes, to the same bits as in one.

    With --keep the clients' state is on disk too. After Ctrl-C, kill -9 or a power failure the same command goes on
    with the run, to the same bits.

    With --sweep, --seeds or --name it is a group of runs, one for each combination: what is there is not made again,
    and thinwire runs compare --group NAME shows what they came to.
    """
    from thinwire.client.task import parse_split

    parse_split(split)
    if sweep or seeds > 1 or name:
        if debug:
            raise typer.BadParameter("--debug is for one run: leave --sweep, --seeds and --name out")
        if processes > 1:
            raise typer.BadParameter("--processes is for one run: a sweep's runs are made side by side with --workers")
        if keep:
            raise typer.BadParameter("--keep is for one run: a sweep makes only the runs that are missing")
        if track:
            raise typer.BadParameter("--track is for one run: thinwire runs compare --group NAME compares a sweep's")
        group, code = swept(
            plan, overrides(sets), axes(sweep or []), name=name, seeds=seeds, workers=workers, task=task,
            clients=clients, split=split, data=data, home=home,
        )  # fmt: skip
        if json:
            console.document(group)
        raise typer.Exit(code)
    if workers > 1:
        raise typer.BadParameter("--workers is for a sweep: give --sweep KEY=A|B or --seeds N too")

    read = checked_plan(plan, sets)
    document, code = simulated(
        read, plan, task, clients=clients, split=split, data=data, debug=debug, home=home, processes=processes,
        keeps=keep, track=track,
    )  # fmt: skip
    if json:
        console.document(document)
    else:
        console.line(document["run_id"])
    raise typer.Exit(code)


def _at_commas(text: str) -> list[str]:
    """Split a text at its commas outside of brackets and quotes.

    >>> _at_commas('topk(0.1), ["fp16", "qsgd(4, l2)"]')
    ['topk(0.1)', ' ["fp16", "qsgd(4, l2)"]']
    """
    found, depth, is_quoted = [""], 0, False
    for letter in text:
        is_quoted ^= letter == '"'
        depth += 0 if is_quoted else (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth and not is_quoted:
            found.append("")
        else:
            found[-1] += letter
    return found


def axes(given: list[str]) -> dict[str, list[str]]:
    """Parse the `--sweep KEY=VALUES` options into the values of each key; a usage error explains what is wrong.

    Values are separated by | if there is one, else by commas outside of brackets and quotes.

    >>> axes(["local.lr=0.05,0.1", "uplink.codec=identity|topk(0.01) > int8", "uplink.codec=int8,qsgd(4, l2)"][:2])
    {'local.lr': ['0.05', '0.1'], 'uplink.codec': ['identity', 'topk(0.01) > int8']}
    """
    found: dict[str, list[str]] = {}
    for one in given:
        key, equals, text = one.partition("=")
        key = key.strip()
        values = [value.strip() for value in (text.split("|") if "|" in text else _at_commas(text))]
        if not equals or not all(values):
            raise typer.BadParameter(f"{one!r} has no values: --sweep section.key=A|B, as in --sweep local.lr=0.05,0.1")
        if key in found:
            raise typer.BadParameter(f"{key} is swept twice: put all its values into one --sweep {key}=A|B")
        if key == "run.seed":
            raise typer.BadParameter("seeds are not swept: --seeds 5 takes the plan's and the four that follow it")
        if key == "run.task":
            raise typer.BadParameter("tasks are not swept: the runs of a group train one code; a sweep for each task")
        found[key] = list(dict.fromkeys(values))
    return found


TASK_RAISED = 3


def simulated(
    plan: RunPlan,
    file: Path,
    task: str | None,
    *,
    clients: int,
    split: str,
    data: Path | None,
    debug: bool,
    home: Path | None,
    processes: int = 1,
    keeps: bool = False,
    track: str | None = None,
) -> tuple[dict[str, Any], int]:
    """Simulate one run, print its progress, and return its document and exit code.

    Ctrl-C stops the run for good, unless it `keeps` what the same command needs to go on with it.
    """
    from thinwire.cli.local_state import aggregator_home, open_store
    from thinwire.cli.run import first_model
    from thinwire.cli.runs.render import run_document
    from thinwire.cli.task import task_spec
    from thinwire.client import ClientInfo
    from thinwire.client.task import Initial, initial_model, load_task
    from thinwire.simulation import run_sim
    from thinwire.simulation.process_pool import require_processes

    if track:
        opener(track, "")  # an error before the task is loaded
    code = load_task(task_spec(plan.run.task, file, task))
    require_processes(processes, code, debug)
    made = initial_model(code, plan.run.seed, plan.local.personal_layers)
    if made.left_out:
        console.note(f"warning: {made.left_out}")
    client = ClientInfo(data=data.absolute() if data else None, split=split, seed=plan.run.seed)
    teller, begun = Teller(hides_sample=plan.privacy.sampling_rate is not None), list[str]()
    raised = set[str]()  # classes and places of errors of the task that were printed with their text
    with open_store(home, read_only=False, create=True) as store, screen() as (tell, show), interruptible() as look:
        params, buffers, counters = first_model(store, home, plan, file, made)

        def on_event(event: Event) -> None:
            look()
            for line in teller.hear(event):
                tell(line)
            show(f"{begun[0]}: {teller.now}")

        def on_begin(run_id: str) -> None:
            begun.append(run_id)
            if track:
                start_follower(run_id, track, home)

        try:
            run_sim(
                plan, code, store=store, home=aggregator_home(home), clients=clients, client=client, debug=debug,
                first=Initial(made.layout, params, buffers, dict(counters), made.fixed), on_event=on_event,
                on_begin=on_begin, on_error=partial(_tell_error, raised, tell), processes=processes, resumable=keeps,
            )  # fmt: skip
        except KeyboardInterrupt:
            if keeps and begun:
                console.note(f"{begun[0]} is interrupted; the same command goes on with it")
                return run_document(store, begun[0]), INTERRUPTED
            _end(store, begun, "stopped", "stopped with Ctrl-C", 10)
            return run_document(store, begun[0]), INTERRUPTED
        except Exception as error:
            if not (debug and begun):
                raise
            traceback.print_exc()
            if hint := getattr(error, "hint", ""):
                console.note(f"try:   {hint}")
            _end(store, begun, "failed", f"the task raised {type(error).__name__}", TASK_RAISED)
            return run_document(store, begun[0]), TASK_RAISED
        tell(f"{begun[0]} {teller.status}: {teller.text}")
        if raised:
            tell("the whole traceback of the task's error: the same command with --debug")
        return run_document(store, begun[0]), store.run(begun[0]).exit_code


def _tell_error(raised: set[str], tell: Callable[[str], None], event: ClientFailed, said: str) -> None:
    """Print the class and the text of an error of the task, once for each class and place: the user owns the data."""
    if said and event.kind == "task-error" and event.text not in raised:
        raised.add(event.text)
        tell(f"    {said}".replace("\n", "\n    "))


def _end(store: Any, begun: list[str], status: Any, text: str, code: int) -> None:
    """Close a run that this process broke off; without a run raise KeyboardInterrupt again."""
    from thinwire.core.events import RunStatusChanged
    from thinwire.server.run_end import close_undriven

    if not begun:
        raise KeyboardInterrupt
    close_undriven(store, begun[0], RunStatusChanged(time.time(), status, text, code))
    console.note(f"{begun[0]} {status}: {text}")


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
    """Make every missing run of a sweep and return the group's document and an exit code.

    The exit code is that of the first run that failed, else 0. Progress goes to stderr: each
    run as it ends, with its first failure, and an estimate of the time that is left.
    """
    from thinwire.aggregation import codecs
    from thinwire.cli.local_state import aggregator_home, command_line
    from thinwire.cli.task import task_spec
    from thinwire.core import RunPlan
    from thinwire.core.errors import PlanError
    from thinwire.reports.sweep_results import TrialStore
    from thinwire.simulation.sweep import Sweep, grid, run_sweep

    if twice := sorted(axes.keys() & overrides.keys()):
        raise typer.BadParameter(f"{twice[0]} has a --set and a --sweep: leave one of them out")
    try:
        base = RunPlan.load(file, overrides, codecs=codecs)
    except PlanError as wrong:
        try:  # the plan need not have the keys that are swept
            base = RunPlan.load(file, {**overrides, **{key: values[0] for key, values in axes.items()}}, codecs=codecs)
        except PlanError:
            raise wrong from None
    plans = [
        RunPlan.load(file, {**overrides, **cell}, option="--sweep", codecs=codecs)
        for cell in grid(axes, range(base.run.seed, base.run.seed + seeds))
    ]
    _require_sense(plans)
    group = name or base.run.task
    cells = TrialStore.named(aggregator_home(home).sweeps, group)
    sweep = Sweep.of(task_spec(base.run.task, file, task), plans, clients, split, data)
    told = Told(cells, list(axes), len(sweep.specs), workers)
    try:
        made = run_sweep(sweep, cells, workers=workers, on_progress=told.progress)
    except KeyboardInterrupt:
        kept = formatting.counted(len(cells.all()), "run")
        console.note(f"{group}: {kept} kept; the same command goes on with what is missing")
        return _document(group, [], told), INTERRUPTED
    console.note(
        f"{group} has {formatting.counted(len(made), 'run')}: {command_line(f'runs compare --group {group}', home)}"
    )
    failed = next((cell.exit_code for cell in made if cell.exit_code), 0)
    return _document(group, made, told), failed


class Told:
    """Prints the progress of a sweep and remembers its first estimate and its number of new runs."""

    def __init__(self, cells: TrialStore, keys: Sequence[str], total: int, workers: int) -> None:
        self.cells, self.keys, self.total, self.workers = cells, keys, total, workers
        self.made = 0
        self.estimate_s: float | None = None

    def progress(self, progress: Progress) -> None:
        """Print the number of missing runs before the first one, then each run's result, and the time that is left."""
        self.made, left_s = progress.done, progress.left_s
        if self.estimate_s is None:
            self.estimate_s = left_s
        unknown = left_s is None or progress.done == progress.missing
        rest = "" if unknown else f"; about {formatting.duration(left_s)} left"
        if progress.trial is None:
            there = f", {self.total - progress.missing} are there already" if progress.missing < self.total else ""
            total = formatting.counted(self.total, "run")
            console.note(f"{progress.missing} of {total} to make{there}; {self.workers} at once{rest}")
            return
        cell, plan = progress.trial, progress.trial.made.plan
        settings = [f"{key}={reduce(getitem, key.split('.'), plan)}" for key in self.keys]
        metric, seed = cell.plan.run.metric, f"run.seed={cell.plan.run.seed}"
        text = f"{metric} {formatting.figure(cell.metrics.get(metric))}" if cell.status == "done" else cell.status_text
        took = f"{' '.join([*settings, seed])}: {text}, {formatting.duration(cell.took_s)}"
        console.note(f"{progress.done}/{progress.missing}  {took}{rest}")
        if cell.failures:
            console.note(f"  first failure: {cell.failures[0]}")


def _document(group: str, made: Sequence[Trial], told: Told) -> dict[str, Any]:
    """Return the document of a group for `sim --json`."""
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
    """Raise the errors of the first invalid plan of a sweep, before a run begins."""
    from thinwire.aggregation import codecs
    from thinwire.core.plan_rules import as_error
    from thinwire.simulation.checks import require_own_start

    for plan in plans:
        require_own_start(plan)
        if refused := plan.check(codecs):
            raise as_error(refused)
