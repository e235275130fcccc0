"""Runs that a person orders through the dashboard: the aggregator makes and queues them, as `thinwire run` does.

The order is a row of `store.commands` with the plan, so it survives a crash. The aggregator imports no task code: the
layout is the one that devices report or that an earlier run had (store/task_layouts.py). The first model comes from
another run, from a file that `aggregator.toml` allows, from an upload, or from a device.

Invariant: an order makes one run, or none if it is refused. It names the run in the transaction that makes the run's
row, and is answered in the one that queues the run. After a crash between them the next start of the service carries
the order out again, and completes the same run.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from thinwire.aggregation import codecs
from thinwire.aggregation.mean import buffer_layout, float_buffers
from thinwire.core.disk_reserve import require_space
from thinwire.core.errors import PlanError, TaskError, ThinwireError
from thinwire.core.fleet import TaskReport
from thinwire.core.layout import FLOAT_BYTES, Layout
from thinwire.core.owner_file import aggregator_file
from thinwire.core.personal_layers import shared_layout
from thinwire.core.plan import Problem, RunPlan
from thinwire.core.plan_names import UPLOAD, installed, named_model, refused_names, upload_id
from thinwire.core.statedir import AggregatorHome
from thinwire.core.types import Fixed, Vector
from thinwire.server.model_files import model_of_run, read_model_file
from thinwire.server.submit import submit
from thinwire.store import START_RUN, Order, Store
from thinwire.store.task_layouts import known_task

NO_VALUES = np.zeros(0, np.float32)


@dataclass(frozen=True)
class FirstModel:
    """The first model of an ordered run; `params` is empty if a device makes it."""

    layout: Layout
    report: TaskReport
    params: Vector
    buffers: Vector
    counters: Mapping[str, int] = field(default_factory=dict)
    fixed: Fixed = field(default_factory=dict)


class RunStarter:
    """Carries out the orders to start a run, one after the other in a thread of its own: a model may be large."""

    def __init__(self, store: Store, home: AggregatorHome) -> None:
        self._store, self._home = store, home
        self._taken = set[int]()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="run-starter")
        self._closing = threading.Event()

    def step(self, orders: Sequence[Order]) -> None:
        """Begin to carry out the orders that are new."""
        for order in orders:
            if order.id not in self._taken:
                self._taken.add(order.id)
                self._worker.submit(self._carry_out, order)

    def close(self) -> None:
        """End the thread; the orders that it has not begun are carried out after the next start."""
        self._closing.set()
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _carry_out(self, order: Order) -> None:
        if self._closing.is_set():
            return
        try:
            start(self._store, self._home, order)
        except ThinwireError as error:
            refused = error
        except Exception as error:  # a defect of ours ends this order, and not the service
            said = f"a defect of Thinwire: {type(error).__name__}: {error}"
            refused = ThinwireError("the run was not started", said)
        else:
            return
        self._store.commands.answer(order.id, refused.as_result())


def start(store: Store, home: AggregatorHome, order: Order) -> str:
    """Make the run of an order, queue it and return its id; raise a `ThinwireError` if it is refused."""
    plan = prepared(RunPlan.from_json(order.args["plan"]))
    _require_allowed(plan, home)
    made = first_model(store, home, plan)
    require_space(home.root, made.layout.size * FLOAT_BYTES)
    return submit(
        store, home, plan, made.layout, made.params, made.buffers, made.counters, made.report, fixed=made.fixed,
        order=order.id,
    )  # fmt: skip


def require_allowed(store: Store, home: AggregatorHome, run_id: str) -> None:
    """Raise `PlanError` if a run that was ordered names code that `aggregator.toml` does not allow any more.

    It is called before a run begins or goes on, and so before any of that code is imported. A run that a person typed
    on the machine may name any code. The file of a first model is not looked at: the run has read it.
    """
    if store.commands.args_of(START_RUN, run_id):
        _require_allowed(RunPlan.from_json(store.run(run_id).plan), home, code_only=True)


def _require_allowed(plan: RunPlan, home: AggregatorHome, code_only: bool = False) -> None:
    """Raise `PlanError` for the first name of code or of a file that `aggregator.toml` does not allow now.

    The file is not read for a plan that names nothing: an operator may be editing it.
    """
    own, others = codecs.own_names(), installed()

    def refused(allow: Sequence[str]) -> list[Problem]:
        found = refused_names(plan, own, allow, others)
        return [one for one in found if not (code_only and one.place == ("run", "init"))]

    if refused(()) and (problems := refused(aggregator_file(home.root.parent).allow)):
        raise PlanError(problems[0].what, problems[0].why, problems[0].hint)


def prepared(plan: RunPlan) -> RunPlan:
    """Return the plan with a device as the origin of its first model if it names none: here is no task's code."""
    if plan.run.init:
        return plan
    values = plan.to_json()
    return RunPlan.from_json({**values, "run": {**values["run"], "init": "device"}})


def first_model(store: Store, home: AggregatorHome, plan: RunPlan) -> FirstModel:
    """Return the first model of a plan by its `[run] init`; `TaskError` if the layout of its task is not known."""
    known, init = known_task(store, plan.run.task), plan.run.init
    if known is not None:
        known = replace(known, layout=shared_layout(known.layout, tuple(plan.local.personal_layers)))
    if named_model(init):
        other = model_of_run(store, home, plan, known.layout if known else None)
        report = known.report if known else other.run.task_report
        return FirstModel(other.layout, report, other.params, other.buffers, other.row.counters, other.fixed)
    if known is None:
        raise TaskError(
            f"nothing is known of the model of the task {plan.run.task}",
            why="no approved device has reported it, no run had it, and the aggregator imports no task's code",
            hint="connect a device that has it, or type thinwire run PLAN where the task's code is",
        )
    if init == "device":
        zeros = np.zeros(buffer_layout(known.layout).size, np.float32)
        return FirstModel(known.layout, known.report, NO_VALUES, zeros)
    path = upload_path(home, init) if init.startswith(UPLOAD) else Path(init)
    return _of_file(path, known.layout, known.report)


def _of_file(path: Path, layout: Layout, report: TaskReport) -> FirstModel:
    """Return the model of a file, which must hold all averaged buffers: no task's code could make the others."""
    nothing = np.full(buffer_layout(layout).size, np.nan, np.float32)
    params, buffers, counters = read_model_file(path, layout, nothing)
    if np.isnan(buffers).any():
        names = ", ".join(t.name for t in float_buffers(layout)[:3])
        raise TaskError(
            "the model's file lacks buffers, or holds NaN in them",
            why=f"the model has {names}; only the task's code could make them, and the aggregator does not import it",
            hint="a file with the whole state_dict, as thinwire runs model writes",
        )
    return FirstModel(layout, report, params, buffers, counters)


def upload_path(home: AggregatorHome, init: str) -> Path:
    """Return the file of an upload; `TaskError` if the name is none that an upload was given."""
    if not (name := upload_id(init)):
        raise TaskError(f"there is no upload {init[:40]!r}", why="its id has 32 hexadecimal digits", hint="upload it")
    return home.uploads / f"{name}.safetensors"
