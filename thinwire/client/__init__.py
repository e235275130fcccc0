"""The program on a device: the task, its training, and exactly-once answers. Importing this imports no torch.

To be read in this order:

    service     what runs: a thread that pulls asks, and `loop`, which has them answered one by one
    session     one ask, one answer: what an answer comes to, step by step, stands in `answering/`
    outbox      why each answer counts exactly once (pure); `overlap` where training goes on meanwhile (pure)
    disk/       how a run's state is kept, so that a crash at any moment leaves it whole
    bench       where a task is worked on: here, or by `training/` in a process of its own, which runs `compute/`
    policy      what the device's owner allows; every ask is held against it in `owner/`
    link/       how the aggregator is called, however long it is away

The public names are the ones that a task's code uses; they are found when they are first asked for, so that the process
that trains imports nothing but `compute/`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.client.task import load_task
    from thinwire.client.train.partitions import held_out, own_part
    from thinwire.client.train.protocol import Site, Split
    from thinwire.client.train.task import LoadedTask

__all__ = ["LoadedTask", "Site", "Split", "held_out", "load_task", "own_part"]

_WHERE = {
    "LoadedTask": "thinwire.client.train.task",
    "Site": "thinwire.client.train.protocol",
    "Split": "thinwire.client.train.protocol",
    "held_out": "thinwire.client.train.partitions",
    "load_task": "thinwire.client.task",
    "own_part": "thinwire.client.train.partitions",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'thinwire.client' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
