"""Where a task is worked on: its module on its device, its layout. Sessions that take turns may share one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from thinwire.client import tensors
from thinwire.client.initial import build
from thinwire.client.task import LoadedTask
from thinwire.core.errors import UsageError
from thinwire.core.layout import Layout
from thinwire.core.types import Vector

SMALL = 1 << 20  # trained parameters under which more than one thread costs more than it gains


@dataclass
class Bench:
    """The module is built when it is first needed; every use of it sets all of its parameters anew."""

    task: LoadedTask
    device: str = "cpu"

    @cached_property
    def module(self) -> nn.Module:
        return build(self.task).to(self.device)

    @cached_property
    def layout(self) -> Layout:
        return tensors.layout_of(self.module)

    def set_up(self, params: Vector, buffers: Vector | None, counters: dict[str, int]) -> nn.Module:
        """The module as the run's model."""
        tensors.write(self.module, self.layout, params)
        if buffers is not None:
            tensors.write_buffers(self.module, self.layout, buffers)
        tensors.write_counters(self.module, self.layout, counters)
        return self.module


def compute_device(wanted: str) -> str:
    """`auto` is the first GPU there is; `UsageError` for one that is not there."""
    if wanted == "auto":
        return "cuda:0" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.empty(0, device=wanted)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(
            f"--device {wanted} cannot be used", why=str(error).splitlines()[0][:200], hint="--device cpu"
        ) from error
    return wanted


def use_threads(count: int, size: int = 0) -> None:
    """So many torch threads; 0: one for a small model, else torch's own choice."""
    if count or (size and size < SMALL):
        torch.set_num_threads(count or 1)
