"""A plan and a task's code become a run in the aggregator's queue, with its first model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from thinwire.cli import say
from thinwire.cli.places import aggregator_home
from thinwire.cli.task_code import load

if TYPE_CHECKING:
    from thinwire.core import RunPlan
    from thinwire.store import Store


def hand_over(store: Store, home: Path | None, plan: RunPlan, file: Path, task: str | None) -> str:
    """Import the task here, where it was typed, make or fetch the first model, and queue the run; gives its id."""
    from thinwire.cli.first_model import first_model
    from thinwire.client.initial import initial_model
    from thinwire.client.task import report, require_own_loop
    from thinwire.server.submit import submit

    code = load(plan.run.task, file, task)
    require_own_loop(plan, code)
    made = initial_model(code, plan.run.seed)
    if made.left_out:
        say.note(f"warning: {made.left_out}")
    place = aggregator_home(home)
    vector, buffers, counters = first_model(store, home, plan, file, made)
    return submit(store, place, plan, made.layout, vector, buffers, counters, report(code), fixed=made.fixed)
