"""Handwritten digits: 1 797 images of 8 x 8 pixels, ten classes, and an MLP of 9 610 parameters."""

from __future__ import annotations

import functools
import importlib.util
import os
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import TensorDataset

from thinwire.client import ClientInfo, Split, held_out, own_part

STEP_S = float(os.environ.get("DIGITS_STEP_S", "0"))  # added to each training step: the demo has a slow client


@functools.cache  # in a simulation many clients share a process
def read_digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return scikit-learn's images and labels: its file is read, because to import scikit-learn takes a second."""
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("No module named 'sklearn': pip install scikit-learn", name="sklearn")
    table = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    return table[:, :-1], table[:, -1].astype(np.int64)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def data(client: ClientInfo) -> Split:
    """This client's part of the common set; a fifth of it is kept for measuring."""
    images, labels = read_digits()
    pixels, digits = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    train, test = held_out(own_part(labels, client), 0.2, client)
    return Split(TensorDataset(pixels[train], digits[train]), TensorDataset(pixels[test], digits[test]))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    pixels, digits = batch
    if STEP_S and model.training:
        time.sleep(STEP_S)
    return nn.functional.cross_entropy(model(pixels), digits)
