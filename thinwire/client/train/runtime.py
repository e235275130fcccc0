"""The runtime of a task: its module, device and data, and the execution of requests. Simulated clients share one.

Several simulated clients share one module, and a device builds its module again whenever its worker restarts. So a
result must not depend on the changes that task code made during earlier requests: `AsBuilt` restores the module to the
state in which `model()` built it, before every request. Tensors that are sent are set from outside (`module.py`).
Frozen tensors and fixed buffers are compared with their original values. Everything else is restored.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from . import data
from . import module as tensors
from .context import Context
from .errors import BadTask, BadUsage, task_code
from .evaluate import evaluate, never, numbers, whole_set
from .layout import FLOATS, Layout, slices
from .module import build, first_model
from .private import Secrets, train_privately
from .protocol import ClientInfo, Split, TrainRequest, TrainResult
from .schedule import REAL, Clock, TimeBudget
from .state import copied
from .task import LoadedTask
from .trainer import TorchTrainer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .protocol import OnProgress

    Vector = NDArray[np.float32]

SMALL = 1 << 20  # trained parameters; below, a second thread costs more than it gains
CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)  # copying objects of other classes is not safe
MAX_NAMED = 3  # changed tensors named in one message


class Registered(NamedTuple):
    """A parameter or buffer with all its state except its values."""

    tensor: torch.Tensor
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    hooks: dict[int, Any]


class AsBuilt:
    """Holds the state of a freshly built module except the values of tensors that are sent.

    `restore` resets attributes, submodules, hooks, the mode of each layer, `requires_grad`, tensors that no state dict
    keeps, generators, and lists, dicts and sets in attributes. It does not look into objects of other classes.
    """

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        self.module, self.layout = module, layout
        self._containers = _copies(module)
        self._registered = [
            Registered(t, t.shape, t.dtype, t.device, t.requires_grad, dict(t._backward_hooks or {}))
            for kind in ("_parameters", "_buffers")
            for _, t in tensors.members(module, kind)
        ]
        known = {id(tensors.member(module, t.name)) for t in layout.tensors}
        held = {id(value): value for container, _ in self._containers for value in _values(container)}.values()
        self._own = [
            (t, t.detach().clone())
            for t in held
            if isinstance(t, torch.Tensor) and id(t) not in known and t.is_leaf and t.layout == torch.strided
        ]
        self._generators = [(g, g.get_state()) for g in held if isinstance(g, torch.Generator)]
        self._digests = {t.name: _digest(tensors.member(module, t.name)) for t in layout.untrained}

    def restore(self) -> nn.Module:
        """Restore the module and return it; the caller then sets the values of the tensors that are sent."""
        for container, copy in self._containers:
            container.clear()
            (container.extend if isinstance(container, (list, deque)) else container.update)(copy)
        for t, shape, dtype, device, requires_grad, hooks in self._registered:
            if t.shape != shape:
                t.data = torch.empty(shape, dtype=dtype, device=device)
            elif t.dtype != dtype or t.device != device:
                t.data = t.data.to(device, dtype)
            if t.grad_fn is not None:  # task code changed it in place within a graph
                t.detach_()
            if t.requires_grad != requires_grad:
                t.requires_grad_(requires_grad)
            t.grad = None
            if t._backward_hooks is not None:
                t._backward_hooks.clear()
                t._backward_hooks.update(hooks)
        for t, values in self._own:
            if t.grad_fn is not None:
                t.detach_()
            if t.shape != values.shape or t.dtype != values.dtype or t.device != values.device:
                t.data = values.clone()
            elif not torch.equal(t.detach(), values):
                with torch.no_grad():
                    t.copy_(values)
        for generator, state in self._generators:
            generator.set_state(state)
        return self.module

    def changed(self) -> str:
        """Describe the frozen tensors and fixed buffers that have changed; return "" if none has."""
        found = [
            f"frozen tensor {t.name}" if t.role == "frozen" else f"{_kind(t.dtype)} buffer {t.name}"
            for t in self.layout.untrained
            if _digest(tensors.member(self.module, t.name)) != self._digests[t.name]
        ]
        more = [f"{len(found) - MAX_NAMED} more"] if len(found) > MAX_NAMED else []
        *first, last = [*found[:MAX_NAMED], *more] or [""]
        return f"{', '.join(first)} and {last} were changed" if first else last and f"{last} was changed"


def _copies(module: nn.Module) -> list[tuple[Any, Any]]:
    """Return each container that can be reached from the module's attributes, with a shallow copy of it."""
    found: dict[int, tuple[Any, Any]] = {}
    left: list[Any] = [module]
    while left:
        value = left.pop()
        container = value.__dict__ if isinstance(value, nn.Module) else value
        if id(container) in found or not (isinstance(value, nn.Module) or type(value) in CONTAINERS):
            continue
        found[id(container)] = container, container.copy()
        left += _values(container)
    return list(found.values())


def _values(container: Any) -> Iterator[Any]:
    yield from container.values() if isinstance(container, dict) else container


def _digest(tensor: torch.Tensor | None) -> str:
    """Return the digest of a tensor's type, shape and values; "" for None."""
    if tensor is None:
        return ""
    whole = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    tensors.hash_values(tensor, whole)
    return whole.hexdigest()


def _kind(dtype: str) -> str:
    if dtype.startswith(FLOATS):
        return "float"
    return dtype if dtype == "bool" else "complex" if dtype.startswith("complex") else "integer"


def ignore_progress(what: str, done: int, total: int) -> None:
    """Ignore progress."""


@dataclass
class TaskRuntime:
    """Executes requests for one task.

    The module is built at its first use, and a client's data are read then. Each request begins with the module as it
    was built.

    Invariant: a result depends on the request, the client and the vectors alone, not on earlier requests.
    """

    task: LoadedTask
    device: str = "cpu"
    secrets: Callable[[], Secrets] | None = None  # None: this interpreter has no secret randomness of Thinwire's
    _splits: dict[ClientInfo, Split] = field(default_factory=dict)
    _built: AsBuilt | None = field(init=False, default=None)
    _first_kept: tuple[tuple[str, ...], Vector] | None = field(init=False, default=None)
    _in_use: bool = field(init=False, default=False)  # True if task code may have changed the module

    @cached_property
    def layout(self) -> Layout:
        """Return the layout of the module."""
        return self.built.layout

    @property
    def built(self) -> AsBuilt:
        """Return the built module; raise `BadTask` if a second build gives another layout."""
        if self._built is None:
            module = build(self.task).to(self.device)
            layout = tensors.layout_of(module)
            if "layout" in vars(self):
                require_same_layout(layout, self.layout)
            self._built = AsBuilt(module, layout)
        return self._built

    @property
    def left_out(self) -> str:
        """Describe the module's state that is not sent; "" if there is none."""
        return tensors.left_out(self.built.module)

    def split(self, client: ClientInfo) -> Split:
        """Return a client's data, read once."""
        if (found := self._splits.get(client)) is None:
            found = self._splits[client] = data.as_split(self.task.module.data(client))
        return found

    def split_bytes(self, client: ClientInfo) -> int:
        """Return the bytes of the tensors and arrays in a client's data, 0 if they were not read."""
        split = self._splits.get(client)
        return 0 if split is None else data.held_bytes(split.train) + data.held_bytes(split.test)

    def evict(self, client: ClientInfo) -> None:
        """Remove a client's data from memory; the task reads them again when they are needed."""
        self._splits.pop(client, None)

    @cached_property
    def initial_values(self) -> tuple[Vector, dict[str, int]]:
        """Return the buffers and counters with which the module was built."""
        module = self.built.module
        return tensors.read_buffers(module, self.layout).copy(), tensors.read_counters(module, self.layout)

    def set_up(
        self,
        params: Vector,
        buffers: Vector | None,
        counters: Mapping[str, int],
        personal: tuple[str, ...] = (),
        kept: Vector | None = None,
    ) -> nn.Module:
        """Set the module to the run's model; values that are not given become those of the build.

        Changes by earlier requests are undone. The tensors `personal` get the values `kept`.
        """
        if self._in_use and self.built.changed():  # the previous request failed or was cancelled
            self._built = None
        self._in_use = True
        return self._write_model(params, buffers, counters, personal, kept)

    def _write_model(
        self,
        params: Vector,
        buffers: Vector | None,
        counters: Mapping[str, int],
        personal: tuple[str, ...] = (),
        kept: Vector | None = None,
    ) -> nn.Module:
        fresh_buffers, fresh_counters = self.initial_values
        module, (shared, own) = self.built.restore(), self.layout.split(personal)
        if self.layout.buffers:
            tensors.write_buffers(module, self.layout, fresh_buffers)
        tensors.write(module, shared, params)
        if shared.buffers and buffers is not None:
            tensors.write_buffers(module, shared, buffers)
        if kept is not None:
            tensors.write_kept(module, own, kept)
        if self.layout.counters:
            tensors.write_counters(module, self.layout, {**fresh_counters, **counters})
        return module

    def _initial_personal(self, personal: tuple[str, ...]) -> Vector:
        """Return the floats of personal tensors as `model()` makes them: the same on every client."""
        if self._first_kept is None or self._first_kept[0] != personal:
            _, own = self.layout.split(personal)
            self._first_kept = personal, tensors.read_kept(build(self.task), own)
        return self._first_kept[1]

    def _with_zeros(self, shift: Vector, personal: tuple[str, ...]) -> Vector:
        """Return a shift of the shared parameters as one of all parameters, which is 0 at the personal ones."""
        made = tensors.zeros(self.layout.size)
        shared = (t for t in self.layout.split(personal)[0].trained)
        taken = {t.name: span for t, span in slices(tuple(shared))}
        for t, span in slices(self.layout.trained):
            if t.name in taken:
                made[span] = shift[taken[t.name]]
        return made

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
        request: TrainRequest,
        client: ClientInfo,
        params: Vector,
        buffers: Vector | None,
        on_progress: OnProgress = ignore_progress,
        cancelled: Callable[[], bool] = never,
        clock: Clock = REAL,
    ) -> TrainResult:
        """Execute a request and return its result.

        Evaluation precedes training, so its metrics are those of the given model. Raise `Cancelled` and `NotFinite`;
        errors of the task's code pass through.
        """
        shared, own = self.layout.split(request.personal)
        if request.first:
            first = first_model(self.task, request.key.a, request.personal)
            return TrainResult(params=first.params, buffers=first.buffers, counters=first.counters)
        if request.shift is not None and request.personal:
            request = replace(request, shift=self._with_zeros(request.shift, request.personal))
        kept = self._initial_personal(request.personal) if request.kept is None and request.personal else request.kept
        received = clock.now()
        until = None if request.within_s is None else received + request.within_s
        partial = None if until is None else TimeBudget(until, request.local.min_steps, clock)
        trainer = None
        if request.train:  # made before any data are read: it refuses keys that nothing carries out
            given = self.device, request.schedule, partial, clock, request.shift, request.personal, request.may_diverge
            trainer = TorchTrainer(self.task, request.local, *given)
        split, done = self.split(client), TrainResult()
        module = self.set_up(params, buffers, request.counters, request.personal, kept)
        begun = clock.now()
        done.load_s = begun - received
        if request.measure and split.test is not None:
            on_progress("measure", 0, 0)
            done.sums = evaluate(module, self.task, split.test, device=self.device, cancelled=cancelled)
            whole, done.histograms = whole_set(module, self.task, split.test, done.sums)
            done.sums.update(numbers(whole))
            if request.train:
                module = self._write_model(params, buffers, request.counters, request.personal, kept)
        done.measure_s = clock.now() - begun
        if trainer is not None:
            begun = clock.now()

            def progress(at: int, total: int) -> None:
                on_progress("train", at, total)

            if request.private is not None:
                trained = train_privately(
                    trainer, module, split.train, request.private, self.secrets, progress, cancelled
                )
            else:
                own_loop = self.task.optional("train") is not None
                context = Context(
                    request.local, request.round, request.version, client.name,
                    copied(request.state, request.max_state_bytes) if own_loop else {}, request.may_report,
                )  # fmt: skip
                trained = trainer.train(module, split.train, request.work, request.key, progress, cancelled, context)
                if own_loop:
                    done.reported, done.state = context.metrics, copied(context.state, request.max_state_bytes)
            done.examples, done.steps, done.a, done.loss, done.planned = trained
            done.params = tensors.read(module, shared)
            done.buffers = tensors.read_buffers(module, shared)
            done.kept = tensors.read_kept(module, own) if request.personal else None
            done.counters = tensors.read_counters(module, self.layout)
            done.train_s = clock.now() - begun
        self.require_unchanged("evaluation" if not request.train else self._trains)
        return done


def require_same_layout(one: Layout, other: Layout) -> None:
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
            f"--device {wanted} is not usable", why=str(error).splitlines()[0][:200], hint="--device cpu"
        ) from error
    return wanted


def use_threads(count: int, size: int = 0) -> None:
    """Set the number of torch threads; with 0, one for a small model, otherwise torch's own default."""
    if count or (size and size < SMALL):
        torch.set_num_threads(count or 1)
