"""Local training of a task: a number of steps from the given model, with batches in an order that a key decides.

`Proximal` (FedProx) and `GradientCorrection` (SCAFFOLD, FedDyn) correct the gradient of a step, `Descent` is plain SGD.
"""

from __future__ import annotations

import inspect
import itertools
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader

from . import data as batches
from .context import Context, TrainingControl, nothing
from .errors import BadTask, Cancelled, NotFinite, describe
from .evaluate import never
from .layout import Key, derive
from .module import as_loss, seed_all, seeded
from .protocol import Local, Work, ignored
from .schedule import CONSTANT, REAL, Clock, Normaliser, Schedule, TimeBudget, weight

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from .task import LoadedTask

    Progress = Callable[[int, int], None]  # steps done, all steps (0: unknown)
    Vector = NDArray[np.float32]


MAX_EXAMPLES = 1 << 53  # a float counts exactly up to this number


class Trained(NamedTuple):
    """Counts of one training: `examples` weigh the update, `a` divides it, `loss` is (sum, count) over the batches.

    `planned` is the number of steps of the whole work; 0: unknown.
    """

    examples: int
    steps: int
    a: float
    loss: tuple[float, float]
    planned: int = 0


@dataclass(frozen=True)
class TorchTrainer:
    """Trains a torch module on one device.

    Invariant: data order, dropout and augmentation depend on the key given to `train` alone.
    """

    task: LoadedTask
    local: Local
    device: str = "cpu"
    schedule: Schedule = CONSTANT
    partial: TimeBudget | None = None
    clock: Clock = REAL
    shift: Vector | None = None  # added to the gradient of every step
    personal: tuple[str, ...] = ()  # tensors that FedProx does not pull: they have no shared value
    may_diverge: bool = False  # a loss that is not finite is no error

    def __post_init__(self) -> None:
        if self.shift is not None and self.task.optional("train") is not None:
            raise BadTask(
                "scaffold or feddyn with a task that has its own train()",
                why="the gradient of every step would have to be corrected in it",
                hint='[run] algorithm = "fedavg"',
            )
        for what, why, hint in ignored(self.local, self.task.defines):
            raise BadTask(what, why, hint)

    def train(
        self,
        module: nn.Module,
        data: Any,
        work: Work,
        key: Key,
        progress: Progress = nothing,
        cancelled: Callable[[], bool] = never,
        context: Context | None = None,
    ) -> Trained:
        """Train the module in place. A task's own loop gets `context`, or one that knows [local] alone.

        After `Cancelled` or `NotFinite` the module is half trained and must not be used.
        """
        module.train()
        if self.local.buffers == "frozen":
            freeze_statistics(module)
        with seeded(key):
            if (whole := self.task.optional("train")) is not None:
                context = Context(self.local) if context is None else context
                context.control = TrainingControl(
                    self.schedule, self.partial, self.clock, cancelled, progress, work.steps
                )
                return self._own_loop_counts(whole(module, data, context), context)
            return self._steps(module, data, work, key, progress, cancelled)

    def _own_loop_counts(self, examples: Any, context: Context) -> Trained:
        """Return the counts of a task's own train(): its scaling with steps is unknown, so `a` is 1."""
        if context.is_cancelled:
            raise Cancelled
        try:
            seen = 0 if isinstance(examples, bool) else operator.index(examples)  # also numpy's and torch's ints
        except TypeError:
            seen = 0
        if not 0 < seen <= MAX_EXAMPLES:
            count = isinstance(examples, int) and not isinstance(examples, bool) and seen <= MAX_EXAMPLES
            said = str(examples) if count else "more than 2^53" if seen > MAX_EXAMPLES else describe(examples)
            raise BadTask(
                f"train(model, data, context) gave {said}",
                why="it must give the number of examples that were seen, one at least: it weighs the update",
                hint="return len(data)",
            )
        context.require_used()
        return Trained(seen, context.done, 1.0, (0.0, 0.0), context.total)

    def _steps(
        self, module: nn.Module, data: Any, work: Work, key: Key, progress: Progress, cancelled: Callable[[], bool]
    ) -> Trained:
        params = [p for p in module.parameters() if p.requires_grad]
        optimizer = self.optimizer(params)
        rates = [group["lr"] for group in optimizer.param_groups]
        counted = self._normaliser()
        own = {id(p) for name, p in module.named_parameters() if name in self.personal}
        shared = [p for p in params if id(p) not in own]
        proximal = Proximal(shared, self.local.prox) if self.local.prox else None
        drift = GradientCorrection(params, self.shift) if self.shift is not None else None
        drawn, total = self._batches(data, work, derive(key, "data"))
        losses, steps, factor = LossMeter(self.device), 0, 1.0
        begun = self.clock.now()
        for group in _step_batches(drawn, self.local.accumulate, lambda step: seed_all(derive(key, "step", step))):
            if cancelled():
                raise Cancelled
            for parameter in params:
                parameter.grad = None  # zero_grad() does the same at a tenth of a small step's cost
            for batch in group:
                here = batches.moved(batch, self.device)
                loss = _differentiable(as_loss(self.task.module.loss(module, here)))
                (loss / len(group) if len(group) > 1 else loss).backward()  # type: ignore[no-untyped-call]  # torch's
                losses.add(loss, batches.examples_in(here))
            if self.local.clip_grad is not None:
                nn.utils.clip_grad_norm_(params, self.local.clip_grad)
            if drift is not None:
                drift.correct()
            if proximal is not None:  # last: the normaliser takes it as whole, on each parameter that moves
                proximal.pull()
            if self.schedule.moves:
                factor = self.schedule.factor(steps, total)
                scale_rates(optimizer, rates, factor)
            optimizer.step()
            counted.step(self.local.lr * factor)
            steps += 1
            progress(steps, total)
            if self.partial is not None:
                float(loss.detach())  # waits until the GPU has finished the step
                last, begun = begun, self.clock.now()
                if self.partial.over(steps, begun - last):
                    break
        summed, seen = losses.total()
        if not math.isfinite(summed) and not self.may_diverge:
            raise NotFinite("the loss became NaN or infinity", why="training diverged", hint="a smaller [local] lr")
        examples = self._weight(batches.count(data), seen, steps, work.steps, total)
        return Trained(examples, steps, counted.a, (summed, float(seen)), total)

    def _weight(self, size: int | None, seen: int, steps: int, wanted: int, total: int) -> int:
        """Return the examples that weigh the update: all of the data's, unless the work was cut short."""
        if self.partial is None or steps == total or not size:
            return size or seen
        return weight(size, steps / wanted if wanted else seen / ((self.local.epochs or 1.0) * size))

    def _normaliser(self) -> Normaliser:
        """Return FedNova's normalizer for SGD; a step of any other optimizer counts by its learning rate."""
        if self.local.optimizer != "sgd":
            return Normaliser(lr=self.local.lr)
        return Normaliser(self.local.momentum, self.local.prox, self.local.lr)

    def _batches(self, data: Any, work: Work, key: Key) -> tuple[Iterator[Any], int]:
        """Return the batches to train on, and the number of steps that they make (0: unknown)."""
        size, accumulate = work.batch, self.local.accumulate
        if isinstance(data, DataLoader) and self.local.batch not in (Local.batch, data.batch_size):
            raise BadTask(
                f"[local] batch = {self.local.batch}, and data(client) gave a DataLoader with "
                f"batch_size {data.batch_size}",
                why="a DataLoader's own batches are trained on",
                hint="leave [local] batch out, or let data(client) give the Dataset",
            )
        if work.steps:
            return itertools.islice(batches.shuffled(data, size, key), work.steps * accumulate), work.steps
        epochs = self.local.epochs or 1.0
        batches.require_countable(data, epochs, size)
        wanted = batches.passes(data, epochs, size)
        every = (batches.never_empty(batches.one_pass(data, size, derive(key, epoch))) for epoch in itertools.count())
        if wanted is None:
            passes = itertools.islice(every, int(epochs))
            return itertools.chain.from_iterable(passes), 0
        return itertools.islice(itertools.chain.from_iterable(every), wanted), -(-wanted // accumulate)

    def optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer | Descent:
        """Return the plan's optimizer of these parameters."""
        local = self.local
        if local.optimizer == "sgd" and self.device == "cpu":
            return Descent(params, local.lr, local.momentum, local.weight_decay)
        if local.optimizer == "sgd":  # on a GPU: one kernel launch for many parameters
            return torch.optim.SGD(params, local.lr, local.momentum, weight_decay=local.weight_decay)
        if local.optimizer in ("adam", "adamw"):
            kind = torch.optim.Adam if local.optimizer == "adam" else torch.optim.AdamW
            return kind(params, local.lr, weight_decay=local.weight_decay)
        own = self.task.optional("optimizer")
        assert own is not None  # `ignored` has refused a task without one
        made = own(params, local)
        if not isinstance(made, torch.optim.Optimizer):
            raise BadTask(
                f"optimizer(params, local) gave {describe(made)}",
                why="it must give a torch.optim.Optimizer",
                hint="return torch.optim.SGD(params, lr=local.lr); [local] schedule moves its lr",
            )
        ours = {id(p) for p in params}
        if not any(id(p) in ours for group in made.param_groups for p in group["params"]):
            raise BadTask(
                f"optimizer(params, local) gave {describe(made)} that holds none of the model's parameters",
                why="it would train something else",
                hint="return torch.optim.SGD(params, lr=local.lr)",
            )
        if inspect.signature(made.step).parameters["closure"].default is inspect.Parameter.empty:
            raise BadTask(
                f"optimizer(params, local) gave {describe(made)}, whose step() needs a closure",
                why="it computes the loss itself, several times a step",
                hint="another optimizer, or such a loop in train(model, data, context)",
            )
        return made


def scale_rates(optimizer: torch.optim.Optimizer | Descent, rates: Sequence[float], factor: float) -> None:
    """Set every group's learning rate to its initial rate times the schedule's factor."""
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate * factor


def freeze_statistics(module: nn.Module) -> None:
    """Switch layers with running statistics to evaluation, so that training uses the statistics of the given model."""
    for layer in module.modules():
        if getattr(layer, "running_mean", None) is not None:
            layer.eval()


def _differentiable(loss: torch.Tensor) -> torch.Tensor:
    if not loss.requires_grad:
        raise BadTask(
            "loss(model, batch) does not depend on the model's parameters",
            why="there is no gradient",
            hint="no .detach(), .item() or torch.no_grad() on its way",
        )
    return loss


def _step_batches(drawn: Iterator[Any], size: int, before: Callable[[int], None]) -> Iterator[list[Any]]:
    """Yield the batches of one step each; random generators are seeded again before each group is drawn."""
    for step in itertools.count():
        before(step)
        group = list(itertools.islice(drawn, size))
        if not group:
            return
        yield group


MAX_WAITING = 256  # losses kept until they are added


class LossMeter:
    """Sums the losses of the batches, each times its batch's examples, in float32 and in order, many at a time.

    An addition between two steps of a small model costs several times as much as one that follows another addition.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._sum, self._examples = torch.zeros((), device=device), 0
        self._waiting: list[tuple[torch.Tensor, int]] = []

    def add(self, loss: torch.Tensor, examples: int) -> None:
        """Add the mean loss of a batch of `examples`."""
        self._waiting.append((loss.detach(), examples))
        if len(self._waiting) >= MAX_WAITING:
            self._add_up()

    def total(self) -> tuple[float, int]:
        """Return (sum of losses times examples, examples)."""
        self._add_up()
        return float(self._sum), self._examples

    def _add_up(self) -> None:
        for loss, examples in self._waiting:
            self._sum += loss * examples
            self._examples += examples
        self._waiting.clear()


class Proximal:
    """The proximal term of FedProx: mu/2 times the squared distance to the model with which the round began.

    Its gradient, mu (w - w_0), is added after the clip. Li et al. 2020, "Federated Optimization in Heterogeneous
    Networks".
    """

    def __init__(self, params: Sequence[torch.Tensor], mu: float) -> None:
        self.params, self.mu = params, mu
        self.begun = [parameter.detach().clone() for parameter in params]

    @torch.no_grad()
    def pull(self) -> None:
        """Add the term's gradient to each parameter that has a gradient; the others are not moved."""
        for parameter, begun in zip(self.params, self.begun):
            if parameter.grad is not None:
                parameter.grad.add_(parameter - begun, alpha=self.mu)


class GradientCorrection:
    """The drift correction of SCAFFOLD and FedDyn: a vector that is added to the gradient of every local step.

    `shift` holds the parameters' values one after the other, in their order. It is added after gradient clipping, which
    applies to the device's own gradient. So the sum of the device's own gradients can be computed from its update.
    """

    def __init__(self, params: Sequence[torch.Tensor], shift: Vector) -> None:
        self.params, at = params, 0
        self.shifts: list[torch.Tensor] = []
        for p in params:
            piece = torch.from_numpy(shift[at : at + p.numel()])
            self.shifts.append(piece.view(p.shape).to(p.device, p.dtype))
            at += p.numel()

    @torch.no_grad()
    def correct(self) -> None:
        """Add the vector to the gradients.

        A parameter that the loss did not reach has a gradient of zero: it is moved as well.
        """
        for parameter, shift in zip(self.params, self.shifts):
            if parameter.grad is None:
                parameter.grad = shift.clone()
            else:
                parameter.grad.add_(shift)


class Descent:
    """Plain SGD with torch's arithmetic but without its bookkeeping, which costs more than a small model's step.

        g = grad + weight_decay p;    v = momentum v + g (v = g at first);    p -= lr v

    Invariant, tested: `step` leaves the same bits as `torch.optim.SGD(params, lr, momentum,
    weight_decay=weight_decay)`.
    """

    def __init__(
        self, params: Sequence[torch.Tensor], lr: float, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        self.params, self.momentum, self.weight_decay = params, momentum, weight_decay
        self.param_groups = [{"lr": lr}]  # like torch's: a schedule sets "lr" here
        self._velocity: dict[int, torch.Tensor] = {}  # parameter's index -> velocity, if it has a gradient

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter that has a gradient."""
        lr = self.param_groups[0]["lr"]
        for place, parameter in enumerate(self.params):
            change = parameter.grad
            if change is None:
                continue
            if self.weight_decay:
                change = change.add(parameter, alpha=self.weight_decay)
            if self.momentum:
                velocity = self._velocity.get(place)
                if velocity is None:
                    velocity = self._velocity[place] = change.clone()
                else:
                    velocity.mul_(self.momentum).add_(change)
                change = velocity
            parameter.add_(change, alpha=-lr)
