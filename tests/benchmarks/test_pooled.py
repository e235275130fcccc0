"""What every client of `benchmarks.accuracy_bytes` would measure alike is measured once, and only that."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.accuracy_bytes.tasks.pooled import once

HERE, THERE = [torch.tensor([1.0]), torch.tensor([3.0])], [torch.tensor([2.0]), torch.tensor([3.0])]


def model(weight: float) -> nn.Module:
    linear = nn.Linear(1, 1, bias=False)
    nn.init.constant_(linear.weight, weight)
    return linear


def test_the_same_parameters_and_examples_are_measured_once_and_others_again() -> None:
    assigned = list[tuple[float, float]]()

    def metrics(module: nn.Module, batch: list[torch.Tensor]) -> dict[str, tuple[float, float]]:
        assigned.append((float(next(module.parameters()).detach()), float(batch[0])))
        return {"loss": (assigned[-1][0] * assigned[-1][1], 1.0)}

    of = once(metrics)
    for module, batch in ((model(2.0), HERE), (model(2.0), THERE), (model(2.0), list(HERE)), (model(5.0), HERE)):
        assert of(module, batch)["loss"] == (float(next(module.parameters()).detach()) * float(batch[0]), 1.0)
    assert assigned == [(2.0, 1.0), (2.0, 2.0), (5.0, 1.0)]
    trained = model(5.0)
    nn.init.constant_(next(trained.parameters()), 7.0)
    assert of(trained, HERE)["loss"] == (7.0, 1.0), "in place, too"
