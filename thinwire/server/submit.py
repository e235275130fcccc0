"""Submission checks the plan, stores the run and its initial model, and queues the run for the service.

This module also decides how large a reply may be. The limit follows from the run's model, so it is known before a byte
of the reply is accepted or parsed.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np

from thinwire.aggregation import codecs
from thinwire.aggregation.control_variates import algorithm_of, carried
from thinwire.aggregation.mean import counters, float_buffers
from thinwire.aggregation.plan_codecs import require_rules
from thinwire.core.errors import NotFound, PlanError
from thinwire.core.events import Event, RunStatusChanged
from thinwire.core.fleet import TaskReport
from thinwire.core.layout import Layout
from thinwire.core.plan import RunPlan
from thinwire.core.plan_rules import DeviceTimes
from thinwire.core.serialization import FREE_HEADER_BYTES, MAX_HEAD_BYTES, ReplyLimit
from thinwire.core.statedir import AggregatorHome, own
from thinwire.core.types import Fixed, Vector
from thinwire.server.aggregator import require_values
from thinwire.server.model_store import Versions
from thinwire.server.policy.device_profiles import DeviceProfiles, best_times
from thinwire.store import Store

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
) -> str:
    """Check everything, store the initial model, queue the run, and return its id.

    With `[run] init = "device"` there is no initial model yet: only the layout and the fixed buffers are used. `owned`
    is for a caller that executes the run itself: it holds the run's lock for that time.

    A crash meanwhile leaves a row with status `preparing`. Such a run never starts, and `end_abandoned` closes it.
    """
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
            why=f"a round needs about {travels.size * 16 / 2**30:.0f} GiB; the stated limit is {LARGEST / 1e6:.0f} M"
            + (", control variates included" if travels.control_from else ""),
            hint="train fewer of them (LoRA: freeze the base)",
        )
    if plan.run.init != "device":
        require_values(params)
    with contextlib.ExitStack() as meanwhile:
        run_id = store.create_run(plan.run.task, plan, layout, report, source=source)
        folder, now = home.run(run_id), time.time()
        (owned or meanwhile).enter_context(own(home.owner(run_id)))
        versions, stored = Versions(folder, travels, home.durable), list[Event]()
        versions.write_fixed(fixed or {})
        if plan.run.init != "device":
            first = np.concatenate([params, np.zeros(travels.size - layout.size, np.float32)])
            stored.append(versions.write(0, first, buffers, counters, now))
        store.record(run_id, [*stored, RunStatusChanged(now, "queued", "in the queue")])
    return run_id


def _measured(store: Store, plan: RunPlan, layout: Layout) -> dict[str, DeviceTimes]:
    """Return the best times of each connected device; none if one of them never did such work, as it may be
    the fastest.
    """
    there = {info.row.name for info in store.devices() if info.online and info.row.state == "approved"}
    best = best_times(DeviceProfiles(store.measures()), plan, layout)
    return {name: best[name] for name in there} if there <= best.keys() else {}


BASE_BYTES = 64 * 2**20  # for a reply to an unknown assignment
BYTES_A_PARAMETER = 8  # no codec sends more: an index of four bytes and a float32
BYTES_A_BUFFER = 4  # of a value of the averaged buffers, which are float32
BYTES_A_PART = 160  # of a header: its name, its length, 64 hex digits
BYTES_A_COUNTER = 32  # without its name: 20 digits and the JSON around them
UNKNOWN = ReplyLimit(BASE_BYTES, identity=None)  # for assignments of unknown runs


def limit_of(plan: RunPlan, layout: Layout) -> ReplyLimit:
    """Return the size limit of a reply: a part for each segment, one for buffers, and every counter."""
    travels = carried(algorithm_of(plan), layout)
    parts, counted = len(travels.segments) + 1, counters(layout)
    header = FREE_HEADER_BYTES + BYTES_A_PART * parts
    header += sum(BYTES_A_COUNTER + len(json.dumps(tensor.name)) for tensor in counted)
    payload = BASE_BYTES + BYTES_A_PARAMETER * layout.size
    payload += BYTES_A_BUFFER * sum(tensor.size for tensor in float_buffers(layout))
    return ReplyLimit(payload, parts, len(counted), min(header, MAX_HEAD_BYTES))


class RunLimits:
    """Size limits of replies to the runs in a store (`core.fleet.ReplyLimits`); any thread may call it.

    An `ask_id` begins with its run: RUN.ROUND.DEVICE.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._of: dict[str, ReplyLimit] = {}
        for row in store.line():  # their devices may reply to assignments from before this start
            self.of(row.run_id + ".")

    def of(self, ask_id: str) -> ReplyLimit:
        """Return the limit for a reply to this assignment."""
        run_id = ask_id.partition(".")[0]
        if run_id not in self._of:
            try:
                row = self._store.run(run_id) if run_id else None
            except NotFound:
                row = None
            if row is None or row.run_id != run_id:
                return UNKNOWN
            limit = limit_of(RunPlan.from_json(row.plan), Layout.from_json(row.layout))
            self._of[run_id] = replace(limit, identity=row.identity or None)  # a simulation has no identity
        return self._of[run_id]

    def max_header_bytes(self) -> int:
        """Return the largest header limit of all runs that are active, or were looked up since the start."""
        return max((limit.header_bytes for limit in list(self._of.values())), default=FREE_HEADER_BYTES)
