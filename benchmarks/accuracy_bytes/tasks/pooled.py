"""One test set for all clients: what each of them keeps for measuring, put together.

A round selects a fifth of the clients. If each of these measured on its own examples, an accuracy would tell mostly who
was selected; so every client measures on the examples of all, and a round's accuracy is the model's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn
from torch.utils.data import TensorDataset

from thinwire.client import ClientInfo, Split

Metrics = dict[str, tuple[float, float]]
FOUND: dict[tuple[str, int, int, int | None], TensorDataset] = {}


def with_all_tests(data: Callable[[ClientInfo], Split], client: ClientInfo, most: int | None = None) -> Split:
    """This client's training data beside the test data of all sites, of each at most `most` examples."""
    key = (client.split, client.partitions, client.seed, most)
    if key not in FOUND:
        FOUND.clear()  # one run at a time
        parts = [data(replace(client, partition=number)).test.tensors for number in range(client.partitions)]
        FOUND[key] = TensorDataset(*(torch.cat([part[:most] for part in same]) for same in zip(*parts, strict=True)))
    return Split(data(client).train, FOUND[key])


def once(metrics: Callable[[nn.Module, list[torch.Tensor]], Metrics]) -> Callable[..., Metrics]:
    """The same metrics, computed once for the same parameters and examples: every client of a round requests them."""
    measured: dict[bytes, dict[bytes, Metrics]] = {}

    def of(model: nn.Module, batch: list[torch.Tensor]) -> Metrics:
        state, examples = _digest(list(model.state_dict().values())), _digest(batch)
        if state not in measured:
            measured.clear()  # one model at a time
        known = measured.setdefault(state, {})
        if examples not in known:
            known[examples] = metrics(model, batch)
        return known[examples]

    return of


def _digest(tensors: list[torch.Tensor]) -> bytes:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().data)
    return found.digest()
