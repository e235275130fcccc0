"""A task whose training is a wait: one matrix of `WAIT_PARAMS` parameters (10 000), to each of which `train` adds 0.001
after `WAIT_S` seconds (0).

The processes that load it get both numbers from their environment. Nothing is learned, so what a round takes beside the
wait is the work of the system. `benchmarks.noop_task` is the same without a wait, for simulations.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from thinwire.client import ClientInfo, Split

COLUMNS = 100
PARAMS = "WAIT_PARAMS"
WAIT = "WAIT_S"
NOTHING = TensorDataset(torch.zeros(1, 1), torch.zeros(1))


def model() -> nn.Module:
    """Return one matrix of `COLUMNS` columns that begins as zeros, so every process makes the same model."""
    made = nn.Linear(COLUMNS, int(os.environ.get(PARAMS, "10000")) // COLUMNS, bias=False)
    nn.init.zeros_(made.weight)
    return made


def data(_client: ClientInfo) -> Split:
    """Return one example, which `train` does not read."""
    return Split(NOTHING)


def loss(module: nn.Module, _batch: Any) -> torch.Tensor:
    """Return a number; nobody evaluates this task."""
    return next(module.parameters()).sum()


def train(module: nn.Module, _data: Any, _context: Any) -> int:
    """Wait, and change every parameter; return the number of examples."""
    time.sleep(float(os.environ.get(WAIT, "0")))
    with torch.no_grad():
        for values in module.parameters():
            values.add_(1e-3)
    return 1
