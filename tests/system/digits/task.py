"""The digits example's model, on digits of its own making: no process that trains need import sklearn for them."""

from __future__ import annotations

import os
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from thinwire.client import ClientInfo, Split, held_out, own_part

IMAGES, CLASSES, PIXELS = 1797, 10, 64  # as many as in the example
NOISE = 0.3
STEP_S = float(os.environ.get("DIGITS_STEP_S", "0"))  # as in the example


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def data(client: ClientInfo) -> Split:
    """This client's part of a common set: each image is its class's one with noise."""
    drawn = np.random.default_rng(1)
    labels = drawn.integers(0, CLASSES, IMAGES)
    classes = drawn.random((CLASSES, PIXELS), np.float32)
    images = classes[labels] + NOISE * drawn.standard_normal((IMAGES, PIXELS), np.float32)
    pixels, digits = torch.from_numpy(images), torch.from_numpy(labels)
    train, test = held_out(own_part(labels, client), 0.2, client)
    return Split(TensorDataset(pixels[train], digits[train]), TensorDataset(pixels[test], digits[test]))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    pixels, digits = batch
    if STEP_S and model.training:
        time.sleep(STEP_S)
    return nn.functional.cross_entropy(model(pixels), digits)
