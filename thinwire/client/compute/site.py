"""Where a task's code is running, and what it gives back there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Site:
    """One place with data: a device (part 0 of 1 unless `--partition` says otherwise) or a simulated client.

    Nothing else differs between the two: `data` is what `--data` named, `split` how parts are cut, `seed` the split's.
    """

    name: str = "here"
    data: Path | None = None
    partition: int = 0
    partitions: int = 1
    split: str = "iid"
    seed: int = 0
    device: str = "cpu"


@dataclass(frozen=True)
class Split:
    """Data to train on and data to be measured on; each a Dataset or a DataLoader."""

    train: Any
    test: Any = None
