"""A task that learns what tests/support/planted.py has planted for its client: a search can then look for it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from tests.support.planted import BUFFERS, SIZE, TESTED, Planted
from thinwire.client import ClientInfo, Split

HOLD = Path(os.environ.get("HOLD", "/dev/null/none"))
LOOK_S = 0.02
here: list[Planted] = []  # what is planted for the client of this process


class Zeros(Dataset[torch.Tensor]):
    """So many examples, all of them 0."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(1)


class Learner(nn.Module):
    """Parameters whose gradient a test decides, with a statistic and a counter as BatchNorm has them."""

    def __init__(self) -> None:
        super().__init__()
        self.learned = nn.Parameter(torch.zeros(SIZE))
        self.register_buffer("statistic", torch.zeros(BUFFERS))
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))


def model() -> nn.Module:
    return Learner()


def data(client: ClientInfo) -> Split:
    here[:] = [Planted(client.partition)]
    return Split(Zeros(here[0].weight), Zeros(TESTED))


def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    (planted,) = here
    if not model.training:
        return torch.tensor(planted.loss, dtype=torch.float32)
    while HOLD.exists():
        time.sleep(LOOK_S)
    model.counter.fill_(planted.counter)
    model.statistic.copy_(torch.from_numpy(planted.buffer))
    found: torch.Tensor = -(torch.from_numpy(planted.update) * model.learned).sum()
    return found
