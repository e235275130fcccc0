"""`task check` hands a task's functions what a device hands them, for a few steps."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.support.small_task import Aggregator, cross_entropy, examples, normed, plan_of, task_of
from thinwire.cli.task import lines
from thinwire.client.task_check import STEPS, rehearse
from thinwire.client.train.protocol import ClientInfo, Split
from thinwire.core.errors import PlanError, TaskError
from thinwire.core.types import ReplyHeader


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
    assigned: list[Any] = []

    def train(model: nn.Module, data: Any, context: Any) -> int:
        local = context.local
        assigned.append(local.steps)
        assert Trainer(model, data, local.lr, local.batch, local.steps).train() == local.steps
        return len(data)

    task = task_of(train=train, data=lambda client: Split(Texts(24), Texts(6)), loss=by_name)
    plan = plan_of("steps = 40")
    found = rehearse(task, ClientInfo(), plan)
    assert assigned == [1, STEPS]  # limited by its assignment
    assert found.own_train
    assert found.loss_after != found.loss_before
    aggregator = Aggregator(tmp_path, task, plan)
    header, _ = aggregator.answer(aggregator.handler(), aggregator.assign())
    assert isinstance(header, ReplyHeader), header
    assert assigned[-1] == 40


@pytest.mark.parametrize("text", ["", "epochs = 3", "epochs = 0.5"])
def test_a_plan_in_epochs_assignments_train_for_one_at_most(text: str) -> None:
    assigned: list[Any] = []

    def train(model: nn.Module, data: Any, context: Any) -> int:
        assigned.append(context.local.epochs)
        return len(data)

    rehearse(task_of(train=train), ClientInfo(), plan_of(text))
    assert assigned == [{"": None, "epochs = 3": 1.0, "epochs = 0.5": 0.5}[text]] * 2


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

    def train(model: nn.Module, data: Any, context: Any) -> int:
        assert data is loader
        return 24

    functions: dict[str, Any] = {"train": train} if own else {}
    rehearse(task_of(loss=loss, data=lambda client: Split(loader, loader), **functions), ClientInfo(), plan_of())
    assert seen == {np.ndarray}


def test_metrics_get_a_batch_as_large_as_a_device_measures_with() -> None:
    sizes: list[int] = []

    def metrics(model: nn.Module, batch: Any) -> dict[str, tuple[float, int]]:
        sizes.append(len(batch[0]))
        return {"loss": (float(cross_entropy(model, batch)) * len(batch[0]), len(batch[0]))}

    rehearse(task_of(metrics=metrics, data=lambda client: Split(examples(), examples(700))), ClientInfo(), plan_of())
    assert sizes == [512]


EXAMPLES = examples()
INPUTS, TARGETS = EXAMPLES.tensors
TENSORS = "return TensorDataset(torch.as_tensor(inputs), torch.as_tensor(targets))"
ALONE = "return the loss alone; what else is measured goes into metrics(model, batch)"
UNWRAPPED = "return the tensor itself, without .item(), float() or .numpy()"
SUMS = 'return {"accuracy": (correct, len(targets))}'
SGD = "return torch.optim.SGD(params, lr=local.lr); [local] schedule moves its lr"


def foreign(params: Any, local: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)


def ce(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model, batch)


@pytest.mark.parametrize(
    ("function", "gives", "what", "instead"),
    [
        ("model", lambda: None, "gave None", "return the module at the end of model()"),
        ("model", lambda: nn.Linear, "gave the class Linear", "return Linear(...), an object of the class"),
        ("model", lambda: {"weight": INPUTS}, "gave a dict", "make the module, and load these weights"),
        ("model", lambda: (nn.Linear(4, 3), "tok"), "gave a tuple of 2 (Linear, str)", "return the module alone"),
        ("model", lambda: INPUTS, "gave a tensor of shape (24, 4) (float32)", "def model(): return nn.Linear(2, 1)"),
        ("data", lambda client: None, "data(client) gave None", "return Split(train, test) at the end of data(client)"),
        ("data", lambda client: (INPUTS, TARGETS), "data(client) gave a tuple of 2 (Tensor, Tensor)", TENSORS),
        ("data", lambda client: [INPUTS, TARGETS], "data(client) gave a list of 2 (Tensor, Tensor)", TENSORS),
        ("data", lambda client: INPUTS, "data(client) gave a tensor of shape (24, 4) (float32)", TENSORS),
        ("data", lambda client: INPUTS.numpy(), "data(client) gave an array of shape (24, 4) (float32)", TENSORS),
        (
            "data",
            lambda client: (EXAMPLES, EXAMPLES),
            "gave a tuple of 2 (TensorDataset, ",
            "return Split(train, test)",
        ),
        ("data", lambda client: {"train": EXAMPLES}, "gave a dict", 'return Split(parts["train"], parts["test"])'),
        ("data", lambda client: Split(EXAMPLES, (INPUTS, TARGETS)), "(Tensor, Tensor) as test", TENSORS),
        ("data", lambda client: (Split(EXAMPLES), 3), "gave a tuple of 2 (Split, int)", "return the Split alone"),
        ("data", lambda client: (EXAMPLES[i] for i in range(24)), "gave a generator", "a list or a Dataset"),
        ("data", lambda client: "train.csv", "gave a str", "read the file in data(client)"),
        ("data", lambda client: Texts, "gave the class Texts", "return Texts(...), an object of the class"),
        ("loss", lambda m, b: 0.5, "loss(model, batch) gave a float", UNWRAPPED),
        ("loss", lambda m, b: ce(m, b).item(), "loss(model, batch) gave a float", UNWRAPPED),
        ("loss", lambda m, b: np.float32(0.5), "loss(model, batch) gave a float32", UNWRAPPED),
        ("loss", lambda m, b: None, "gave None", "return the loss at the end of loss(model, batch)"),
        ("loss", lambda m, b: m(b[0]), "gave a tensor of shape (", "return loss.mean()"),
        ("loss", lambda m, b: (ce(m, b), 1), "gave a tuple of 2 (Tensor, int)", ALONE),
        ("loss", lambda m, b: {"loss": ce(m, b)}, "gave a dict", 'return output["loss"]'),
        ("loss", lambda m, b: ce(m, b).long(), "gave a tensor of shape () (int64)", "a tensor of one float"),
        ("loss", lambda m, b: ce(m, b) * 1j, "gave a tensor of shape () (complex64)", "a tensor of one float"),
        ("loss", lambda m, b: ce(m, b).detach(), "does not depend on the model's parameters", "no .detach(), .item()"),
        ("metrics", lambda m, b: 0.5, "metrics(model, batch) gave a float", SUMS),
        ("metrics", lambda m, b: {"accuracy": 0.5}, "gave a float as 'accuracy'", SUMS),
        ("metrics", lambda m, b: {"accuracy": "high"}, "gave a str as 'accuracy'", SUMS),
        ("metrics", lambda m, b: {"accuracy": ("1", "2")}, "gave a tuple of 2 (str, str) as 'accuracy'", SUMS),
        ("metrics", lambda m, b: {"accuracy": (m(b[0]), 2)}, "gave a tuple of 2 (Tensor, int) as 'accuracy'", SUMS),
        ("metrics", lambda m, b: {"accuracy": (1, -2)}, "gave a negative count as 'accuracy'", SUMS),
        ("train", lambda m, d, c: None, "train(model, data, context) gave None", "return len(data)"),
        ("train", lambda m, d, c: 0, "train(model, data, context) gave 0", "return len(data)"),
        ("train", lambda m, d, c: 12.0, "gave a float", "return len(data)"),
        ("train", lambda m, d, c: (24, 0.5), "gave a tuple of 2 (int, float)", "return len(data)"),
        ("train", lambda m, d, c: 10**5000, "gave more than 2^53", "return len(data)"),
        ("optimizer", lambda p, own: None, "optimizer(params, local) gave None", SGD),
        ("optimizer", lambda p, own: torch.optim.SGD, "gave the class SGD", SGD),
        ("optimizer", lambda p, own: (torch.optim.SGD(p, 0.1), None), "gave a tuple of 2 (SGD, NoneType)", SGD),
        ("optimizer", foreign, "gave an SGD that holds none of the model's parameters", "return torch.optim.SGD("),
        (
            "optimizer",
            lambda p, own: torch.optim.LBFGS(p),
            "gave an LBFGS, whose step() needs",
            "another optimizer, or",
        ),
    ],
)
def test_a_function_that_gives_something_else_is_told_what_it_gave_and_what_to_write(
    tmp_path, function: str, gives: Any, what: str, instead: str
) -> None:
    task = task_of(**{function: gives})
    plan = plan_of('optimizer = "task"' if function == "optimizer" else "")
    with pytest.raises(TaskError) as refused:
        rehearse(task, ClientInfo(), plan)
    assert what in refused.value.what
    assert refused.value.why
    assert refused.value.hint.startswith(instead)
    if function == "model":  # no aggregator has a model to send, then
        return
    aggregator = Aggregator(tmp_path, task, plan)
    failure, _ = aggregator.answer(aggregator.handler(), aggregator.assign())
    assert what in failure.text
    assert f"; try: {instead}" in aggregator.said[-1]


@pytest.mark.parametrize("count", [np.int64(24), torch.tensor(24)])
def test_a_count_may_be_numpys_or_torchs(count: Any) -> None:
    assert rehearse(task_of(train=lambda model, data, context: count), ClientInfo(), plan_of()).own_train


def test_a_list_of_examples_is_data() -> None:
    assert (
        rehearse(task_of(data=lambda client: [EXAMPLES[i] for i in range(24)]), ClientInfo(), plan_of()).train_examples
        == 24
    )


@pytest.mark.parametrize(("count", "examples_there", "told"), [(1, 24, ["spread"]), (24, 24, []), (1, 1, [])])
def test_a_mean_with_a_count_of_one_is_told_where_the_batch_has_more_examples(
    count: int, examples_there: int, told: list[str]
) -> None:
    def metrics(model: nn.Module, batch: Any) -> dict[str, tuple[float, int]]:
        return {"loss": (float(cross_entropy(model, batch)) * 24, 24), "spread": (0.5, count)}

    split = Split(examples(), examples(examples_there))
    found = rehearse(task_of(metrics=metrics, data=lambda client: split), ClientInfo(), plan_of())
    assert found.counted_once == told
    if told:
        shown = dataclasses.asdict(found) | {"task": "t", "upload_s_at_mbit": {"1": 1.0}}
        (line,) = [line for line in lines(shown) if "count of 1" in line]
        assert line.strip().startswith("spread has a count of 1 over 24 examples, as a mean has: ")


def test_personal_layers_are_refused_as_a_run_would_refuse_them_and_cost_no_bytes() -> None:
    task, whole = task_of(normed), rehearse(task_of(normed), ClientInfo(), plan_of())
    for globs, said in (("head.*", "matches no tensor that travels"), ("*", "matches every trained tensor")):
        with pytest.raises(PlanError, match=said):
            rehearse(task, ClientInfo(), plan_of(f'personal_layers = ["{globs}"]'))
    with pytest.raises(PlanError, match="takes 1.weight and leaves 0.weight"):
        rehearse(task_of(tied), ClientInfo(), plan_of('personal_layers = ["1.*"]'))
    own = rehearse(task, ClientInfo(), plan_of('personal_layers = ["3.*"]'))
    assert whole.dense_bytes - own.dense_bytes == whole.up_bytes - own.up_bytes == 4 * 18


def tied() -> nn.Module:
    made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    made[1].weight = made[0].weight
    return made
