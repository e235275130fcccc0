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

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thinwire.client.compute.partitions import held_out, own_part
    from thinwire.client.compute.site import Site, Split
    from thinwire.client.compute.task import LoadedTask
    from thinwire.client.task import load_task

__all__ = ["LoadedTask", "Site", "Split", "held_out", "load_task", "own_part"]
AT = {
    "held_out": ".compute.partitions", "own_part": ".compute.partitions", "Site": ".compute.site",
    "Split": ".compute.site", "LoadedTask": ".compute.task", "load_task": ".task",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    import importlib

    if name not in AT:
        raise AttributeError(f"module 'thinwire.client' has no attribute {name!r}")
    return getattr(importlib.import_module(AT[name], __name__), name)
