"""Submission checks the plan, stores the run and its initial model, and queues the run for the service."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Literal

import numpy as np

from thinwire.aggregation import codecs
from thinwire.aggregation.control_variates import algorithm_of, carried
from thinwire.aggregation.mean import BufferMean
from thinwire.aggregation.plan_codecs import require_rules, rungs
from thinwire.core.equipment import GIB
from thinwire.core.errors import PlanError
from thinwire.core.events import Event, RunStatusChanged
from thinwire.core.fleet import TaskReport
from thinwire.core.layout import FLOAT_BYTES, Layout
from thinwire.core.plan import RunPlan
from thinwire.core.plan_names import RUN, named_model
from thinwire.core.plan_rules import DeviceTimes
from thinwire.core.statedir import AggregatorHome, own
from thinwire.core.types import Fixed, Vector
from thinwire.server.aggregator import require_values
from thinwire.server.model_store import Versions
from thinwire.store import Store
from thinwire.store.device_profiles import DeviceProfiles, update_bytes, work_key, workload

LARGEST = 200_000_000  # trained float32 on 24 GiB: the model, the sum, one update, and a copy that is being written


def submit(
    store: Store,
    home: AggregatorHome,
    plan: RunPlan,
    layout: Layout,
    params: Vector,
    buffers: Vector,
    counters: Mapping[str, int],
    report: TaskReport,
    source: Literal["devices", "sim"] = "devices",
    owned: contextlib.ExitStack | None = None,
    fixed: Fixed | None = None,
    name: str = "",
    order: int = 0,
) -> str:
    """Check everything, store the initial model, queue the run, and return its id.

    With `[run] init = "device"` there is no initial model yet: only the layout and the fixed buffers are used. `owned`
    is for a caller that executes the run itself: it holds the run's lock for that time. `name` is shown to people.
    The command `order`, which made the run, is answered when the run gets its place in the queue. If the plan begins
    with the model of another run, it names that run by its whole id from here on, because devices read it too.

    A crash meanwhile leaves a row with status `preparing`. A command is carried out again and completes that run. A run
    without one never starts, and `end_abandoned` closes it.
    """
    plan = with_whole_id(store, plan)
    found = plan.check(codecs)
    if not found and source == "devices":
        found = plan.check(codecs, _measured(store, plan, carried(algorithm_of(plan), layout)))
    if found:
        raise found[0].error()
    travels = carried(algorithm_of(plan), layout)
    require_rules(plan, travels)
    if travels.size > LARGEST:
        raise PlanError(
            f"a model of {layout.size / 1e6:.0f} M trained parameters is more than this aggregator takes",
            why=f"a round needs about {travels.size * 16 / GIB:.0f} GiB; the stated limit is {LARGEST / 1e6:.0f} M"
            + (", control variates included" if travels.control_from else ""),
            hint="train fewer of them (LoRA: freeze the base)",
        )
    if plan.run.init != "device":
        require_values(params)
    with contextlib.ExitStack() as meanwhile:
        run_id = store.create_run(plan.run.task, plan, layout, report, source=source, name=name, order=order)
        folder, now = home.run(run_id), time.time()
        (owned or meanwhile).enter_context(own(home.owner(run_id)))
        versions, stored = Versions(folder, travels, home.durable), list[Event]()
        versions.write_fixed(fixed or {})
        if plan.run.init != "device":
            first = np.concatenate([params, np.zeros(travels.size - layout.size, np.float32)])
            stored.append(versions.write(0, first, buffers, counters, now))
        store.record(run_id, [*stored, RunStatusChanged(now, "queued", "in the queue")], order=order)
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


def _measured(store: Store, plan: RunPlan, layout: Layout) -> dict[str, DeviceTimes]:
    """Return the best times of each connected device; none if one of them never did such work, as it may be
    the fastest.
    """
    there = {info.row.name for info in store.devices() if info.online and info.row.state == "approved"}
    best = best_times(DeviceProfiles(store.measures()), plan, layout)
    return {name: best[name] for name in there} if there <= best.keys() else {}


def best_times(known: DeviceProfiles, plan: RunPlan, layout: Layout) -> dict[str, DeviceTimes]:
    """Return for each device the least time that it could need for the least that a round of this plan takes.

    Devices of which a part was never measured are left out.
    """
    down = 0 if plan.downlink.compressed else layout.size * FLOAT_BYTES
    taken = workload(plan, 0, down, min(update_bytes(codec, layout, {}) for codec in rungs(plan.uplink)))
    found = {device: known.best(device, work_key(plan, layout), taken) for device in known.devices}
    return {device: times for device, times in found.items() if times is not None}
