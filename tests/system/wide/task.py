"""The tests' digits with a wider layer: 76 810 parameters, whose plain updates are too large for one request."""

from __future__ import annotations

from torch import nn

from tests.system.digits.task import data, loss

__all__ = ["data", "loss", "model"]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 10))
