"""The model, the data and the loops of the app: PyTorch and scikit-learn, nothing of Flower or Thinwire."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH = 32


def model(hidden: int, seed: int = 0) -> nn.Module:
    """Return an MLP of two hidden layers: 1 126 410 parameters with 1024 units."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10)
    )  # fmt: skip


def data() -> tuple[TensorDataset, TensorDataset]:
    """Return the images for training and, a fifth of all, those for testing."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    pixels, digits = torch.tensor(images / 16, dtype=torch.float32)[order], torch.tensor(labels)[order]
    test = len(digits) // 5
    return TensorDataset(pixels[test:], digits[test:]), TensorDataset(pixels[:test], digits[:test])


def part(number: int, parts: int) -> TensorDataset:
    """Return one node's share of the training images."""
    train, _ = data()
    return TensorDataset(*train[number::parts])


def train(net: nn.Module, images: TensorDataset, epochs: int, lr: float, seed: int) -> float:
    """Train the model in place by SGD, and return the mean loss of the last epoch."""
    loader = DataLoader(images, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(seed))
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    total = 0.0
    for _ in range(epochs):
        total = 0.0
        for pixels, digits in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(pixels), digits)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / len(loader)


@torch.no_grad()
def accuracy(net: nn.Module) -> float:
    """Return the share of the test images that the model labels correctly."""
    _, test = data()
    pixels, digits = test[:]
    return float((net(pixels).argmax(1) == digits).float().mean())
