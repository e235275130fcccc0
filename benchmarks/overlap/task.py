"""The digits with an MLP that is wide enough to be long on its way: 1.1 M parameters, 4.5 MB as float32."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.accuracy_bytes.tasks.pooled import with_all_tests
from examples.digits import task
from thinwire.client import ClientInfo, Split

WIDE = 1024

loss = task.loss


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, 10))


def data(client: ClientInfo) -> Split:
    return with_all_tests(task.data, client)


def metrics(module: nn.Module, batch: list[torch.Tensor]) -> dict[str, tuple[float, float]]:
    pixels, digits = batch
    right = (module(pixels).argmax(1) == digits).sum().item()
    return {"accuracy": (float(right), float(len(digits)))}
