"""`cnn`: two convolutions and a linear layer on the data of `digits`, 25 354 parameters."""

from __future__ import annotations

from torch import nn

from benchmarks.accuracy_bytes.tasks.pooled import with_all_tests
from examples.digits import task
from thinwire.client import ClientInfo, Split

SIDE, CLASSES = 8, 10
NARROW, WIDE, GROUPS = 16, 32, 8

loss = task.loss


def model() -> nn.Module:
    """Conv 16, conv 32, GroupNorm, linear: no statistics of batches, which clients could not share."""
    return nn.Sequential(
        nn.Unflatten(1, (1, SIDE, SIDE)),
        nn.Conv2d(1, NARROW, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(NARROW, WIDE, 3, padding=1),
        nn.GroupNorm(GROUPS, WIDE),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(WIDE * SIDE * SIDE, CLASSES),
    )


def data(client: ClientInfo) -> Split:
    return with_all_tests(task.data, client)
