"""Measuring gives sums and counts that can be pooled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.small_task import examples, task_of
from thinwire.client.train.errors import BadTask
from thinwire.client.train.evaluate import evaluate
from thinwire.client.train.module import build


def test_a_classifier_is_measured_by_loss_and_accuracy() -> None:
    task, data = task_of(), examples(30)
    module = build(task)
    inputs, targets = data.tensors
    found = evaluate(module, task, data)
    output = module(inputs).detach()
    right = int(torch.eq(output.argmax(1), targets).sum())
    correct, measured = found["accuracy"]
    assert correct == right
    assert measured == 30
    total, count = found["loss"]
    assert total / count == pytest.approx(nn.functional.cross_entropy(output, targets).item(), rel=1e-5)


def test_batches_of_any_size_pool_to_the_same_figures() -> None:
    task = task_of()
    module = build(task)
    whole = evaluate(module, task, examples(30))
    parts = evaluate(module, task, DataLoader(examples(30), 7))
    assert parts["accuracy"] == whole["accuracy"]
    assert parts["loss"][0] == pytest.approx(whole["loss"][0], rel=1e-5)


def test_a_regression_has_no_accuracy() -> None:
    task = task_of(
        model=lambda: nn.Linear(4, 1), loss=lambda model, batch: (model(batch[0])[:, 0] - batch[1]).square().mean()
    )
    assert set(evaluate(build(task), task, TensorDataset(torch.rand(9, 4), torch.rand(9)))) == {"loss"}


def with_groups(count: int) -> TensorDataset:
    inputs, targets = examples(count).tensors
    return TensorDataset(inputs, targets, 1 - targets)


def twice(model: nn.Module, batch: Any) -> torch.Tensor:
    """A consistency loss: the second call's logits classify nothing."""
    clean, other = model(batch[0]), model(-batch[0])
    return nn.functional.cross_entropy(clean, batch[1]) + nn.functional.mse_loss(other, clean)


def of_counts(model: nn.Module, batch: Any) -> torch.Tensor:
    mean, spread = model(batch[0])[:, :2].unbind(1)
    return nn.functional.gaussian_nll_loss(mean, batch[1].float(), spread.exp())


def named(parts: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    return [{"inputs": one, "labels": label} for one, label in zip(*parts, strict=True)]


@pytest.mark.parametrize(
    ("data", "loss"),
    [
        (with_groups(30), lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])),
        (examples(30), twice),
        (TensorDataset(torch.rand(9, 4), torch.arange(9)), of_counts),
        (TensorDataset(torch.rand(600, 4), torch.arange(600) // 599 * 7), of_counts),
        (TensorDataset(torch.rand(9, 4), torch.arange(9) - 4), of_counts),
        (named(list(examples(30).tensors)), lambda m, b: nn.functional.cross_entropy(m(b["inputs"]), b["labels"])),
    ],
    ids=["a third column", "two calls", "counts", "a count in the last batch", "negative", "by name"],
)
def test_what_may_be_no_accuracy_is_not_given_as_one(data: Any, loss: Any) -> None:
    task = task_of(loss=loss)
    assert set(evaluate(build(task), task, data)) == {"loss"}


def test_a_target_that_the_loss_ignores_is_not_counted() -> None:
    inputs, targets = examples(30).tensors
    task = task_of()
    module = build(task)
    right = int(torch.eq(module(inputs).argmax(1), targets)[10:].sum())
    ignored = torch.where(torch.arange(30) < 10, -100, targets)
    assert evaluate(module, task, TensorDataset(inputs, ignored))["accuracy"] == (right, 20.0)


def test_the_tasks_own_metrics_are_used() -> None:
    task = task_of(metrics=lambda model, batch: {"hits": (torch.tensor(2.0), len(batch[1]))})
    found = evaluate(build(task), task, examples(30))
    assert found["hits"] == (2.0, 30.0)
    assert set(found) == {"hits", "loss"}


@pytest.mark.parametrize(
    "given", [{"accuracy": (93.0, 30)}, {"accuracy": (-1.0, 30)}, {f"m{n}": (1, 1) for n in range(99)}]
)
def test_metrics_that_no_aggregator_takes_are_refused_where_they_are_made(given: Any) -> None:
    task = task_of(metrics=lambda model, batch: given)
    with pytest.raises(BadTask, match="an accuracy of|99 metrics"):
        evaluate(build(task), task, examples(30))


@pytest.mark.parametrize("given", [None, {"hits": 3.0}, {"hits": ("a", 1)}, 7])
def test_metrics_that_are_no_sums_are_refused(given: Any) -> None:
    task = task_of(metrics=lambda model, batch: given)
    with pytest.raises(BadTask, match="sums and counts"):
        evaluate(build(task), task, examples())


def test_a_figure_that_is_nan_is_left_out() -> None:
    task = task_of(loss=lambda model, batch: torch.tensor(float("nan")))
    assert "loss" not in evaluate(build(task), task, examples())


def test_measuring_leaves_the_module_as_it_was() -> None:
    task = task_of(model=lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)))
    module = build(task).train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    evaluate(module, task, examples())
    assert module.training
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert not module._forward_hooks
