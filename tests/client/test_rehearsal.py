"""`task check` hands a task's functions what a device hands them, for a few steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.client.small import Aggregator, cross_entropy, examples, plan_of, task_of
from thinwire.client.compute.site import Site, Split
from thinwire.client.rehearsal import STEPS, rehearse
from thinwire.core.types import ReplyHead


class Texts(Dataset[dict[str, torch.Tensor]]):
    """A map-style data set whose examples are dictionaries."""

    def __init__(self, count: int) -> None:
        self.inputs, self.targets = examples(count).tensors

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.inputs[index], "labels": self.targets[index]}


class Trainer:
    """It needs of its data what transformers.Trainer needs: a length, indexing, and examples again in every epoch."""

    def __init__(self, model: nn.Module, data: Any, lr: float, batch: int, max_steps: int) -> None:
        self.model, self.data, self.lr, self.batch, self.max_steps = model, data, lr, batch, max_steps

    def train(self) -> int:
        assert isinstance(self.data, Texts), type(self.data)
        assert self.data[0].keys() == self.data[len(self.data) - 1].keys() == {"inputs", "labels"}
        steps, optimizer = 0, torch.optim.SGD(self.model.parameters(), self.lr)
        while steps < self.max_steps:
            for batch in DataLoader(self.data, self.batch, shuffle=True):
                optimizer.zero_grad()
                by_name(self.model, batch).backward()
                optimizer.step()
                steps += 1
                if steps == self.max_steps:
                    break
        return steps


def by_name(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["inputs"]), batch["labels"])


def test_a_trainer_that_indexes_its_data_passes_the_check_as_it_trains_on_a_device(tmp_path) -> None:
    asked: list[Any] = []

    def train(model: nn.Module, data: Any, local: Any) -> int:
        asked.append(local.steps)
        assert Trainer(model, data, local.lr, local.batch, local.steps).train() == local.steps
        return len(data)

    task = task_of(train=train, data=lambda site: Split(Texts(24), Texts(6)), loss=by_name)
    plan = plan_of("steps = 40")
    found = rehearse(task, Site(), plan)
    assert asked == [1, STEPS]  # limited by what is asked of it
    assert found.own_train
    assert found.loss_after != found.loss_before
    aggregator = Aggregator(tmp_path, task, plan)
    head, _ = aggregator.answer(aggregator.session(), aggregator.ask())
    assert isinstance(head, ReplyHead), head
    assert asked[-1] == 40


@pytest.mark.parametrize("text", ["", "epochs = 3", "epochs = 0.5"])
def test_a_plan_in_epochs_asks_train_for_one_at_most(text: str) -> None:
    asked: list[Any] = []

    def train(model: nn.Module, data: Any, local: Any) -> int:
        asked.append(local.epochs)
        return len(data)

    rehearse(task_of(train=train), Site(), plan_of(text))
    assert asked == [{"": None, "epochs = 3": 1.0, "epochs = 0.5": 0.5}[text]] * 2


@pytest.mark.parametrize("own", [True, False], ids=["train", "loss"])
def test_a_loader_reaches_the_tasks_functions_as_it_is(own: bool) -> None:
    """Its batches too: torch's converting loader would make tensors of numpy's arrays."""
    seen: set[type] = set()

    def collate(rows: Any) -> Any:
        inputs, targets = zip(*rows, strict=True)
        return np.stack([row.numpy() for row in inputs]), torch.stack(targets)

    loader = DataLoader(examples(), 8, collate_fn=collate)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.add(type(batch[0]))
        return cross_entropy(model, (torch.as_tensor(batch[0]), batch[1]))

    def train(model: nn.Module, data: Any, local: Any) -> int:
        assert data is loader
        return 24

    functions: dict[str, Any] = {"train": train} if own else {}
    rehearse(task_of(loss=loss, data=lambda site: Split(loader, loader), **functions), Site(), plan_of())
    assert seen == {np.ndarray}


def test_metrics_get_a_batch_as_large_as_a_device_measures_with() -> None:
    sizes: list[int] = []

    def metrics(model: nn.Module, batch: Any) -> dict[str, tuple[float, int]]:
        sizes.append(len(batch[0]))
        return {"loss": (float(cross_entropy(model, batch)) * len(batch[0]), len(batch[0]))}

    rehearse(task_of(metrics=metrics, data=lambda site: Split(examples(), examples(700))), Site(), plan_of())
    assert sizes == [512]
