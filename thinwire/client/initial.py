"""The first model of a run, made where its task is typed."""

from __future__ import annotations

from dataclasses import dataclass, field

from thinwire.client.compute.initial import build, first_model
from thinwire.client.compute.task import LoadedTask
from thinwire.client.refusals import in_our_words
from thinwire.core.layout import Layout
from thinwire.core.types import Fixed, Vector

__all__ = ["Initial", "build", "initial_model"]


@dataclass(frozen=True)
class Initial:
    """Version 0: trained parameters, float buffers, single integers as counters, and buffers that nothing changes."""

    layout: Layout
    vector: Vector
    buffers: Vector
    counters: dict[str, int]
    fixed: Fixed = field(default_factory=dict)
    left_out: str = ""  # what of the model's state does not travel, in words


@in_our_words()
def initial_model(task: LoadedTask, run_seed: int) -> Initial:
    """A model drawn by the run's seed; `TaskError` says where the task's code raised."""
    first = first_model(task, run_seed)
    layout = Layout.from_json(first.places.to_json())
    return Initial(layout, first.params, first.buffers, first.counters, first.fixed, first.left_out)
