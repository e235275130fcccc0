"""Scikit-learn's digits under a camera of its own for each client, and a small network with batch normalization.

Each client's images have another contrast and brightness. So the statistics of its activations differ from those of
the others, which is where FedBN helps (Li et al. 2021, "FedBN: Federated Learning on Non-IID Features via Local Batch
Normalization").
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from thinwire.client import ClientInfo, Split, held_out, own_part


class Network(nn.Module):
    """Images (N, 1, 8, 8) to the logits (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.second_norm = nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.head = nn.Linear(32 * 4, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = nn.functional.max_pool2d(self.first_norm(self.first(images)).relu(), 2)
        found = nn.functional.max_pool2d(self.second_norm(self.second(found)).relu(), 2)
        logits: torch.Tensor = self.head(found.flatten(1))
        return logits


@cache  # in a simulation many clients share a process
def read_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images of shape (1797, 1, 8, 8) with pixels from 0 to 1, and their digits."""
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("No module named 'sklearn': pip install scikit-learn", name="sklearn")
    table = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    return torch.tensor(table[:, :-1] / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(table[:, -1]).long()


def model() -> nn.Module:
    return Network()


def data(client: ClientInfo) -> Split:
    """This client's images as its own camera sees them; a fifth of them is kept for measuring."""
    images, digits = read_digits()
    draw = np.random.Generator(np.random.PCG64([client.seed, client.partition]))
    contrast, brightness = float(np.exp(draw.uniform(-1, 1))), float(draw.uniform(-1, 1))
    seen = contrast * images + brightness
    train, test = held_out(own_part(digits.numpy(), client), 0.2, client)
    return Split(TensorDataset(seen[train], digits[train]), TensorDataset(seen[test], digits[test]))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    images, digits = batch
    return nn.functional.cross_entropy(model(images), digits)
