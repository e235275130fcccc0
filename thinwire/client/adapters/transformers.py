"""The task of a Hugging Face model: the Trainer of transformers trains it with its own optimizer.

The plan decides the learning rate, its schedule, the steps or epochs and the batch size; `TrainingArguments` decide the
rest: optimizer, weight decay, gradient clipping and accumulation, precision. The Trainer runs in this process, on the
device of the client, and writes no checkpoints, logs and reports.

Models of peft are models as well: only their trained tensors travel.
"""

from __future__ import annotations

import dataclasses
import inspect
import tempfile
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from thinwire.client.train.data import as_split, count, examples_in
from thinwire.client.train.errors import BadTask, describe
from thinwire.client.train.evaluate import accuracy
from thinwire.client.train.protocol import Split

from .adapted import AdaptedTask, RoundWork, imported, require_defaults

if TYPE_CHECKING:
    from torch import nn

    from thinwire.client.train.protocol import ClientInfo

PLAN = {
    "learning_rate": "[local] lr",
    "lr_scheduler_type": "[local] schedule",
    "lr_scheduler_kwargs": "[local] schedule",
    "warmup_steps": "[local] lr_warmup",
    "num_train_epochs": "[local] epochs",
    "max_steps": "[local] steps",
    "per_device_train_batch_size": "[local] batch",
    "auto_find_batch_size": "[local] batch",
    "load_best_model_at_end": "",
    "deepspeed": "",
    "fsdp": "",
}
QUIET = {
    "save_strategy": "no", "eval_strategy": "no", "logging_strategy": "no", "report_to": "none", "disable_tqdm": True,
    "push_to_hub": False, "do_eval": False, "lr_scheduler_type": "constant",
}  # fmt: skip


def task(
    model: Callable[[], nn.Module],
    data: Callable[[ClientInfo], Any],
    arguments: Any = None,
    *,
    collate: Callable[[list[Any]], Any] | None = None,
    trainer: Callable[..., Any] | None = None,
) -> AdaptedTask:
    """Return the task of a model that `model()` makes, from a config or from files on the client.

    `data(client)` gives a Dataset, or `Split(train, test)`, of dicts with the names that the model's `forward` has,
    `labels` among them. `arguments` are a `TrainingArguments`; raise `BadTask` if one that the plan decides has not its
    default. The run's seed replaces `seed`. `collate` makes a batch of examples, as a data collator with padding does.
    `trainer` is a subclass of Trainer, for a loss of its own. The metrics are the loss and, for a classifier, the
    accuracy.
    """
    if arguments is not None:
        defaults = {each.name: each.default for each in dataclasses.fields(arguments)}
        require_defaults("TrainingArguments", vars(arguments), defaults, PLAN)

    def split(client: ClientInfo) -> Split:
        found = as_split(data(client))
        return Split(_loader(found.train, collate), None if found.test is None else _loader(found.test, collate))

    def train(module: nn.Module, examples: DataLoader[Any], context: Any) -> int:
        return _train(module, examples, context, arguments, trainer)

    return AdaptedTask(model, split, loss, metrics, train)


def evaluator(compute_metrics: Callable[[Any], Mapping[str, float]]) -> Callable[[Any, Any], dict[str, float]]:
    """Return the `evaluate(model, data)` of a task from the `compute_metrics` that a Trainer has.

    It gets an `EvalPrediction` of the client's whole test split: logits and labels as numpy arrays. Examples must have
    logits of one shape.
    """

    def evaluate(model: Any, data: Any) -> dict[str, float]:
        transformers = imported("transformers", "transformers")
        device = next(model.parameters()).device
        logits, labels = [], []
        for batch in data:
            inputs = {name: value.to(device) for name, value in _inputs(model, batch).items()}
            logits.append(model(**inputs)["logits"].detach().float().cpu().numpy())
            labels.append(batch["labels"].numpy())
        whole = transformers.EvalPrediction(predictions=np.concatenate(logits), label_ids=np.concatenate(labels))
        return {name: float(value) for name, value in compute_metrics(whole).items()}

    return evaluate


def loss(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """Return the loss that the model gives for a batch with labels."""
    return _loss_of(model(**_inputs(model, batch)))


def metrics(model: Any, batch: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return the loss and, for a classifier with one label an example, the accuracy."""
    output, examples = model(**_inputs(model, batch)), float(examples_in(batch))
    found = {"loss": (float(_loss_of(output).detach()) * examples, examples)}
    return {**found, **accuracy(output.get("logits"), [None, batch.get("labels")])}


def _loss_of(output: Any) -> torch.Tensor:
    found = output.get("loss") if isinstance(output, Mapping) else None
    if not isinstance(found, torch.Tensor):
        raise BadTask(
            f"the model gave {describe(output)} without a loss",
            why="a model of transformers computes it if the batch has labels",
            hint='data(client) gives examples such as {"input_ids": ids, "labels": label}',
        )
    return found


def _inputs(model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a batch that the model's `forward` takes, as the Trainer does."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    names = inspect.signature(inner.forward).parameters
    return {name: value for name, value in batch.items() if name in names}


def _loader(part: Any, collate: Callable[[list[Any]], Any] | None) -> DataLoader[Any]:
    """Return a loader of a data set, with the collator by which the Trainer makes its batches."""
    if isinstance(part, DataLoader):
        raise BadTask(
            "data(client) gave a DataLoader",
            why="the Trainer makes its own loader, of [local] batch examples",
            hint="give the Dataset, and task(..., collate=) the function that makes a batch",
        )
    return DataLoader(
        part, collate_fn=collate or imported("transformers", "transformers").default_data_collator, batch_size=BATCH
    )


BATCH = 32  # for evaluation; the Trainer's batches have [local] batch examples


def _train(module: Any, examples: DataLoader[Any], context: Any, arguments: Any, trainer: Any) -> int:
    """Train with a Trainer that is made for this call; return the examples that weigh the update."""
    transformers = imported("transformers", "transformers")
    size, lr = count(examples) or 0, float(context.local.lr)
    given_arguments = arguments if arguments is not None else transformers.TrainingArguments()
    accumulate = given_arguments.gradient_accumulation_steps
    if not size and not context.local.steps:
        raise BadTask(
            "[local] epochs, and data(client) gave data without a length",
            why="the number of steps is known before the first one",
            hint="[local] steps = 100",
        )
    batches = -(-size // context.local.batch)
    work = RoundWork.of(context.local, size or context.local.batch, max(1, -(-batches // accumulate)))
    device = next(module.parameters()).device
    with tempfile.TemporaryDirectory() as folder:
        own = dataclasses.replace(
            given_arguments, output_dir=folder, learning_rate=lr, max_steps=work.steps,
            per_device_train_batch_size=work.batch, seed=int(torch.randint(1 << 31, ())), data_seed=None,
            use_cpu=device.type == "cpu", **QUIET,
        )  # fmt: skip
        made = (trainer or transformers.Trainer)(
            model=module, args=own, train_dataset=examples.dataset, data_collator=examples.collate_fn,
            callbacks=[_following(transformers, context, work.steps)],
        )  # fmt: skip
        _remove_printers(made, transformers)
        made.create_optimizer()
        made.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            made.optimizer, lambda step: context.lr((step + 0.5) / work.steps) / lr
        )
        found = made.train()
    done = int(found.global_step)
    if context.may_report:
        context.report("loss", found.training_loss, max(1, done) * work.batch * accumulate)
    return work.weight(done) if size else max(1, done * work.batch * accumulate)


def _following(transformers: Any, context: Any, steps: int) -> Any:
    """Return a callback that reports progress, and stops when the context says so."""

    class Following(transformers.TrainerCallback):  # type: ignore[misc]  # imported when it is needed
        """Connects the Trainer's loop with the context."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            context.progress(state.global_step, steps)
            if context.should_stop():
                control.should_training_stop = True

    return Following()


def _remove_printers(trainer: Any, transformers: Any) -> None:
    """Remove the callbacks that print each client's loss at the end of each round."""
    for callback in (transformers.PrinterCallback, transformers.ProgressCallback):
        trainer.remove_callback(callback)
