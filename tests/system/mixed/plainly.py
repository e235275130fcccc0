"""An exported model in plain torch."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.system.mixed.task import data, model
from thinwire.client import ClientInfo  # the data's parts, as the run cut them


def accuracy(file: Path, clients: int) -> float:
    """Over the test data of all clients. The model is drawn by another seed: nothing of it may be left."""
    torch.manual_seed(12345)
    net = model()
    net.load_state_dict(load_file(file))
    net.eval()
    right = count = 0
    with torch.no_grad():
        for part in range(clients):
            inputs, targets = data(ClientInfo(partition=part, partitions=clients)).test.tensors
            right += int((net(inputs).argmax(1) == targets).sum())
            count += len(targets)
    return right / count
