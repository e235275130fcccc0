"""DP-SGD on a device (Abadi et al. 2016): each step clips the gradient of each example and adds noise to their sum.

    batch_t    each record of the device with the probability `rate`, by secret coins (Poisson sampling)
    g_i        gradient of the loss of record i alone, clipped to an L2 norm of C, on a grid of integers
    step       (sum of g_i over batch_t + noise) / batch

The number of records decides neither the rate nor the divisor. A batch may be empty: then the step is noise alone.

The loss sees one example at a time, so its gradient depends on no other record: that is what the sensitivity counts on.
Gradients that hooks take from the loss of a whole batch (Opacus) have this only if the loss is a mean of losses that
do not depend on each other. `torch.func.vmap` does the batch at once, and examples one by one what it cannot do, as a
GRU. Buffers are given to each example as they were, and do not change. The last bits of a gradient that was computed
with others may depend on their number, because a processor then adds in another order: that is not covered.

Dropout and augmentation draw from generators that are seeded in secret in each step. With a public seed, one record
more would change the draws of the others, and a reader of the model could compute how.

A record is an element of the training data that data(client) gives. A split by the number of records, or a mean of all
of them, makes others change with it: that is not covered either.

Neither losses nor a count of examples leave: they would be facts of the data without noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from . import data as batches
from .context import nothing
from .errors import BadTask, Cancelled, describe
from .evaluate import never
from .layout import Key
from .module import as_loss, seed_in_secret, seeded
from .trainer import Proximal, TorchTrainer, Trained, freeze_statistics, scale_rates

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .protocol import PrivateSteps
    from .trainer import Progress

    Vector = NDArray[np.float32]

CHUNK_BYTES = 1 << 26  # of the gradients of examples that are held at once
FAILS = (RuntimeError, TypeError, ValueError)  # what vmap raises for code that it cannot do


class NoisedSum(Protocol):
    """A sum of clipped vectors that gets noise when it is released, once."""

    def add(self, vector: Vector) -> None:
        """Clip a vector and add it; one with NaN or infinity counts as zero."""

    def release(self) -> Vector:
        """Return the noised sum, divided by the plan's batch."""


class Secrets(Protocol):
    """Gives secret randomness: `client.private_noise.DeviceSecrets`, which another Python does not have."""

    def sum_of(self, work: PrivateSteps) -> NoisedSum:
        """Return an empty sum for a step."""

    def coins(self, count: int, rate: float) -> NDArray[np.intp]:
        """Return the indices of those of `count` records that are in the batch of a step."""

    def key(self) -> Key:
        """Return a key that nobody can guess."""


def train_privately(
    trainer: TorchTrainer,
    module: nn.Module,
    data: Any,
    work: PrivateSteps,
    secrets: Callable[[], Secrets] | None,
    progress: Progress = nothing,
    cancelled: Callable[[], bool] = never,
) -> Trained:
    """Train the module in place by steps of which each record changes one clipped gradient at most.

    Raise `BadTask` for a task that has no gradient of one record, or no record that can be chosen by its index.
    """
    module.train()
    if trainer.local.buffers == "frozen":
        freeze_statistics(module)
    params = [p for p in module.parameters() if p.requires_grad]
    _require_records(trainer, module, data, sum(p.numel() for p in params), work)
    if secrets is None:
        raise BadTask(
            '[privacy] mode = "example" with --python',
            why="the noise is drawn by Thinwire, and this interpreter does not have it",
            hint="start the client without --python",
        )
    secret, gradients, fetch = secrets(), ExampleGradients(trainer, module, params), batches.fetch_of(data)
    optimizer = trainer.optimizer(params)
    rates = [group["lr"] for group in optimizer.param_groups]
    proximal = Proximal(params, trainer.local.prox) if trainer.local.prox else None
    with seeded(secret.key()):
        for step in range(work.steps):
            if cancelled():
                raise Cancelled
            seed_in_secret(secret.key())
            noised = secret.sum_of(work)
            for gradient in gradients.of(fetch, torch.from_numpy(secret.coins(len(data), work.rate))):
                noised.add(gradient)
            _set_gradients(params, torch.from_numpy(noised.release()))
            if proximal is not None:
                proximal.pull()
            if trainer.schedule.moves:
                scale_rates(optimizer, rates, trainer.schedule.factor(step, work.steps))
            optimizer.step()
            progress(step + 1, work.steps)
    return Trained(0, work.steps, 1.0, (0.0, 0.0), work.steps)


def _require_records(trainer: TorchTrainer, module: nn.Module, data: Any, size: int, work: PrivateSteps) -> None:
    what = why = ""
    if trainer.task.optional("train") is not None:
        what, why = "a task that has its own train()", OWN
    elif isinstance(data, (DataLoader, IterableDataset)):
        what, why = (
            f"data(client) that gave {describe(data)}",
            "each record is drawn by a coin of its own, so it has an index",
        )
    elif any(isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.training for layer in module.modules()):
        what, why = "BatchNorm", "its statistics are of a batch, so the gradient of one record depends on the others"
    elif size != work.dimensions:
        what, why = f"{size} trained parameters", f"the noise is for the {work.dimensions} of the run's model"
    if what:
        hint = '[privacy] mode = "local", or GroupNorm, data with an index and no train() in the task'
        raise BadTask(f'[privacy] mode = "example" with {what}', why=why, hint=hint)


OWN = "the gradients of examples are clipped one by one, and Thinwire cannot see whether train() does it"


def _set_gradients(params: list[nn.Parameter], flat: torch.Tensor) -> None:
    at = 0
    for parameter in params:
        piece = flat[at : at + parameter.numel()].view(parameter.shape)
        parameter.grad = piece.to(parameter.device, parameter.dtype)
        at += parameter.numel()


class _Loss(nn.Module):
    """The task's loss of a batch as a module's output, so that `functional_call` can set the parameters."""

    def __init__(self, trainer: TorchTrainer, module: nn.Module) -> None:
        super().__init__()
        self.module, self._trainer = module, trainer

    def forward(self, batch: Any) -> torch.Tensor:
        return as_loss(self._trainer.task.module.loss(self.module, batch))


class ExampleGradients:
    """Computes the gradient of the loss of each example alone, as flat float32 vectors in the order of `params`.

    Invariant: the gradient of an example is that of the loss of a batch that has this example only.
    """

    def __init__(self, trainer: TorchTrainer, module: nn.Module, params: list[nn.Parameter]) -> None:
        self.loss, self.device = _Loss(trainer, module), trainer.device
        names = {id(parameter): name for name, parameter in self.loss.named_parameters()}
        self.params = {names[id(parameter)]: parameter for parameter in params}
        self.buffers = dict(self.loss.named_buffers())
        self.at_once = max(1, CHUNK_BYTES // (4 * sum(p.numel() for p in params)))
        self.is_vmapped = True

    def of(self, fetch: Callable[[torch.Tensor], Any], indices: torch.Tensor) -> Iterator[Vector]:
        """Yield the gradient of each record with one of these indices."""
        for some in torch.split(indices, self.at_once):
            if not len(some):
                return
            if self.is_vmapped and (found := self._together(fetch(some))) is not None:
                yield from found.cpu().numpy()
                continue
            for one in torch.split(some, 1):
                yield self._alone(batches.moved(fetch(one), self.device)).cpu().numpy()

    def _together(self, batch: Any) -> torch.Tensor | None:
        """Return the gradients of all examples of a batch, a row each; None if vmap cannot do this task's loss."""
        from torch.func import grad, vmap  # here: torch 1 has none, and trains without noise

        def of_one(params: dict[str, torch.Tensor], example: Any) -> torch.Tensor:
            return self._loss_of(params, _mapped(example, lambda value: value.unsqueeze(0)))

        try:
            values = {name: p.detach() for name, p in self.params.items()}
            found = vmap(grad(of_one), in_dims=(None, 0), randomness="different")(
                values, batches.moved(batch, self.device)
            )
            return torch.cat([found[name].flatten(1) for name in self.params], 1).float()
        except FAILS:
            self.is_vmapped = False
            return None

    def _alone(self, batch: Any) -> torch.Tensor:
        values = {name: p.detach().requires_grad_() for name, p in self.params.items()}
        found = torch.autograd.grad(self._loss_of(values, batch), list(values.values()), materialize_grads=True)
        return torch.cat([one.flatten() for one in found]).float()

    def _loss_of(self, params: dict[str, torch.Tensor], batch: Any) -> torch.Tensor:
        from torch.func import functional_call

        own = {name: value.clone() for name, value in self.buffers.items()}
        loss: torch.Tensor = functional_call(self.loss, (params, own), (batch,))
        return loss


def _mapped(batch: Any, call: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a batch with each of its tensors replaced; TypeError for one with other values, which vmap cannot do."""
    if isinstance(batch, torch.Tensor):
        return call(batch)
    if isinstance(batch, dict):
        return {name: _mapped(value, call) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(value, call) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(_mapped(value, call) for value in batch)
    raise TypeError(f"{type(batch).__name__} in a batch")
