"""Scikit-learn's breast cancer table as a federated task: 569 rows of 30 numbers, and a linear classifier.

No client may know the mean and the spread of the others' columns. So all of them divide by one typical value of each
column, which stands in the code.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import SGDClassifier
from torch.utils.data import TensorDataset

from thinwire.client import ClientInfo, Split, held_out, histogram, own_part
from thinwire.client.adapters import sklearn

TYPICAL = [
    14, 19, 92, 650, 0.1, 0.1, 0.09, 0.05, 0.18, 0.06, 0.4, 1.2, 2.9, 40, 0.007, 0.025, 0.03, 0.012, 0.02, 0.004,
    16, 26, 107, 880, 0.13, 0.25, 0.27, 0.11, 0.29, 0.08,
]  # fmt: skip


def read(client: ClientInfo) -> Split:
    """This client's rows; a fifth of them is kept for measuring."""
    rows, labels = load_breast_cancer(return_X_y=True)
    scaled = np.log(rows / TYPICAL + 0.1)
    train, test = held_out(own_part(labels, client), 0.2, client)
    return Split((scaled[train], labels[train]), (scaled[test], labels[test]))


model, data, loss, metrics, train = sklearn.task(
    SGDClassifier(loss="log_loss", alpha=0.001), read, features=30, classes=[0, 1]
)


def evaluate(model: torch.nn.Module, data: TensorDataset) -> dict[str, Any]:
    """The scores of the whole test split: all clients' together become `benign_auc` and `benign_f1`."""
    inputs, labels = data.tensors
    return {"benign": histogram(model(inputs).sigmoid()[:, 0], labels)}
