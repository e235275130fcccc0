"""Runs a plan in this process: the aggregator's own code over simulated clients, stored like any other run.

`simulate` trains a task. `run_scripted` runs a plan over scripted devices: hours of virtual time in seconds.
"""

from __future__ import annotations

import contextlib
import gc
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from thinwire.aggregation import Reduction, ServerOptimizer, codecs, optimizers, reductions
from thinwire.client.errors import last_error
from thinwire.client.executor import InProcessExecutor
from thinwire.client.task import (
    Initial,
    LoadedTask,
    as_task,
    initial_model,
    load_task,
    parse_split,
    report,
    require_own_loop,
)
from thinwire.client.train.errors import note_signals
from thinwire.client.train.module import build, keep_generators
from thinwire.client.train.protocol import ClientInfo
from thinwire.core.events import ENDED, ClientFailed, Evaluated, Event, RoundClosed
from thinwire.core.fleet import TaskReport
from thinwire.core.layout import Layout
from thinwire.core.plan import RunPlan
from thinwire.core.statedir import AggregatorHome, own
from thinwire.core.types import Vector
from thinwire.server.command_queue import CommandQueue
from thinwire.server.context import RunCommands, StopCommand
from thinwire.server.run import drive
from thinwire.server.submit import FirstModel, submit, with_whole_id
from thinwire.simulation.checks import (
    require_data,
    require_enough,
    require_metrics,
    require_one_process_for_secrets,
    require_own_start,
    require_same,
    require_step_seconds,
)
from thinwire.simulation.client_pool import ClientExecutor, ClientPopulation, SerialExecutor, SimulatedClients
from thinwire.simulation.history import History, Progress, RunFailed, event_handler, is_interactive
from thinwire.simulation.holdout import SimulatedHoldout
from thinwire.simulation.local_fleet import LocalFleet
from thinwire.simulation.process_pool import ProcessExecutor, require_processes
from thinwire.simulation.scripted_fleet import ScriptedFleet
from thinwire.simulation.storage import InMemorySpool, ResumableSimulation, keep_personal_values, resume_point
from thinwire.store import FileSpool, Store


def simulate(
    task: str | LoadedTask | Any,
    plan: RunPlan | Mapping[str, Any] | str | Path,
    *,
    clients: int = 20,
    split: str = "iid",
    data: str | Path | None = None,
    seed: int | None = None,
    debug: bool = False,
    processes: int = 1,
    step_s: Sequence[float] = (),
    reduce: Reduction | Callable[[], Reduction] | None = None,
    optimizer: Callable[..., ServerOptimizer] | None = None,
    home: str | Path | None = None,
    on_round: Callable[[RoundClosed], object] | None = None,
    on_evaluate: Callable[[Evaluated], object] | None = None,
    progress: bool | None = None,
) -> History:
    """Run a plan over simulated clients and return its history: rounds, clients and the model.

    `task` is NAME=MODULE, a loaded task, or any object with model, data and loss, as a class of a notebook's cell.
    `plan` is a plan, the name of its file, or a mapping with its sections. `seed` replaces the plan's seed.

    A plan, task or split that is not valid raises a `ThinwireError` before the run begins. A run that fails raises
    `RunFailed` with the reason; its `history` has the rounds until then.

    With several `processes`, clients train in parallel, to the same bits; the task is then NAME=MODULE. `step_s` holds
    the seconds of a step on each client. The run's clock then follows these instead of the speed of this machine.

    `reduce` is a reduction and `optimizer` the class of a server optimizer, for a notebook that has no module to name.

    `on_round` gets the `RoundClosed` event of each round, and `on_evaluate` the `Evaluated` event of each evaluated
    model (core/events.py). An exception of theirs ends the call. With `progress`, one line says how far the run is; by
    default in a notebook and at a terminal.

    Without `home`, nothing remains on disk. With it, the run is kept in this state directory, where `thinwire runs` and
    the dashboard show it. If the process is killed at any moment, the same call goes on with the unfinished run, to the
    same bits as if it had never been killed. Each client's personal layers stay in it, for `History.model`.

    >>> simulate("digits=examples/digits/task.py", "examples/digits/plan.toml", clients=8)  # doctest: +SKIP
    """
    parse_split(split)
    read = _read(plan)
    if seed is not None:
        read = _with(read, "run", seed=seed)
    require_own_start(read)
    shows = Progress(read.run.rounds) if (is_interactive() if progress is None else progress) else None
    with contextlib.ExitStack() as stack:
        if reduce is not None:
            made = reduce if callable(reduce) else lambda: reduce
            read = _with(read, "server", reduce=stack.enter_context(reductions.lent(reduce, made)))
        if optimizer is not None:
            read = _with(read, "server", optimizer=stack.enter_context(optimizers.lent(optimizer, optimizer)))
        if home is None:
            folder = Path(tempfile.mkdtemp(prefix="thinwire-sim-"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        where = AggregatorHome.under(folder if home is None else Path(home), durable=home is not None)
        store = stack.enter_context(Store.open(where.database, durable=where.durable))
        client = ClientInfo(data=None if data is None else Path(data), split=split, seed=read.run.seed)
        code = loaded(task, read)
        first = initial_model(code, read.run.seed, read.local.personal_layers)
        if first.left_out:
            warnings.warn(first.left_out, stacklevel=2)
        try:
            run_id = run_sim(
                read, code, store=store, home=where, clients=clients, client=client, debug=debug,
                processes=processes, step_s=step_s, first=first, on_event=event_handler(on_round, on_evaluate, shows),
                resumable=home is not None,
            )  # fmt: skip
        finally:
            if shows:
                shows.end()
        history = History.read(store, where, run_id, lambda: build(code))
    if history.run.status == "failed":
        raise RunFailed(history)
    return history


def _with(plan: RunPlan, section: str, **values: Any) -> RunPlan:
    """Return the plan with other values in one section."""
    found = plan.to_json()
    return RunPlan.from_json({**found, section: {**found[section], **values}})


def _read(plan: RunPlan | Mapping[str, Any] | str | Path) -> RunPlan:
    if isinstance(plan, RunPlan):
        return plan
    if isinstance(plan, Mapping):
        return RunPlan.from_json(plan, codecs=codecs)
    return RunPlan.load(plan, codecs=codecs)


def loaded(task: str | LoadedTask | Any, plan: RunPlan) -> LoadedTask:
    """Return the loaded task: from NAME=MODULE, or from an object with a task's functions."""
    if isinstance(task, LoadedTask):
        return task
    return load_task(task) if isinstance(task, str) else as_task(plan.run.task, task)


def run_sim(
    plan: RunPlan,
    task: LoadedTask,
    *,
    store: Store,
    home: AggregatorHome,
    clients: int,
    client: ClientInfo,
    debug: bool = False,
    first: Initial | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    on_begin: Callable[[str], None] = lambda run_id: None,
    on_error: Callable[[ClientFailed, str], None] = lambda event, text: None,
    processes: int = 1,
    step_s: Sequence[float] = (),
    resumable: bool = False,
) -> str:
    """Submit a plan as a simulated run, execute it to its end, and return the run's id.

    `client` holds data, split, seed and compute device of all clients. With `debug`, an exception of the task is raised
    where it happens. Without, it is a failure of the client, as on a device. With several `processes`, each of them
    loads the task from its spec. `on_error` gets each failure with the class and the text of its error, which may hold
    data and are recorded nowhere; it follows `on_event`.

    With `resumable`, the state of the run survives this process (storage.py). If there is an unfinished run of the same
    plan and clients, that one is resumed instead.
    """
    require_processes(processes, task, debug)
    require_one_process_for_secrets(plan, processes)
    parse_split(client.split)
    plan = with_whole_id(store, plan)  # as the store has it, to find an unfinished run of the same plan
    require_step_seconds(step_s, clients)
    require_same(plan, task)
    require_own_loop(plan, task)
    with contextlib.ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="thinwire-clients-")))
        population = ClientPopulation(temporary, client, clients, debug, tuple(step_s))
        require_enough(plan, population)
        require_data(task, population)
        require_metrics(plan, task, population)
        made = first or initial_model(task, plan.run.seed, plan.local.personal_layers)
        holdout = SimulatedHoldout.of(plan, task, client, home, made.layout)
        about = {
            "clients": clients, "split": client.split, "seed": client.seed, "step_s": list(step_s),
            "data": str(client.data.absolute()) if client.data else "", "layout": made.layout.digest,
        }  # fmt: skip
        state = ResumableSimulation.find(store, home, plan, about) if resumable else None
        if state and state.unfinished:
            run_id = state.unfinished
            stack.enter_context(own(home.owner(run_id), is_new=False))
        else:
            model = FirstModel(made.layout, report(task), made.vector, made.buffers, made.counters, made.fixed)
            run_id = submit(store, home, plan, model, source="sim", owned=stack)
        on_begin(run_id)
        spool: FileSpool = state.spool(run_id) if state else InMemorySpool(temporary / "spool")
        clock, last_replied = resume_point(store, spool, run_id)
        if state:
            population = replace(population, folder=state.clients(run_id), durable=home.durable)
            state.inherit_personal_values(run_id, plan.run.init)
        fleet = LocalFleet(spool, clock)
        if state is None:
            stack.enter_context(store.gathering(run_id))
        stack.enter_context(rare_full_collections())
        in_order = withdraws_none(plan) and not step_s
        batched, early = in_order and state is None, in_order or not keeps_values(plan, task)
        executor = stack.enter_context(client_executor(task, population, processes, state is not None, batched, early))
        never_late = plan.cohort.deadline_s == "auto" and not step_s
        simulated = SimulatedClients(
            fleet, clock, task, population, executor, never_late=never_late, last_replied=last_replied
        )
        fleet.pump = simulated.step

        def observe(event: Event) -> None:
            on_event(event)
            if isinstance(event, ClientFailed):
                on_error(event, last_error(population.folder / event.device))

        row = drive(
            run_id, store=store, fleet=fleet, home=home, clock=clock, on_event=observe, holdout=holdout,
            commands=RunCommands(partial(CommandQueue(store.commands).stop_command, run_id)),
        )  # fmt: skip
        if row.status in ENDED:  # not before: a killed process would forget a command that had no effect yet
            commands = CommandQueue(store.commands)  # a new one also has those that came with the end
            for kind in ("stop-run", "stop-after-round"):
                commands.answer_all(kind, run_id)
        if state and row.status in ENDED:
            keep_personal_values(state.folder(run_id), run_id)
    return run_id


def withdraws_none(plan: RunPlan) -> bool:
    """Return True if no round of the plan withdraws an assignment, unless a deadline passes or the run is stopped."""
    is_sequential = plan.cohort.mode == "sync" and plan.local.overlap is None
    return is_sequential and not plan.cohort.over_select and not plan.is_protected


def keeps_values(plan: RunPlan, task: LoadedTask) -> bool:
    """Return True if a client's training changes values of its own that it evaluates the next model with."""
    local = plan.local
    return bool(local.personal_layers) or local.buffers == "local" or task.optional("train") is not None


@contextlib.contextmanager
def client_executor(
    task: LoadedTask, population: ClientPopulation, processes: int, shared: bool, batched: bool, early: bool
) -> Iterator[ClientExecutor]:
    """Yield the executor of the clients' work; none of its processes remains afterwards.

    With `shared`, each commit of a client is written to disk for a later process. With `batched`, clients of this
    process may work before their turn (`SerialExecutor`), with `early` those of others (`ProcessExecutor`).
    """
    if processes == 1:
        with keep_generators(), note_signals():
            yield SerialExecutor(population, InProcessExecutor(task, population.client.device), shared, batched)
        return
    executor = ProcessExecutor(task.spec, population, processes, early)
    try:
        yield executor
    finally:
        executor.close()


FULL_COLLECTION_EVERY = 100  # collections of the generation before the oldest; Python's own number is 10


@contextlib.contextmanager
def rare_full_collections() -> Iterator[None]:
    """Let Python's garbage collector visit its oldest generation ten times less often in this block.

    Such a collection visits the state of all clients, which took an eighth of the time of clients that do not train.
    The younger generations are collected as before, so reference cycles that a training leaves are freed soon.
    """
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], max(before[2], FULL_COLLECTION_EVERY))
    try:
        yield
    finally:
        gc.set_threshold(*before)


def task_report(plan: RunPlan, layout: Layout) -> TaskReport:
    """Return the report of the task that the devices of a scripted fleet need, so that this plan can select them."""
    return TaskReport(plan.run.task, layout_digest=layout.digest)


def run_scripted(
    plan: RunPlan,
    layout: Layout,
    fleet: ScriptedFleet,
    *,
    store: Store,
    home: AggregatorHome,
    params: Vector | None = None,
    stop: Callable[[], StopCommand] = lambda: None,
) -> str:
    """Submit a plan, execute it to its end on this fleet and its clock, and return the run's id.

    The fleet's devices must report `task_report(plan, layout)`. The initial model is `params`, or zeros by default.
    """
    first = np.zeros(layout.size, np.float32) if params is None else params
    nothing = np.zeros(0, np.float32)
    run_id = submit(store, home, plan, FirstModel(layout, task_report(plan, layout), first, nothing), source="sim")
    with store.gathering(run_id):
        drive(run_id, store=store, fleet=fleet, home=home, clock=fleet.virtual, commands=RunCommands(stop))
    return run_id
