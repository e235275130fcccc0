"""Law: simulated clients share one module, and the run has the bits that it has with a module for each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.support.small_task import cross_entropy, examples, plan_of, task_of
from thinwire.client.executor import InProcessExecutor
from thinwire.client.train.protocol import ClientInfo, Split
from thinwire.simulation import simulate
from thinwire.simulation.client_pool import HandlerCache

FAR = 1000.0
PLAN = plan_of("steps = 2", "topk(0.3) > int8", "classic", run="rounds = 3")


class Remembering(nn.Module):
    """Counts its calls, keeps a running scale that no state dict has, and begins to train its bias at the third."""

    order: torch.Tensor
    scratch: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, [1.0]
        self.norm, self.out = nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.register_buffer("order", torch.randperm(4))
        self.register_buffer("scratch", torch.ones(()), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(float(inputs.mean()))
        self.scratch += 0.1 * inputs.mean()
        self.out.bias.requires_grad_(self.calls < 3)
        found: torch.Tensor = self.out(self.norm(inputs[:, self.order])) * self.scratch * (1 + 0.01 * sum(self.seen))
        return found


def data(client: ClientInfo) -> Split:
    return Split(examples(seed=client.partition), examples(6, 4))


def bits(task: Any) -> tuple[str, dict[str, float], list[dict[str, Any]]]:
    found = simulate(task, PLAN, clients=3)
    assert found.run.status == "done", found.run.status_text
    return found.run.model_digest, dict(found.metrics), [{**row, "seconds": 0} for row in found.records()]


def test_a_run_over_one_module_has_the_bits_of_a_run_with_a_module_for_each_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = bits(task_of(Remembering, data=data))

    load = HandlerCache._load

    def load_alone(here: HandlerCache, index: int, secure: bool) -> Any:
        here.executor = InProcessExecutor(here.executor.task, here.executor.device, here.executor.clock)
        return load(here, index, secure)

    monkeypatch.setattr(HandlerCache, "_load", load_alone)
    assert bits(task_of(Remembering, data=data)) == shared


def test_a_client_whose_training_changes_a_buffer_fails_and_leaves_the_others_as_one_that_raises() -> None:
    def spoils(model: Any) -> None:
        model.order.zero_()

    def raises(model: Any) -> None:
        raise ValueError

    def run(what: Callable[[Any], None]) -> tuple[str, dict[str, float], list[dict[str, Any]]]:
        def loss(model: Any, batch: Any) -> torch.Tensor:
            if model.training and batch[0].max() > FAR:
                what(model)
            return cross_entropy(model, batch)

        return bits(task_of(Remembering, data=marked, loss=loss))

    spoiled = run(spoils)
    assert all(row["failed"] for row in spoiled[2])
    assert spoiled == run(raises)


def marked(client: ClientInfo) -> Split:
    """The second client's inputs are far away."""
    split = data(client)
    inputs, targets = split.train.tensors
    return Split(TensorDataset(inputs + 2 * FAR * (client.partition == 1), targets), split.test)
