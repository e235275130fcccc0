"""A task without work: ten thousand parameters that come back as they went."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from thinwire.client import ClientInfo, Split

NOTHING = TensorDataset(torch.zeros(1, 1), torch.zeros(1))


def model() -> nn.Module:
    return nn.Linear(100, 100, bias=False)


def data(_client: ClientInfo) -> Split:
    return Split(NOTHING)


def loss(module: nn.Module, _batch: Any) -> torch.Tensor:
    return next(module.parameters()).sum()


def train(_module: nn.Module, _data: Any, _context: Any) -> int:
    return 1
