"""The runtime of a task: its module, device and data, and the execution of one request. Clients that take turns share
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import nn

from . import data
from . import module as tensors
from .as_built import AsBuilt
from .errors import BadTask, BadUsage, task_code
from .evaluate import evaluate, never
from .layout import Places
from .module import build, first_model
from .protocol import Site, Split, TrainRequest, TrainResult
from .schedule import REAL, Clock, TimeBudget
from .task import LoadedTask
from .trainer import TorchTrainer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .protocol import Tell

    Vector = NDArray[np.float32]

SMALL = 1 << 20  # trained parameters; below, a second thread costs more than it gains


def silent(what: str, done: int, total: int) -> None:
    """Ignore progress."""


@dataclass
class TaskRuntime:
    """Executes requests for one task.

    The module is built at its first use, and a site's data are read then. Each request begins with the module as it was
    built.

    Invariant: a result depends on the request, the site and the vectors alone, not on earlier requests.
    """

    task: LoadedTask
    device: str = "cpu"
    _splits: dict[Site, Split] = field(default_factory=dict)
    _built: AsBuilt | None = field(init=False, default=None)
    _in_use: bool = field(init=False, default=False)  # task code has had the module since the last check

    @cached_property
    def places(self) -> Places:
        """Return the layout of the module."""
        return self.built.places

    @property
    def built(self) -> AsBuilt:
        """Return the built module; raise `BadTask` if a second build gives another layout."""
        if self._built is None:
            module = build(self.task).to(self.device)
            places = tensors.places_of(module)
            if "places" in vars(self):
                require_alike(places, self.places)
            self._built = AsBuilt(module, places)
        return self._built

    @property
    def left_out(self) -> str:
        """Describe the module's state that is not sent; "" if there is none."""
        return tensors.left_out(self.built.module)

    def split(self, site: Site) -> Split:
        """Return a site's data, read once."""
        if site not in self._splits:
            self._splits[site] = data.as_split(self.task.module.data(site))
        return self._splits[site]

    @cached_property
    def fresh(self) -> tuple[Vector, dict[str, int]]:
        """Return the buffers and counters with which the module was built."""
        module = self.built.module
        return tensors.read_buffers(module, self.places).copy(), tensors.read_counters(module, self.places)

    def set_up(self, params: Vector, buffers: Vector | None, counters: Mapping[str, int]) -> nn.Module:
        """Set the module to the run's model; values that are not given become those of the build.

        Changes by earlier requests are undone.
        """
        if self._in_use and self.built.changed():  # the previous request failed or was cancelled
            self._built = None
        self._in_use = True
        return self._filled(params, buffers, counters)

    def _filled(self, params: Vector, buffers: Vector | None, counters: Mapping[str, int]) -> nn.Module:
        fresh_buffers, fresh_counters = self.fresh
        module = self.built.restore()
        tensors.write(module, self.places, params)
        tensors.write_buffers(module, self.places, fresh_buffers if buffers is None else buffers)
        tensors.write_counters(module, self.places, {**fresh_counters, **counters})
        return module

    @property
    def _trains(self) -> str:
        return "training" if self.task.optional("train") is None else "train()"

    def require_unchanged(self, by: str) -> None:
        """Raise `BadTask` if frozen tensors or fixed buffers have changed; the module is then built again."""
        changed, self._in_use = self.built.changed(), False
        if changed:
            self._built = None
            raise BadTask(
                f"{changed} by {by}",
                why="it does not travel: every client must keep what model() made",
                hint="requires_grad = True, a finite float buffer, or register_buffer(.., persistent=False)",
            )

    @task_code()
    def do(
        self,
        order: TrainRequest,
        site: Site,
        params: Vector,
        buffers: Vector | None,
        tell: Tell = silent,
        cancelled: Callable[[], bool] = never,
        clock: Clock = REAL,
    ) -> TrainResult:
        """Execute a request and return its result.

        Evaluation precedes training, so its metrics are those of the given model. Raise `Cancelled` and `NotFinite`;
        errors of the task's code pass through.
        """
        if order.first:
            first = first_model(self.task, order.key.a)
            return TrainResult(params=first.params, buffers=first.buffers, counters=first.counters)
        until = None if order.within_s is None else clock.now() + order.within_s
        partial = None if until is None else TimeBudget(until, order.local.min_steps, clock)
        trainer = (
            TorchTrainer(
                self.task, order.local, self.device, order.slow_step_s, order.schedule, partial, clock, order.shift
            )
            if order.train
            else None
        )  # made before any data are read: it refuses keys that nothing carries out
        split, done = self.split(site), TrainResult()
        module = self.set_up(params, buffers, order.counters)
        begun = clock.now()
        if order.measure and split.test is not None:
            tell("measure", 0, 0)
            done.sums = evaluate(module, self.task, split.test, device=self.device, cancelled=cancelled)
            module = self._filled(params, buffers, order.counters) if order.train else module
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
        self.require_unchanged("evaluation" if not order.train else self._trains)
        return done


def require_alike(one: Places, other: Places) -> None:
    """Raise `BadTask` if two calls of model() gave different tensors, or other values of tensors that are not sent."""
    if one != other:
        raise BadTask(
            "model() gives other tensors each time it is called",
            why="frozen tensors and fixed buffers must be the same on every client",
            hint="draw them by torch.rand and the like, which are seeded, or from a generator with a fixed seed",
        )


def compute_device(wanted: str) -> str:
    """Return the torch device: for `auto` the first GPU or the CPU; raise `BadUsage` if the device does not exist."""
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
    """Set the number of torch threads; with 0, one for a small model, otherwise torch's own default."""
    if count or (size and size < SMALL):
        torch.set_num_threads(count or 1)
