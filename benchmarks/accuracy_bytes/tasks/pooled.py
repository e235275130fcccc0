"""One test set for all clients: what each of them keeps for measuring, put together.

A round asks a fifth of the clients. If each of these measured on its own examples, an accuracy would tell mostly who
was asked; so every client measures on the examples of all, and a round's accuracy is the model's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.utils.data import TensorDataset

from thinwire.client import Site, Split

FOUND: dict[tuple[str, int, int, int | None], TensorDataset] = {}


def with_all_tests(data: Callable[[Site], Split], site: Site, most: int | None = None) -> Split:
    """This site's training data beside the test data of all sites, of each at most `most` examples."""
    key = (site.split, site.partitions, site.seed, most)
    if key not in FOUND:
        FOUND.clear()  # one run at a time
        parts = [data(replace(site, partition=number)).test.tensors for number in range(site.partitions)]
        FOUND[key] = TensorDataset(*(torch.cat([part[:most] for part in same]) for same in zip(*parts, strict=True)))
    return Split(data(site).train, FOUND[key])
