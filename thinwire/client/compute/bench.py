"""Where a task is worked on, an order at a time: its module, its device, its data. Clients that take turns share it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import nn

from . import batches, tensors
from .clock import REAL, Clock
from .ending import task_code
from .errors import BadUsage
from .evaluate import evaluate, never
from .initial import build, first_model
from .order import Done, Order
from .partial import Partial
from .places import Places
from .site import Site, Split
from .task import LoadedTask
from .trainer import TorchTrainer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float32]
    Tell = Callable[[str, int, int], None]  # "measure" or "train", steps done, steps in all (0: not known)

SMALL = 1 << 20  # trained parameters under which more than one thread costs more than it gains


def silent(what: str, done: int, total: int) -> None: ...


@dataclass
class Bench:
    """The module is built when it is first needed, a site's data read then; each order sets all parameters anew."""

    task: LoadedTask
    device: str = "cpu"
    _splits: dict[Site, Split] = field(default_factory=dict)

    @cached_property
    def module(self) -> nn.Module:
        return build(self.task).to(self.device)

    @cached_property
    def places(self) -> Places:
        return tensors.places_of(self.module)

    def split(self, site: Site) -> Split:
        if site not in self._splits:
            self._splits[site] = batches.as_split(self.task.module.data(site))
        return self._splits[site]

    @cached_property
    def fresh(self) -> tuple[Vector, dict[str, int]]:
        """The buffers and counters that the module was built with."""
        return tensors.read_buffers(self.module, self.places).copy(), tensors.read_counters(self.module, self.places)

    def set_up(self, params: Vector, buffers: Vector | None, counters: Mapping[str, int]) -> nn.Module:
        """The module as the run's model; what is not given is as it was built, whatever it has done since."""
        fresh_buffers, fresh_counters = self.fresh
        tensors.write(self.module, self.places, params)
        tensors.write_buffers(self.module, self.places, fresh_buffers if buffers is None else buffers)
        tensors.write_counters(self.module, self.places, {**fresh_counters, **counters})
        return self.module

    @task_code()
    def do(
        self,
        order: Order,
        site: Site,
        params: Vector,
        buffers: Vector | None,
        tell: Tell = silent,
        cancelled: Callable[[], bool] = never,
        clock: Clock = REAL,
    ) -> Done:
        """Measuring comes before training: its figures are of the model as it was given.

        `Cancelled` and `NotFinite` as they come; whatever the task's code raises passes through.
        """
        if order.first:
            first = first_model(self.task, order.key.a)
            return Done(params=first.params, buffers=first.buffers, counters=first.counters)
        until = None if order.within_s is None else clock.now() + order.within_s
        partial = None if until is None else Partial(until, order.local.min_steps, clock)
        trainer = (
            TorchTrainer(
                self.task, order.local, self.device, order.slow_step_s, order.schedule, partial, clock, order.shift
            )
            if order.train
            else None
        )  # before any data are read: it refuses what nobody would carry out
        split, done = self.split(site), Done()
        module = self.set_up(params, buffers, order.counters)
        begun = clock.now()
        if order.measure and split.test is not None:
            tell("measure", 0, 0)
            done.sums = evaluate(module, self.task, split.test, device=self.device, cancelled=cancelled)
        done.measure_s = clock.now() - begun
        if trainer is not None:
            begun = clock.now()
            trained = trainer.train(
                module, split.train, order.work, order.key, lambda at, total: tell("train", at, total), cancelled
            )
            done.examples, done.steps, done.a, done.loss, done.planned = trained
            done.params = tensors.read(module, self.places)
            done.buffers = tensors.read_buffers(module, self.places)
            done.counters = tensors.read_counters(module, self.places)
            done.train_s = clock.now() - begun
        return done


def compute_device(wanted: str) -> str:
    """`auto` is the first GPU there is; `BadUsage` for one that is not there."""
    if wanted == "auto":
        apple = getattr(torch.backends, "mps", None)  # since torch 1.12
        return "cuda:0" if torch.cuda.is_available() else "mps" if apple and apple.is_available() else "cpu"
    try:
        torch.empty(0, device=wanted)
    except (RuntimeError, AssertionError) as error:
        raise BadUsage(
            f"--device {wanted} cannot be used", why=str(error).splitlines()[0][:200], hint="--device cpu"
        ) from error
    return wanted


def use_threads(count: int, size: int = 0) -> None:
    """So many torch threads; 0: one for a small model, else torch's own choice."""
    if count or (size and size < SMALL):
        torch.set_num_threads(count or 1)
