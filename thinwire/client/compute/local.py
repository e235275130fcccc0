"""The plan's section [local] in plain values: what a trainer and a task's own functions are given."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple


class Work(NamedTuple):
    """How much is asked for; 0 steps: the plan decides (`epochs`)."""

    steps: int = 0
    batch: int = 32


@dataclass(frozen=True)
class Local:
    """The keys of `core/sections.py`, by the same names and with the same defaults (a test)."""

    lr: float
    steps: int | str | None = None
    epochs: float | None = None
    min_steps: int = 1
    codec_threads: int = 0
    batch: int = 32
    accumulate: int = 1
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: str = "constant"
    lr_warmup: float = 0.0
    lr_end: float = 0.0
    clip_grad: float | None = None
    prox: float = 0.0
    buffers: str = "average"
    partial: bool = False
    overlap: dict[str, Any] | None = None
    durability: str = "round"

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Local:
        """Of a plan's JSON; keys that a newer plan has are left out: what must be carried out is checked before."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})
