"""The first model of a run, and the module that a device trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from thinwire.client import tensors
from thinwire.client.seeding import seeded
from thinwire.core.errors import TaskError
from thinwire.core.keys import Key, derive
from thinwire.core.layout import Layout
from thinwire.core.types import Vector

if TYPE_CHECKING:
    from thinwire.client.task import LoadedTask


@dataclass(frozen=True)
class Initial:
    """Version 0: trained parameters, float buffers, and integer buffers as counters."""

    layout: Layout
    vector: Vector
    buffers: Vector
    counters: dict[str, int]


def build(task: LoadedTask, key: Key | None = None) -> nn.Module:
    """The task's module. Without a key the same seed is used on every device, so that frozen tensors agree."""
    with seeded(key or derive(Key(0), "model")):
        module = task.module.model()
    if not isinstance(module, nn.Module):
        raise TaskError(
            f"model() of the task {task.name} gave {_article(module)}",
            why="it must give a torch.nn.Module, freshly made",
            hint="def model(): return nn.Linear(2, 1)",
        )
    return module


def initial_model(task: LoadedTask, run_seed: int) -> Initial:
    """A model drawn by the run's seed; `TaskError` says where the task's code raised."""
    try:
        layout = tensors.layout_of(build(task))
        module = build(task, derive(Key(run_seed), "init"))
    except TaskError:
        raise
    except Exception as error:  # whatever model() raises is the task's error
        from thinwire.client.failures import place

        raise TaskError(f"model() of the task {task.name} raised {place(error, task.file)}", why=str(error)) from error
    return Initial(
        layout, tensors.read(module, layout), tensors.read_buffers(module, layout),
        tensors.read_counters(module, layout),
    )  # fmt: skip


def _article(thing: object) -> str:
    return "None" if thing is None else f"a {type(thing).__name__}"
