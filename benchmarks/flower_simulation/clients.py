"""A client of Flower's own simulation: gives back what came, or trains the digits MLP; what it reads it keeps."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

STEPS, BATCH, LR = 50, 32, 0.5
app = ClientApp()


@cache
def model() -> Any:
    import torch
    from torch import nn

    torch.set_num_threads(1)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


@cache
def data(part: int, parts: int) -> Any:
    import torch
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    mine = np.random.default_rng(1).permutation(len(labels))[part::parts]
    return torch.tensor(images[mine] / 16, dtype=torch.float32), torch.tensor(labels[mine])


def trained(arrays: ArrayRecord, part: int, parts: int) -> ArrayRecord:
    import torch

    net, (pixels, digits) = model(), data(part, parts)
    net.load_state_dict(arrays.to_torch_state_dict())
    optimizer = torch.optim.SGD(net.parameters(), LR)
    order = torch.randint(len(digits), (STEPS, BATCH))
    for drawn in order:
        optimizer.zero_grad()
        loss: Any = torch.nn.functional.cross_entropy(net(pixels[drawn]), digits[drawn])
        loss.backward()
        optimizer.step()
    return ArrayRecord(net.state_dict())


@app.train()
def train(message: Message, context: Context) -> Message:
    arrays = message.content.array_records["arrays"]
    if message.content.config_records["work"]["name"] != "noop":
        config = context.node_config
        arrays = trained(arrays, int(config["partition-id"]), int(config["num-partitions"]))
    metrics = MetricRecord({"num-examples": 1})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
