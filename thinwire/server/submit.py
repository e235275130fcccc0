"""Submission checks the plan, stores the run and its initial model, and queues the run for the service.

`submit` is called by `thinwire run`, by simulations, and by the aggregator itself for a run that a person commands
through the dashboard (`RunStarter`). Such a command is a row of `store.commands` with the plan, so it survives a crash.
The aggregator imports no task code: the layout is the one that devices report or that an earlier run had
(store/task_layouts.py). The first model comes from another run, from a file that `aggregator.toml` allows, from an
upload, or from a device.

Invariant: a command makes one run, or none if it is refused. It names the run in the transaction that makes the run's
row, and is answered in the one that queues the run. After a crash between them the next start of the service carries
the command out again, and completes the same run.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from thinwire.aggregation import codecs
from thinwire.aggregation.control_variates import algorithm_of, transmitted_layout
from thinwire.aggregation.mean import BufferMean, buffer_layout, float_buffers
from thinwire.aggregation.plan_codecs import require_rules, rungs
from thinwire.core.disk_reserve import require_space
from thinwire.core.equipment import GIB
from thinwire.core.errors import TRANSIENT, PlanError, TaskError, ThinwireError
from thinwire.core.events import Event, RunStatusChanged
from thinwire.core.fleet import TaskReport
from thinwire.core.layout import FLOAT_BYTES, Layout
from thinwire.core.owner_file import aggregator_file
from thinwire.core.personal_layers import shared_layout
from thinwire.core.plan import RunPlan
from thinwire.core.plan_errors import Problem
from thinwire.core.plan_names import RUN, UPLOAD, installed, named_model, origin_problems, refused_names, upload_id
from thinwire.core.plan_rules import DeviceTimes, as_error
from thinwire.core.statedir import AggregatorHome, own
from thinwire.core.types import Fixed, Vector
from thinwire.privacy.keys import require_ml_kem
from thinwire.server.aggregator import require_values
from thinwire.server.model_files import model_of_run, read_model_file, require_counted_file
from thinwire.server.model_store import Versions
from thinwire.store import START_RUN, CommandRow, Store
from thinwire.store.device_profiles import DeviceProfiles, update_bytes, work_key, workload
from thinwire.store.task_layouts import known_task

log = logging.getLogger("thinwire.commands")
MAX_PARAMETERS = 200_000_000  # trained float32 on 24 GiB: model, sum, one update, and a copy that is being written


@dataclass(frozen=True)
class FirstModel:
    """The layout and the first model of a run, with what devices report of its task.

    `fixed` are the buffers that training may not change. `params` does not count if a device makes the model.
    """

    layout: Layout
    report: TaskReport
    params: Vector
    buffers: Vector
    counters: Mapping[str, int] = field(default_factory=dict)
    fixed: Fixed = field(default_factory=dict)


def submit(
    store: Store,
    home: AggregatorHome,
    plan: RunPlan,
    first: FirstModel,
    source: Literal["devices", "sim"] = "devices",
    owned: contextlib.ExitStack | None = None,
    name: str = "",
    command_id: int = 0,
) -> str:
    """Check everything, store the initial model, queue the run, and return its id.

    With `[run] init = "device"` there is no initial model yet: only the layout and the fixed buffers are used. `owned`
    is for a caller that executes the run itself: it holds the run's lock for that time. `name` is shown to people.
    The command `command_id`, which made the run, is answered when the run gets its place in the queue. If the plan
    begins with the model of another run, it names that run by its whole id from here on, because devices read it too.

    A crash meanwhile leaves a row with status `preparing`. A command is carried out again and completes that run. A run
    without one never starts, and `end_abandoned` closes it.
    """
    plan, layout = with_whole_id(store, plan), first.layout
    problems = plan.check(codecs)
    if not problems and source == "devices":
        problems = plan.check(codecs, _times_of_connected(store, plan, transmitted_layout(algorithm_of(plan), layout)))
    if problems:
        raise as_error(problems)
    if plan.secure.post_quantum:
        require_ml_kem()  # this machine checks the keys of the clients
    travels = transmitted_layout(algorithm_of(plan), layout)
    require_rules(plan, travels)
    if travels.size > MAX_PARAMETERS:
        raise PlanError(
            f"a model of {layout.size / 1e6:.0f} M trained parameters is more than this aggregator takes",
            why=f"a round needs about {travels.size * 16 / GIB:.0f} GiB; the limit is {MAX_PARAMETERS / 1e6:.0f} M"
            + (", control variates included" if travels.control_from else ""),
            hint="train fewer of them (LoRA: freeze the base)",
        )
    if plan.run.init != "device":
        require_values(first.params)
    with contextlib.ExitStack() as meanwhile:
        run_id = store.create_run(
            plan.run.task, plan, layout, first.report, source=source, name=name, command_id=command_id
        )
        folder, now = home.run(run_id), time.time()
        (owned or meanwhile).enter_context(own(home.owner(run_id)))
        versions, stored = Versions(folder, travels, home.durable), list[Event]()
        versions.write_fixed(first.fixed)
        if plan.run.init != "device":
            params = np.concatenate([first.params, np.zeros(travels.size - layout.size, np.float32)])
            stored.append(versions.write(0, params, first.buffers, first.counters, now))
        store.record(run_id, [*stored, RunStatusChanged(now, "queued", "in the queue")], command_id=command_id)
    return run_id


def with_whole_id(store: Store, plan: RunPlan) -> RunPlan:
    """Return the plan with the whole id in `[run] init = "run:ID"`, which may be `latest` or the beginning of one."""
    if (named := named_model(plan.run.init)) is None or (whole := store.run(named[0]).run_id) == named[0]:
        return plan
    values = plan.to_json()
    init = f"{RUN}{whole}{plan.run.init.removeprefix(RUN + named[0])}"
    return RunPlan.from_json({**values, "run": {**values["run"], "init": init}})


def first_model_of(layout: Layout) -> tuple[Vector, Vector]:
    """Return (params, buffers) of zeros for a run whose first model a device makes."""
    return np.zeros(layout.size, np.float32), np.zeros(BufferMean(layout).layout.size, np.float32)


def _times_of_connected(store: Store, plan: RunPlan, layout: Layout) -> dict[str, DeviceTimes]:
    """Return the least times of each connected device; {} if one was never measured, since it may be the fastest."""
    there = {info.row.name for info in store.devices() if info.online and info.row.state == "approved"}
    best = best_times(DeviceProfiles(store.measures()), plan, layout)
    return {name: best[name] for name in there} if there <= best.keys() else {}


def best_times(known: DeviceProfiles, plan: RunPlan, layout: Layout) -> dict[str, DeviceTimes]:
    """Return for each device the least time that it could need for the least that a round of this plan takes.

    Devices of which a part was never measured are left out.
    """
    down = 0 if plan.downlink.compressed else layout.size * FLOAT_BYTES
    taken = workload(plan, 0, down, min(update_bytes(codec, layout, {}) for codec in rungs(plan.uplink)))
    times_of = {device: known.least_times(device, work_key(plan, layout), taken) for device in known.devices}
    return {device: times for device, times in times_of.items() if times is not None}


NO_VALUES = np.zeros(0, np.float32)


class UnreadableSettings(PlanError):
    """`aggregator.toml` is not valid now, so nobody knows which code it allows: no fault of a run that waits for it."""


class RunStarter:
    """Carries out the commands to start a run, one after the other in a thread of its own: a model may be large."""

    def __init__(self, store: Store, home: AggregatorHome) -> None:
        self._store, self._home = store, home
        self._taken = set[int]()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="run-starter")
        self._closing = threading.Event()

    def step(self, commands: Sequence[CommandRow]) -> None:
        """Begin to carry out the commands that are new."""
        for command in commands:
            if command.id not in self._taken:
                self._taken.add(command.id)
                self._worker.submit(self._carry_out, command)

    def close(self) -> None:
        """End the thread; the commands that it has not begun are carried out after the next start."""
        self._closing.set()
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _carry_out(self, command: CommandRow) -> None:
        if self._closing.is_set():
            return
        try:
            try:
                start(self._store, self._home, command)
            except TRANSIENT:
                raise
            except ThinwireError as error:
                self._store.commands.answer(command.id, error.as_result())
            except Exception as error:  # a defect of ours ends this command, and not the service
                said = f"a defect of Thinwire: {type(error).__name__}: {error}"
                refused = ThinwireError("the run was not started", said)
                self._store.commands.answer(command.id, refused.as_result())
        except TRANSIENT:  # the command has no answer, and the next step tries again
            self._taken.discard(command.id)
        except ThinwireError:  # the store is damaged: the next start of the service tries again
            log.exception("the answer to a command to start a run could not be written")


def start(store: Store, home: AggregatorHome, command: CommandRow) -> str:
    """Make the run of a command, queue it and return its id; raise a `ThinwireError` if it is refused."""
    plan = prepared(RunPlan.from_json(command.args["plan"]))
    _require_allowed(plan, home)
    first = first_model(store, home, plan)
    require_space(home.root, first.layout.size * FLOAT_BYTES)
    return submit(store, home, plan, first, command_id=command.id)


def require_allowed(store: Store, home: AggregatorHome, run_id: str) -> None:
    """Raise `PlanError` if a run that a command started names code that `aggregator.toml` does not allow any more.

    It is called before a run begins or goes on, and so before any of that code is imported. A run that a person typed
    on the machine may name any code. The file of a first model is not looked at: the run has read it.
    """
    if store.commands.args_of(START_RUN, run_id):
        _require_allowed(RunPlan.from_json(store.run(run_id).plan), home, code_only=True)


def _require_allowed(plan: RunPlan, home: AggregatorHome, code_only: bool = False) -> None:
    """Raise `PlanError` for the first name of code or of a file that `aggregator.toml` does not allow now.

    The file is not read for a plan that names nothing: an operator may be editing it. Raise `UnreadableSettings` if it
    is not valid.
    """
    own, others = codecs.own_names(), installed()

    def refused(allow: Sequence[str]) -> list[Problem]:
        problems = refused_names(plan, own, allow, others)
        return [problem for problem in problems if not (code_only and problem.place == ("run", "init"))]

    if not refused(()):
        return
    try:
        allow = aggregator_file(home.root.parent).allow
    except PlanError as error:
        raise UnreadableSettings(error.what, error.why, error.hint) from error
    if problems := refused(allow):
        raise PlanError(problems[0].what, problems[0].why, problems[0].hint)


def prepared(plan: RunPlan) -> RunPlan:
    """Return the plan with a device as the origin of its first model if it names none: here is no task's code.

    Raise `PlanError` for a plan under masks or with privacy that names none.
    """
    if plan.run.init:
        return plan
    if problems := origin_problems(plan):
        raise PlanError(problems[0].what, problems[0].why, problems[0].hint)
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
    made = _model_of_file(path, known.layout, known.report)
    require_counted_file(plan, path)
    return made


def _model_of_file(path: Path, layout: Layout, report: TaskReport) -> FirstModel:
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
