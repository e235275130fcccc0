"""The module that a task gives, and the first model of a run."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from . import tensors
from .ending import task_code
from .errors import BadTask, Wrong, given
from .failures import place
from .keys import Key, derive
from .places import Places
from .seeding import seeded

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .task import LoadedTask
    from .tensors import Vector


class First(NamedTuple):
    """Version 0: trained parameters, float buffers, single integers as counters, and what no training changes.

    `fixed` holds the fixed buffers, and the frozen tensors that `model()` draws at random: whoever loads the exported
    model could not make those. Both are the same in every run, since every client draws them by one seed. `left_out`
    says what does not travel.
    """

    places: Places
    params: Vector
    buffers: Vector
    counters: dict[str, int]
    fixed: dict[str, NDArray[Any]]
    left_out: str


def build(task: LoadedTask, key: Key | None = None) -> nn.Module:
    """The task's module. Without a key the same seed is used on every device, so that frozen tensors agree."""
    with seeded(key or derive(Key(0), "model")), task_code():
        module = task.module.model()
    if not isinstance(module, nn.Module):
        raise BadTask(
            f"model() of the task {task.name} gave {given(module)}",
            why="it must give a torch.nn.Module, freshly made",
            hint=_instead(module),
        )
    return module


def first_model(task: LoadedTask, run_seed: int) -> First:
    """A model drawn by the run's seed; `BadTask` says where the task's code raised."""
    try:
        everywhere = build(task)
        places = tensors.places_of(everywhere)
        module = build(task, derive(Key(run_seed), "init"))
    except Wrong:
        raise
    except Exception as error:  # whatever model() raises is the task's error
        raise BadTask(f"model() of the task {task.name} raised {place(error, task.file)}", why=str(error)) from error
    return First(
        places, tensors.read(module, places), tensors.read_buffers(module, places),
        tensors.read_counters(module, places), tensors.read_fixed(everywhere, places, module),
        tensors.left_out(module),
    )  # fmt: skip


def _instead(value: Any) -> str:
    """Return what model() is to write in place of this."""
    if value is None:
        return "return the module at the end of model()"
    if inspect.isclass(value) and issubclass(value, nn.Module):
        return f"return {value.__name__}(...), an object of the class"
    if isinstance(value, Mapping):
        return "make the module, and load these weights: net = Net(); net.load_state_dict(weights); return net"
    if isinstance(value, (tuple, list)):
        return "return the module alone; what goes with it (a tokenizer, a config) stands at the top of the task"
    return "def model(): return nn.Linear(2, 1)"
