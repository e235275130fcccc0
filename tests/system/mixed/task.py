"""Digits for a model with every kind of tensor that does not train, drawn at random: nobody else can guess them."""

from __future__ import annotations

import torch
from torch import nn

from tests.system.digits.task import data, loss

__all__ = ["data", "loss", "model"]


class Mixed(nn.Module):
    """Pixels in another order, some of them masked, turned in the complex plane; random features, some of which have
    a least value and the others -inf; BatchNorm.
    """

    order: torch.Tensor
    mask: torch.Tensor
    turn: torch.Tensor
    least: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.randperm(64))
        self.register_buffer("mask", torch.rand(64) < 0.8)
        self.register_buffer("turn", torch.polar(torch.ones(64), 6.28 * torch.rand(64)))
        self.features = nn.Linear(64, 64).requires_grad_(False)
        self.norm = nn.BatchNorm1d(64)
        self.out = nn.Linear(64, 10)
        self.register_buffer("least", torch.full((64,), 0.1).masked_fill(torch.rand(64) < 0.5, float("-inf")))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        turned = (pixels[:, self.order] * self.mask * self.turn).real
        found: torch.Tensor = self.out(self.norm(torch.maximum(self.features(turned), self.least)))
        return found


def model() -> nn.Module:
    return Mixed()
