"""A task as the person at this machine names it, and as it is told to an aggregator. The code is `compute/task.py`."""

from __future__ import annotations

from importlib.metadata import entry_points

from thinwire.aggregation import codecs
from thinwire.client.compute import task
from thinwire.client.compute.failures import place
from thinwire.client.compute.local import Local, ignored
from thinwire.client.compute.task import LoadedTask
from thinwire.client.refusals import in_our_words
from thinwire.core.errors import PlanError
from thinwire.core.fleet import TaskReport
from thinwire.core.layout import Layout
from thinwire.core.plan import RunPlan

__all__ = ["GROUP", "LoadedTask", "as_task", "installed_tasks", "load_task", "report", "require_own_loop"]

GROUP = "thinwire.tasks"

load_task = in_our_words()(task.load_task)
as_task = in_our_words()(task.as_task)


def installed_tasks() -> dict[str, str]:
    """Name and module of everything that is installed under the entry-point group `thinwire.tasks`."""
    return {entry.name: entry.value for entry in entry_points(group=GROUP)}


def require_own_loop(plan: RunPlan, loaded: LoadedTask) -> None:
    """`PlanError` where the plan asks for what the task's own train() or optimizer() leaves nobody to carry out."""
    if plan.run.algorithm != "fedavg" and loaded.optional("train") is not None:
        raise PlanError(
            f'[run] algorithm = "{plan.run.algorithm}" with the task {loaded.name}, which has its own train()',
            "the whole loop is the task's: nobody else can correct the gradient of each step",
            "leave it out of the plan, or train() out of the task",
        )
    for what, why, hint in ignored(Local.of(plan.local.model_dump(mode="json")), loaded.defines):
        raise PlanError(what, why, hint)


def report(loaded: LoadedTask) -> TaskReport:
    """What is told to an aggregator; code that raises is reported by its place, not raised."""
    from thinwire.client.compute.initial import build
    from thinwire.client.compute.tensors import places_of

    try:
        layout = Layout.from_json(places_of(build(loaded)).to_json())
    except Exception as error:  # whatever the task's code raises: another task of this device may work
        return TaskReport(loaded.name, loaded.version, loaded.source_digest, error=place(error, loaded.file))
    return TaskReport(loaded.name, loaded.version, loaded.source_digest, layout.digest, tuple(codecs))
