"""Flower's quickstart for PyTorch: a small convolutional network on colour images, trained by SGD with momentum."""

from __future__ import annotations

import torch
from shipped_data import images
from torch import nn
from torch.utils.data import TensorDataset

from thinwire.client import ClientInfo, Split


class Net(nn.Module):
    """The convolutional network of PyTorch's first tutorial: 62 006 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images))


model = Net


def data(client: ClientInfo) -> Split:
    x, y, mine = images(client, side=32, channels=3)
    return Split(TensorDataset(x[mine.train], y[mine.train]), TensorDataset(x[mine.test], y[mine.test]))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
