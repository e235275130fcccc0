"""The task of a LightningModule: Lightning's Trainer trains it with the optimizer of `configure_optimizers`.

The plan decides the learning rate, the steps or epochs and the batch size. The Trainer runs in this process, on the
device of the client, and without logger, checkpoints and progress bar. Each round begins with a new optimizer.

The module is used as it is. It works with `lightning` and with `pytorch_lightning`, whichever it is made of.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from thinwire.client.train.data import as_split, count, examples_in
from thinwire.client.train.errors import BadTask, describe
from thinwire.client.train.protocol import Split

from .adapted import AdaptedTask, RoundWork, imported

if TYPE_CHECKING:
    from torch import nn

    from thinwire.client.train.protocol import ClientInfo

PREFIX = "val_"
NAMES = ("lightning.pytorch", "pytorch_lightning")
ADVICE = (
    "does not have many workers", "The number of training batches", "You defined a `validation_step`", ".*LeafSpec",
)  # fmt: skip
DECIDED = {
    "max_epochs": "[local] epochs of the plan",
    "min_epochs": "[local] epochs of the plan",
    "max_steps": "[local] steps of the plan",
    "min_steps": "[local] steps of the plan",
    "max_time": "[cohort] deadline_s and [local] partial of the plan",
    "accelerator": "the client's --device",
    "devices": "the client's --device",
    "num_nodes": "one process",
    "strategy": "one process",
    "logger": "context.report, which reports the loss",
    "enable_checkpointing": "the aggregator, which stores the model",
    "enable_progress_bar": "thinwire, which shows the progress",
    "enable_model_summary": "thinwire task check",
}


def task(
    model: Callable[[], Any], data: Callable[[ClientInfo], Any], *, trainer: Mapping[str, Any] | None = None
) -> AdaptedTask:
    """Return the task of a LightningModule that `model()` makes.

    `data(client)` gives a Dataset, a DataLoader, or `Split(train, test)` of them. `trainer` holds more arguments of
    Lightning's Trainer, for example `precision`, `gradient_clip_val` or `callbacks`; raise `BadTask` for one that plan
    or client decides.
    """
    options = dict(trainer or {})
    for name in options:
        if name in DECIDED:
            raise BadTask(
                f"Lightning's Trainer({name}=...) has no effect here",
                why=f"this is decided by {DECIDED[name]}",
                hint=f"leave {name} out",
            )

    def split(client: ClientInfo) -> Split:
        return as_split(data(client))

    def train(module: Any, examples: Any, context: Any) -> int:
        return _fit(module, examples, context, options)

    def made() -> Any:
        return _require_module(model())

    return AdaptedTask(made, split, loss, metrics, train)


def loss(model: Any, batch: Any) -> torch.Tensor:
    """Return the loss that `training_step` gives for a batch."""
    found: torch.Tensor = _loss_of(_call(model, "training_step", batch)[0])
    return found


def metrics(model: Any, batch: Any) -> dict[str, tuple[float, float]]:
    """Return what `validation_step` logs for a batch, by its names without `val_`, and the loss.

    The loss is what it logs as `val_loss` or returns, else that of `training_step`.
    """
    found, logged = _call(model, "validation_step", batch) if _overrides(model, "validation_step") else (None, {})
    measured = {name[len(PREFIX) :] if name.startswith(PREFIX) else name: _value(one) for name, one in logged.items()}
    if "loss" not in measured:
        returned = _loss_of(found)
        measured["loss"] = float((loss(model, batch) if returned is None else returned).detach())
    examples = float(examples_in(batch))
    return {name: (value * examples, examples) for name, value in measured.items()}


def _loss_of(found: Any) -> Any:
    return found.get("loss") if isinstance(found, Mapping) else found


def _require_module(module: Any) -> Any:
    """Return the module; raise `BadTask` if it is no LightningModule, or optimizes by itself."""
    if _package(module) is None:
        raise BadTask(
            f"model() gave {describe(module)}",
            why="it must give a LightningModule",
            hint="return Net(), an object of it",
        )
    if not module.automatic_optimization:
        raise BadTask(
            f"{type(module).__name__} has automatic_optimization = False",
            why="its training_step makes the steps itself, and clients call it to evaluate, too",
            hint="a task with its own train(model, data, context)",
        )
    return module


def _package(module: Any) -> str | None:
    """Return the package whose LightningModule this is: `lightning.pytorch` or `pytorch_lightning`; None: no one's."""
    bases = [base.__module__ for base in type(module).__mro__ if base.__name__ == "LightningModule"]
    return next((name for name in NAMES for base in bases if base.startswith(name)), None)


def _overrides(module: Any, name: str) -> bool:
    return not getattr(type(module), name).__module__.startswith(NAMES)


def _call(module: Any, name: str, batch: Any) -> tuple[Any, dict[str, Any]]:
    """Call a step of the module outside a Trainer; return its result, and what it logged by name."""
    logged: dict[str, Any] = {}

    def log(name: str, value: Any, *_: Any, **__: Any) -> None:
        logged[name] = value

    def log_dict(dictionary: Mapping[str, Any], *_: Any, **__: Any) -> None:
        logged.update(dictionary)

    step = getattr(module, name)
    index = (0,) if "batch_idx" in inspect.signature(step).parameters else ()
    module.log, module.log_dict = log, log_dict
    try:
        return step(batch, *index), logged
    finally:
        del module.log, module.log_dict


def _value(logged: Any) -> float:
    """Return a logged number; a metric of torchmetrics counts the batches since its last reset."""
    if hasattr(logged, "compute"):
        found = float(logged.compute())
        logged.reset()
        return found
    return float(logged)


def _fit(module: Any, examples: Any, context: Any, options: Mapping[str, Any]) -> int:
    """Train with Lightning's Trainer; return the examples that weigh the update."""
    lightning = imported(str(_package(module)), "lightning")
    loader = _loader(examples, context.local)
    size = count(loader) or 0
    accumulate = int(options.get("accumulate_grad_batches", 1))
    work = RoundWork.of(context.local, size or 1, _steps_of_a_pass(loader, accumulate, context.local))
    following = _following(lightning, context, work.steps)
    more = {**options, "callbacks": [*_as_list(options.get("callbacks")), following]}
    with _quiet(lightning.__name__):
        trainer = lightning.Trainer(
            max_steps=work.steps, max_epochs=-1, **_device(module), logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, **more,
        )  # fmt: skip
        trainer.fit(module, loader)
    if context.may_report and following.seen:
        context.report("loss", float(following.sum) / following.seen, following.seen)
    return work.weight(trainer.global_step) if size else max(1, following.seen)


def _following(lightning: Any, context: Any, steps: int) -> Any:
    """Return a callback that sets the plan's learning rate, reports progress, and stops when the context says so."""

    class Following(lightning.Callback):  # type: ignore[misc]  # imported when it is needed
        """Connects Lightning's loop with the context."""

        sum: Any = 0.0
        seen = 0
        rates: list[tuple[dict[str, Any], float]]

        def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
            """Refuse a scheduler; the plan's lr becomes that of the first group, and the others keep their ratio."""
            if trainer.lr_scheduler_configs:
                raise BadTask(
                    "configure_optimizers() gives a learning rate scheduler",
                    why="it would begin again in each round",
                    hint="return the optimizer alone; [local] schedule changes the rate over the whole run",
                )
            groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
            first = float(groups[0]["lr"]) or 1.0
            self.rates = [(group, float(group["lr"]) / first if groups[0]["lr"] else 1.0) for group in groups]

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            lr = context.lr((trainer.global_step + 0.5) / steps)
            for group, ratio in self.rates:
                group["lr"] = lr * ratio

        def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, outputs: Any, batch: Any, *_: Any) -> None:
            examples = examples_in(batch)
            if (found := _loss_of(outputs)) is not None:
                self.sum = self.sum + found.detach() * examples
                self.seen += examples
            context.progress(trainer.global_step, steps)
            if context.should_stop():
                trainer.should_stop = True

    return Following()


def _loader(examples: Any, local: Any) -> Any:
    """Return a DataLoader of the plan's batch size; one that data(client) gave is used as it is."""
    if not isinstance(examples, DataLoader):
        return DataLoader(examples, local.batch, shuffle=not isinstance(examples, IterableDataset))
    if local.batch not in (type(local).batch, examples.batch_size):
        raise BadTask(
            f"[local] batch = {local.batch}, and data(client) gave a DataLoader with batch_size {examples.batch_size}",
            why="a DataLoader's own batches are trained on",
            hint="leave [local] batch out, or let data(client) give the Dataset",
        )
    return examples


def _steps_of_a_pass(loader: Any, accumulate: int, local: Any) -> int:
    try:
        return max(1, -(-len(loader) // accumulate))
    except TypeError:
        if local.steps:
            return 1
        raise BadTask(
            "[local] epochs, and data(client) gave data without a length",
            why="the number of steps is known before the first one",
            hint="[local] steps = 100, or give the IterableDataset a __len__()",
        ) from None


def _device(module: Any) -> dict[str, Any]:
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    if device.type != "cuda":
        return {"accelerator": device.type, "devices": 1}
    return {"accelerator": "gpu", "devices": [device.index or 0]}


def _as_list(callbacks: Any) -> list[Any]:
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [] if callbacks is None else [callbacks]


@contextlib.contextmanager
def _quiet(package: str) -> Iterator[None]:
    """Keep Lightning from printing hardware and advice in each round of each client."""
    logger = logging.getLogger(package)
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for advice in ADVICE:
                warnings.filterwarnings("ignore", message=f".*{advice}")
            yield
    finally:
        logger.setLevel(level)
