"""Load a task for the command line and describe it to an aggregator.

The code that the worker runs is client/train/task.py. `load_task`, `as_task` and the functions that partition a data
set (client/train/partitions.py) are those of `client/train/`, with errors translated into Thinwire's.

`TaskManifest` is a task as the worker has loaded it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import entry_points
from typing import Any

from thinwire.aggregation import codecs
from thinwire.client.errors import translate_errors
from thinwire.client.train import partitions, task
from thinwire.client.train.errors import place
from thinwire.client.train.protocol import Local, ignored
from thinwire.client.train.task import LoadedTask
from thinwire.core.errors import PlanError
from thinwire.core.fleet import MAX_TENSORS, TaskReport
from thinwire.core.layout import Layout
from thinwire.core.personal_layers import shared_model
from thinwire.core.plan import RunPlan
from thinwire.core.types import Fixed, Vector

__all__ = [
    "GROUP",
    "Initial",
    "LoadedTask",
    "as_task",
    "held_out",
    "initial_model",
    "installed_tasks",
    "load_task",
    "own_part",
    "parse_split",
    "partition",
    "report",
    "require_own_loop",
]


GROUP = "thinwire.tasks"

load_task = translate_errors()(task.load_task)
as_task = translate_errors()(task.as_task)


def installed_tasks() -> dict[str, str]:
    """Return the name and module of every task installed under the entry-point group `thinwire.tasks`."""
    return {entry.name: entry.value for entry in entry_points(group=GROUP)}


def require_own_loop(plan: RunPlan, loaded: LoadedTask) -> None:
    """Raise `PlanError` if the task's own train() or optimizer() does not fit what the plan requires."""
    if plan.run.algorithm != "fedavg" and loaded.optional("train") is not None:
        raise PlanError(
            f'[run] algorithm = "{plan.run.algorithm}" with the task {loaded.name}, which has its own train()',
            "the whole loop is the task's: nobody else can correct the gradient of each step",
            "leave it out of the plan, or train() out of the task",
        )
    for what, why, hint in ignored(Local.of(plan.local.model_dump(mode="json")), loaded.defines):
        raise PlanError(what, why, hint)


def report(loaded: LoadedTask) -> TaskReport:
    """Return what a hello reports of a task. Code that raises is reported by its place, not raised."""
    from thinwire.client.train.module import build, layout_of

    try:
        layout = Layout.from_json(layout_of(build(loaded)).to_json())
    except Exception as error:  # whatever the task's code raises: another task of this device may work
        return TaskReport(loaded.name, loaded.version, loaded.source_digest, error=place(error, loaded.file))
    return TaskReport(loaded.name, loaded.version, loaded.source_digest, layout.digest, tuple(codecs))


@dataclass(frozen=True)
class Initial:
    """Version 0 of a model, made from the run's seed.

    `vector` holds the trained parameters and `buffers` the float buffers. Single integers are `counters`, and buffers
    that never change are `fixed`.
    """

    layout: Layout
    vector: Vector
    buffers: Vector
    counters: dict[str, int]
    fixed: Fixed = field(default_factory=dict)
    left_out: str = ""  # the part of the model's state that is not sent, in words


@translate_errors()
def initial_model(task: LoadedTask, run_seed: int, personal_layers: Sequence[str] = ()) -> Initial:
    """Return a model drawn by the run's seed, without its personal layers.

    `TaskError` names the place where the task's code raised, `PlanError` a glob that does not fit the model.
    """
    from thinwire.client.train.module import first_model

    first = first_model(task, run_seed)
    layout = Layout.from_json(first.layout.to_json())
    patterns = tuple(personal_layers)
    shared = shared_model(layout, patterns, first.params, first.buffers, first.counters)
    return Initial(*shared, first.fixed, first.left_out)


parse_split = translate_errors()(partitions.parse_split)
partition = translate_errors()(partitions.partition)
own_part = translate_errors()(partitions.own_part)
held_out = partitions.held_out


@dataclass(frozen=True)
class TaskManifest:
    """A task as the worker has loaded it."""

    spec: str
    name: str
    version: str = ""
    source_digest: str = ""
    file: str = ""
    layout: Mapping[str, Any] | None = None
    error: str = ""
    wrong: Sequence[str] = ()  # the error of client/train/errors.py that its import raised: kind, what, why, hint
    left_out: str = ""  # the part of the model's state that is not sent, in words

    @classmethod
    def from_message(cls, row: Mapping[str, Any]) -> TaskManifest:
        """Return a description from the worker's message.

        Raises LookupError, TypeError or ValueError if the message is invalid.
        """
        if "wrong" in row:
            wrong = tuple(str(text) for text in row["wrong"])
            return cls(row["spec"], str(row["spec"]).partition("=")[0], error=wrong[1], wrong=wrong)
        found = cls(**row)
        _ = found.report  # reads the layout, once, and raises if it is invalid
        return found

    @cached_property
    def parsed(self) -> Layout | None:
        """Return the layout of the task's model, None if there is none."""
        return Layout.from_json(self.layout) if self.layout is not None else None

    @cached_property
    def report(self) -> TaskReport:
        """Return what a hello reports of the task."""
        if self.parsed is None:
            return TaskReport(self.name, self.version, self.source_digest, error=self.error)
        text = self.parsed.text
        return TaskReport(
            self.name, self.version, self.source_digest, self.parsed.digest, tuple(codecs),
            tensors=text if len(text) <= MAX_TENSORS else "",
        )  # fmt: skip
