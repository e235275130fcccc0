"""The plan's section [local] in plain values: what a trainer and a task's own functions are given."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

THINWIRE, TASK, REFUSED = "Thinwire", "the function", "refused"  # who carries a key out


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


class Carried(NamedTuple):
    """Who carries out a key of [local] where the task has its own `optimizer()`, and where it has its own `train()`.

    The function finds the whole section in `local`. `values` are refused although others are carried out.
    """

    optimizer: str
    train: str
    values: tuple[Any, ...] = ()


CARRIED = {
    "lr": Carried(TASK, TASK),
    "steps": Carried(THINWIRE, TASK, ("auto",)),
    "epochs": Carried(THINWIRE, TASK),
    "min_steps": Carried(THINWIRE, REFUSED),
    "codec_threads": Carried(THINWIRE, THINWIRE),
    "batch": Carried(THINWIRE, TASK),
    "accumulate": Carried(THINWIRE, REFUSED),
    "optimizer": Carried(THINWIRE, REFUSED),
    "momentum": Carried(REFUSED, REFUSED),
    "weight_decay": Carried(TASK, REFUSED),
    "schedule": Carried(THINWIRE, REFUSED),
    "lr_warmup": Carried(THINWIRE, REFUSED),
    "lr_end": Carried(THINWIRE, REFUSED),
    "clip_grad": Carried(THINWIRE, REFUSED),
    "prox": Carried(THINWIRE, REFUSED),
    "buffers": Carried(THINWIRE, THINWIRE, ("frozen",)),
    "partial": Carried(THINWIRE, REFUSED),
    "overlap": Carried(THINWIRE, REFUSED),
    "durability": Carried(THINWIRE, THINWIRE),
}
OWN_LOOP = "the whole loop is the task's, and Thinwire cannot see whether train() does it"


def ignored(local: Local, defines: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """Give (what, why, try) for each request of [local] that nothing would carry out.

    `defines` are the names of the functions that the task has. A key with its default value requests nothing.
    """
    whole, own = "train" in defines, "optimizer" in defines
    for field in dataclasses.fields(local):
        value, carried = getattr(local, field.name), CARRIED[field.name]
        if value == field.default:
            continue
        said = f"[local] {field.name} = {_toml(value)}"
        if whole and (carried.train == REFUSED or value in carried.values):
            yield (
                f"{said} with a task that has its own train()",
                OWN_LOOP,
                f"leave {field.name} out of the plan, or train() out of the task",
            )
        elif not whole and local.optimizer == "task" and carried.optimizer == REFUSED:
            yield (
                f'{said} with optimizer = "task"',
                "optimizer() makes the whole optimizer",
                f"leave {field.name} out of the plan",
            )
    if own and not whole and local.optimizer != "task":
        yield (
            f"the task has its own optimizer(), and [local] optimizer = {_toml(local.optimizer)}",
            "optimizer() would never be called",
            '[local] optimizer = "task", or leave optimizer() out of the task',
        )
    if local.optimizer == "task" and not (own or whole):
        yield (
            '[local] optimizer = "task" with a task that has no optimizer(params, local)',
            "optimizer() makes the optimizer",
            '[local] optimizer = "sgd"',
        )


def _toml(value: Any) -> str:
    return "{ ... }" if isinstance(value, Mapping) else json.dumps(value)
