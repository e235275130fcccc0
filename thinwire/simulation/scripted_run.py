"""A whole run on a scripted fleet: the aggregator's own path, hours of virtual time in seconds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from thinwire.core.events import Event
from thinwire.core.fleet import TaskReport
from thinwire.core.home import AggregatorHome
from thinwire.core.layout import Layout
from thinwire.core.plan import RunPlan
from thinwire.core.types import Vector
from thinwire.server.driving.running import StopOrder
from thinwire.server.run import drive
from thinwire.server.submit import submit
from thinwire.simulation.scripted import ScriptedFleet
from thinwire.store import Store


def reported(plan: RunPlan, layout: Layout) -> TaskReport:
    """What the devices of a scripted fleet say that they have installed, so that this plan may ask them."""
    return TaskReport(plan.run.task, layout_digest=layout.digest)


def run_scripted(
    plan: RunPlan,
    layout: Layout,
    fleet: ScriptedFleet,
    *,
    store: Store,
    home: AggregatorHome,
    params: Vector | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    stop: Callable[[], StopOrder] = lambda: None,
) -> str:
    """Submit a plan and drive it to its end on this fleet and its clock; gives the run's id.

    The fleet's devices report `reported(plan, layout)`. The first model is `params`, zeros where none are given.
    """
    first = np.zeros(layout.size, np.float32) if params is None else params
    nothing = np.zeros(0, np.float32)
    run_id = submit(store, home, plan, layout, first, nothing, {}, reported(plan, layout), source="sim")
    with store.gathering(run_id):
        drive(run_id, store=store, fleet=fleet, home=home, clock=fleet.virtual, on_event=on_event, stop=stop)
    return run_id
