"""Local training of 200 clients at once, on the digits moved by a pixel: as small as a benchmark of privacy can be.

The digits of `examples/digits` are 1 797, too few for 200 clients. A fifth is kept for measuring, as it is. Of each
other image there are five: itself, and moved by one pixel in each direction. The clients share these, 24 each, drawn by
a seed. So some clients have images that were one image: the accuracy is that of fewer people than 200.

Each client makes full-batch steps of SGD from the same model, all clients in one product of stacked matrices. Per
client that is what `TorchTrainer` does with a batch of all examples (tests).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from thinwire.core.types import Vector

CLIENTS, EXAMPLES = 200, 24
PIXELS, HIDDEN, CLASSES = 64, 128, 10
SHAPES = ((HIDDEN, PIXELS), (1, HIDDEN), (CLASSES, HIDDEN), (1, CLASSES))
SIZE = sum(rows * columns for rows, columns in SHAPES)
MOVES = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))  # pixels down, pixels to the right


@dataclass(frozen=True)
class Digits:
    """Holds the clients' pixels (clients, examples, 64) and digits (clients, examples), and those for measuring."""

    pixels: torch.Tensor
    digits: torch.Tensor
    measured_pixels: torch.Tensor
    measured_digits: torch.Tensor

    def of(self, clients: Sequence[int]) -> Digits:
        """Return the examples of these clients alone."""
        return replace(self, pixels=self.pixels[list(clients)], digits=self.digits[list(clients)])


def digits_of(seed: int, clients: int = CLIENTS, examples: int = EXAMPLES) -> Digits:
    """Return the examples of all clients; ValueError if there are not as many."""
    from sklearn.datasets import load_digits  # each worker of the tests collects what imports this file

    images, labels = load_digits(return_X_y=True)
    rng = np.random.default_rng(seed)
    order, kept = rng.permutation(len(labels)), len(labels) // 5
    square = (images / 16).astype(np.float32).reshape(-1, 8, 8)
    padded = np.pad(square[order[kept:]], ((0, 0), (1, 1), (1, 1)))
    moved = np.concatenate([padded[:, 1 + down : 9 + down, 1 + right : 9 + right] for down, right in MOVES])
    if clients * examples > len(moved):
        raise ValueError(f"{clients} clients with {examples} examples each, of {len(moved)}")
    chosen = rng.permutation(len(moved))[: clients * examples].reshape(clients, examples)
    return Digits(
        torch.from_numpy(moved.reshape(-1, PIXELS)[chosen]),
        torch.from_numpy(np.tile(labels[order[kept:]], len(MOVES))[chosen]),
        torch.from_numpy(square[order[:kept]].reshape(-1, PIXELS)),
        torch.from_numpy(labels[order[:kept]]),
    )


def first_model(seed: int) -> Vector:
    """Return the first parameters of the network of `examples/digits`, flat."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(PIXELS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
    return np.asarray(nn.utils.parameters_to_vector(module.parameters()).detach().numpy(), dtype=np.float32)


def updates_of(params: Vector, data: Digits, steps: int, rate: float) -> NDArray[np.float32]:
    """Return what each client learns in so many steps from this model, (clients, parameters)."""
    clients, examples = data.digits.shape
    stacked = torch.from_numpy(params).expand(clients, SIZE)
    first, first_bias, second, second_bias = (tensor.clone() for tensor in _tensors(stacked))
    wanted = nn.functional.one_hot(data.digits, CLASSES).float()
    for _ in range(steps):
        hidden = torch.baddbmm(first_bias, data.pixels, first.transpose(1, 2))
        active = hidden.clamp(min=0)
        logits = torch.baddbmm(second_bias, active, second.transpose(1, 2))
        error = (torch.softmax(logits, 2) - wanted) / examples
        back = torch.bmm(error, second) * (hidden > 0)
        second -= rate * torch.bmm(error.transpose(1, 2), active)
        second_bias -= rate * error.sum(1, keepdim=True)
        first -= rate * torch.bmm(back.transpose(1, 2), data.pixels)
        first_bias -= rate * back.sum(1, keepdim=True)
    ends = torch.cat([tensor.flatten(1) for tensor in (first, first_bias, second, second_bias)], 1)
    return np.asarray(ends.numpy() - params, dtype=np.float32)


def accuracy(params: Vector, data: Digits) -> float:
    """Return the share of the measured digits that the model finds."""
    first, first_bias, second, second_bias = (tensor[0] for tensor in _tensors(torch.from_numpy(params)[None]))
    hidden = (data.measured_pixels @ first.T + first_bias).clamp(min=0)
    found = (hidden @ second.T + second_bias).argmax(1)
    return float((found == data.measured_digits).float().mean())


def _tensors(stacked: torch.Tensor) -> list[torch.Tensor]:
    ends = list(itertools.accumulate(rows * columns for rows, columns in SHAPES))
    parts = torch.tensor_split(stacked, ends[:-1], 1)
    return [part.reshape(len(stacked), *shape) for part, shape in zip(parts, SHAPES, strict=True)]
