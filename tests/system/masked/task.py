"""The digits of the example on a client whose training a test can hold: it waits while the file $HOLD exists.

The images are read without importing sklearn, which eight processes at once would wait for.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from thinwire.client import ClientInfo, Split, held_out, own_part

HOLD = Path(os.environ.get("HOLD", "/dev/null/none"))
LOOK_S = 0.02


@functools.cache
def digits() -> TensorDataset:
    """Return all 1 797 images, and their classes."""
    package = importlib.util.find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    found = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    return TensorDataset(torch.tensor(found[:, :-1] / 16, dtype=torch.float32), torch.tensor(found[:, -1]).long())


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def data(client: ClientInfo) -> Split:
    pixels, classes = digits().tensors
    train, test = held_out(own_part(classes.numpy(), client), 0.2, client)
    return Split(TensorDataset(pixels[train], classes[train]), TensorDataset(pixels[test], classes[test]))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    while model.training and HOLD.exists():
        time.sleep(LOOK_S)
    pixels, classes = batch
    return nn.functional.cross_entropy(model(pixels), classes)
