"""Law: what a request gives depends on nothing that a request before it left behind in the module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.small_task import cross_entropy, local_of, plan_of, task_of
from thinwire.client.train.errors import BadTask, Cancelled
from thinwire.client.train.layout import Key
from thinwire.client.train.protocol import ClientInfo, TrainRequest, TrainResult, Work
from thinwire.client.train.runtime import TaskRuntime

A, B = ClientInfo("a"), ClientInfo("b")


class Net(nn.Module):
    """A little of everything that a module may hold."""

    order: torch.Tensor
    turn: torch.Tensor
    scratch: torch.Tensor
    kept: torch.Tensor
    cache: Any

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.0)
        self.out = nn.Linear(4, 3)
        self.register_buffer("order", torch.tensor([2, 0, 3, 1]))
        self.register_buffer("turn", torch.tensor([1j, 1.0, -1j, 1.0]))
        self.register_buffer("kept", torch.ones(4))
        self.register_buffer("scratch", torch.ones(4), persistent=False)
        self.register_buffer("cache", None, persistent=False)
        self.scale, self.seen, self.table = 1.0, [1.0], torch.ones(4)
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (
            (self.base(inputs[:, self.order]) * self.turn).real * self.scratch * self.table * self.kept
        )
        found = self.drop(self.norm(found)) * self.scale * sum(self.seen)
        noise = torch.rand((), generator=self.generator)
        found = self.out(found) * (1 + noise)
        return found if self.cache is None else found * self.cache


def request(**changed: Any) -> TrainRequest:
    usual = {"measure": True, "train": True, "local": local_of(plan_of()), "work": Work(2, 8), "key": Key(3)}
    return TrainRequest(**{**usual, **changed})


def do(runtime: TaskRuntime, client: ClientInfo) -> TrainResult:
    return runtime.do(request(), client, np.full(runtime.layout.size, 0.1, np.float32), None)


def bits(done: TrainResult) -> tuple[Any, ...]:
    assert done.params is not None
    assert done.buffers is not None
    return done.params.tobytes(), done.buffers.tobytes(), done.counters, done.sums, done.loss


def spoiled_by(spoil: Callable[[Any], object]) -> TaskRuntime:
    """A runtime whose task spoils the module in its first training only."""
    left = [True]

    def loss(model: Any, batch: Any) -> torch.Tensor:
        found = cross_entropy(model, batch)
        if model.training and left:
            left.clear()
            with torch.no_grad():
                spoil(model)
        return found

    return TaskRuntime(task_of(Net, loss=loss))


def attribute(model: Any) -> None:
    model.scale, model.more = 7.0, "more"


def replaced(model: Any) -> None:
    model.drop = nn.Dropout(0.9)


LEFT_BEHIND: dict[str, Callable[[Any], object]] = {
    "an attribute": attribute,
    "a list": lambda model: model.seen.append(5.0),
    "a tensor in an attribute": lambda model: model.table.fill_(3.0),
    "a buffer that is not kept": lambda model: model.scratch.mul_(2.0),
    "a buffer that was not there": lambda model: setattr(model, "cache", torch.tensor(2.0)),
    "a layer in another mode": lambda model: model.norm.eval(),
    "a rate of dropout": lambda model: setattr(model.drop, "p", 0.9),
    "another layer": replaced,
    "a parameter that no longer trains": lambda model: model.out.bias.requires_grad_(False),
    "a hook of a layer": lambda model: model.norm.register_forward_hook(lambda *given: given[2] * 2),
    "a hook of a parameter": lambda model: model.out.weight.register_hook(lambda gradient: gradient * 2),
    "a generator": lambda model: torch.rand(3, generator=model.generator),
}


@pytest.mark.parametrize("spoil", LEFT_BEHIND.values(), ids=LEFT_BEHIND.keys())
def test_what_training_leaves_in_the_module_does_not_reach_the_next_client(spoil: Callable[[Any], object]) -> None:
    runtime = spoiled_by(spoil)
    do(runtime, A)
    assert bits(do(runtime, B)) == bits(do(TaskRuntime(task_of(Net)), B))


CHANGED: dict[str, Callable[[Any], object]] = {
    "frozen tensor base.weight": lambda model: model.base.weight.data.add_(1.0),
    "frozen tensor base.bias": lambda model: setattr(model.base, "bias", nn.Parameter(torch.ones(4))),
    "integer buffer order": lambda model: model.order.copy_(model.order.flip(0)),
    "complex buffer turn": lambda model: setattr(model, "turn", model.turn * 2),
}


@pytest.mark.parametrize("named", CHANGED)
def test_a_change_that_would_be_lost_is_refused_by_its_name_and_does_not_reach_the_next_client(named: str) -> None:
    runtime = spoiled_by(CHANGED[named])
    with pytest.raises(BadTask, match=f"{named} was changed by training"):
        do(runtime, A)
    assert bits(do(runtime, B)) == bits(do(TaskRuntime(task_of(Net)), B))


def test_what_a_request_changed_before_it_was_withdrawn_does_not_reach_the_next_client() -> None:
    runtime = spoiled_by(CHANGED["frozen tensor base.weight"])
    calls = iter(range(10))
    with pytest.raises(Cancelled):
        runtime.do(request(measure=False), A, np.zeros(runtime.layout.size, np.float32), None,
                 cancelled=lambda: next(calls) > 0)  # fmt: skip
    assert bits(do(runtime, B)) == bits(do(TaskRuntime(task_of(Net)), B))


@pytest.mark.parametrize("name", ["scratch", "table", "kept"])
def test_a_tensor_that_stands_in_the_graph_of_the_request_before_stands_in_none(name: str) -> None:
    def spoil(model: Any) -> None:
        with torch.enable_grad():
            getattr(model, name).add_(model.out.bias.sum())

    runtime = spoiled_by(spoil)
    with contextlib.suppress(RuntimeError):  # the next step goes through a graph that is gone, as in plain torch
        do(runtime, A)
    assert bits(do(runtime, B)) == bits(do(TaskRuntime(task_of(Net)), B))


def test_a_train_of_the_tasks_own_is_named_where_it_changes_a_frozen_tensor() -> None:
    def train(model: Any, data: Any, context: Any) -> int:
        model.base.weight.data.zero_()
        return 24

    with pytest.raises(BadTask, match=r"frozen tensor base.weight was changed by train\(\)"):
        do(TaskRuntime(task_of(Net, train=train)), A)


def test_several_changed_tensors_are_named_up_to_three() -> None:
    def spoil(model: Any) -> None:
        for tensor in (model.base.weight, model.base.bias, model.order, model.turn):
            tensor.data.zero_()

    said = (
        "frozen tensor base.weight, frozen tensor base.bias, integer buffer order and 1 more were changed by training"
    )
    with pytest.raises(BadTask, match=said):
        do(spoiled_by(spoil), A)


def test_a_train_that_leaves_layers_in_another_type_does_not_reach_the_next_client() -> None:
    def train(model: Any, data: Any, context: Any) -> int:
        model.norm.double()
        return 24

    runtime = TaskRuntime(task_of(Net, train=train))
    do(runtime, A)
    runtime.task.module.train = None
    assert bits(do(runtime, B)) == bits(do(TaskRuntime(task_of(Net)), B))


def test_a_train_that_takes_a_tensor_out_of_the_model_is_refused_by_its_name() -> None:
    def train(model: Any, data: Any, context: Any) -> int:
        model.out = nn.Linear(4, 7)
        return 24

    with pytest.raises(BadTask, match=r"out.weight now has the shape \(7, 4\)"):
        do(TaskRuntime(task_of(Net, train=train)), A)


def test_measuring_leaves_nothing_for_the_training_after_it() -> None:
    measured, alone = TaskRuntime(task_of(Net)), TaskRuntime(task_of(Net))
    params = np.full(alone.layout.size, 0.1, np.float32)
    both = measured.do(request(), A, params, None)
    assert bits(both)[:3] == bits(alone.do(request(measure=False), A, params, None))[:3]


def test_a_model_that_is_another_each_time_is_refused_when_it_is_built_again() -> None:
    def drawn() -> nn.Module:
        made = Net()
        made.base.weight.data.copy_(torch.rand(4, 4, generator=torch.Generator().manual_seed(torch.seed() % 2**31)))
        return made

    runtime = spoiled_by(CHANGED["integer buffer order"])
    runtime.task.module.model = drawn
    with pytest.raises(BadTask, match="was changed by training"):
        do(runtime, A)
    with pytest.raises(BadTask, match="gives other tensors each time"):
        do(runtime, B)


def test_counters_and_running_statistics_go_on_as_they_did() -> None:
    runtime = TaskRuntime(task_of(Net))
    done = do(runtime, A)
    assert done.counters == {"norm.num_batches_tracked": 2}
    params = np.full(runtime.layout.size, 0.1, np.float32)
    again = runtime.do(request(counters=done.counters), A, params, done.buffers)
    assert again.counters == {"norm.num_batches_tracked": 4}
