"""A whole run in this process: the same plan, task, driver and store as on devices."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from thinwire.aggregation import codecs
from thinwire.client.bench import SMALL
from thinwire.client.initial import initial_model
from thinwire.client.task import LoadedTask, as_task, load_task
from thinwire.core.clock import VirtualClock
from thinwire.core.errors import ThinwireError
from thinwire.core.events import Event
from thinwire.core.home import AggregatorHome
from thinwire.core.plan import RunPlan
from thinwire.server.run import drive
from thinwire.server.submit import submit
from thinwire.server.versions import Versions
from thinwire.simulation.history import History
from thinwire.simulation.local import LocalFleet
from thinwire.store import RunRow, Store

OnEvent = Callable[[Event], None]


def nothing(event: Event) -> None: ...


def simulate(
    task: LoadedTask | ModuleType | str | Any,
    plan: RunPlan | str | Path,
    clients: int = 20,
    split: str | None = None,
    seed: int | None = None,
    data: Path | None = None,
    on_event: OnEvent = nothing,
) -> History:
    """Run a plan with so many clients and give what came out; nothing is left on disk.

    `task` is a module or object, or `NAME=MODULE` as on the command line; `seed` stands for `[run] seed` and cuts the
    data. An error in the task's code is raised where it happens.
    """
    read = plan if isinstance(plan, RunPlan) else RunPlan.load(plan)
    if seed is not None:
        read = read.model_copy(update={"run": read.run.model_copy(update={"seed": seed})})
    loaded = _task(task, read)
    with tempfile.TemporaryDirectory(prefix="thinwire-sim-") as folder:
        home = AggregatorHome.under(Path(folder))
        with Store.open(home.database) as store:
            row = run_sim(read, loaded, clients, split or "iid", store, home, data=data, debug=True, on_event=on_event)
            if row.status != "done":
                raise ThinwireError(f"the simulated run {row.status}", why=row.status_text)
            return history(store, home, row)


def history(store: Store, home: AggregatorHome, row: RunRow) -> History:
    """A finished run's history, with its last model."""
    from thinwire.core.events import ModelStored
    from thinwire.core.layout import Layout

    layout = Layout.from_json(row.layout)
    last = [event for _, event in store.events(row.run_id) if isinstance(event, ModelStored)][-1]
    params, _ = Versions(home.run(row.run_id), layout).read(last)
    return History(row, store.rounds(row.run_id), layout, params)


def run_sim(
    plan: RunPlan,
    task: LoadedTask,
    clients: int,
    split: str,
    store: Store,
    home: AggregatorHome,
    *,
    data: Path | None = None,
    device: str = "cpu",
    debug: bool = False,
    on_event: OnEvent = nothing,
    on_begin: Callable[[str], None] = lambda run_id: None,
) -> RunRow:
    """Store a run with source "sim", drive it to its end and give its row; with `debug` a task's error is raised."""
    if found := plan.check(codecs):
        raise found[0].error()
    made = initial_model(task, plan, plan.run.seed)
    run_id = submit(
        store, home, plan, made.layout, made.vector, made.buffers, made.counters, task.report(), source="sim"
    )
    on_begin(run_id)
    with tempfile.TemporaryDirectory(prefix="thinwire-clients-") as folder, _threads(made.layout.size):
        clock = VirtualClock(origin=time.time())
        fleet = LocalFleet(
            task, clients, Path(folder), split=split, seed=plan.run.seed, data=data, device=device, clock=clock,
            debug=debug,
        )  # fmt: skip
        try:
            return drive(run_id, store=store, fleet=fleet, home=home, clock=clock, on_event=on_event)
        finally:
            fleet.close()


def _task(task: Any, plan: RunPlan) -> LoadedTask:
    if isinstance(task, LoadedTask):
        return task
    if isinstance(task, (str, Path)):
        spec = str(task)
        return load_task(spec if "=" in spec else f"{plan.run.task}={spec}")
    return as_task(plan.run.task, task)


@contextlib.contextmanager
def _threads(size: int) -> Iterator[None]:
    """One torch thread for a small model: more of them cost more than they gain."""
    before = torch.get_num_threads()
    if size < SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
